"""Where two records of settings differ, so that whoever mixes them is told what to change."""

from __future__ import annotations

import json
from typing import Any


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two nested records, as JSON has them: `key was A, is B`, in the order of their keys."""
    if isinstance(before, dict) and isinstance(now, dict):
        inner = (differences(before.get(key), now.get(key), f"{name}.{key}".strip(".")) for key in {**before, **now})
        return [line for lines in inner for line in lines]
    old, new = json.dumps(before), json.dumps(now)
    return [] if old == new else [f"{name} was {_short(old)}, is {_short(new)}"]


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
