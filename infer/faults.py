"""Faults on purpose: what a rank does at a given module, so that the handling of each can be tried for real."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

KINDS = ("raise", "exit", "stall")


@dataclass(frozen=True)
class Fault:
    """Rank `rank` does `kind` when it begins `module` for the `count`-th time (counted from 1)."""

    rank: int
    kind: str
    module: int
    count: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no fault {self.kind!r}; there are {', '.join(KINDS)}")


def plant(exchange: Any, fault: Fault) -> None:
    """Makes an exchange carry out the fault when its progress is noted."""
    note, seen = exchange.at, 0

    def at(module: int) -> None:
        nonlocal seen
        note(module)
        seen += module == fault.module
        if module == fault.module and seen == fault.count:
            commit(fault.kind)

    exchange.at = at


def commit(kind: str) -> None:
    """Raises, ends the process at once, or hangs."""
    if kind == "raise":
        raise ArithmeticError("a planted fault")
    if kind == "exit":
        os._exit(3)
    while True:
        time.sleep(3600)
