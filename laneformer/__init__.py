"""Laneformer: lane-parallel transformers that sync rarely. Names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import KVCache as KVCache
    from .config import LaneConfig as LaneConfig
    from .model import Laneformer as Laneformer
    from .schedule import Schedule as Schedule

__version__ = "0.1.0"
_HOMES = {"Laneformer": "model", "LaneConfig": "config", "Schedule": "schedule", "KVCache": "cache"}
__all__ = ["KVCache", "LaneConfig", "Laneformer", "Schedule"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
