"""The loop over a schedule's modules: the one place where partials are kept, sent and landed.

Training and decoding run the same loop; what differs is the module function and the exchange they hand in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from .ops import tree_sum
from .schedule import Own, Schedule


class Exchange(Protocol):
    """How partials travel. Lanes of one process are the first dimension of what is handed in."""

    def post(self, module: int, partial_L: Tensor) -> None:
        """Sends this process's partials of `module`; returns before they arrive."""
        ...

    def land(self, module: int) -> Tensor:
        """The sum of `module`'s partials over all lanes, in the accumulation type; waits until it is complete."""
        ...

    def sum_lanes(self, x_L: Tensor) -> Tensor:
        """The sum of x over all lanes, at once."""
        ...

    def gather_lanes(self, x_L: Tensor) -> Tensor:
        """x of all lanes in lane order, [L, ...]."""
        ...


class ModelExchange(Exchange, Protocol):
    """What the model asks for beyond that, as it may be training."""

    def shared(self, x: Tensor) -> Tensor:
        """x, which every process has alike and feeds to its own lanes: in training their gradients add up."""
        ...


class InProcess:
    """The exchange of a process that owns every lane."""

    def __init__(self) -> None:
        self._posted: dict[int, Tensor] = {}

    def post(self, module: int, partial_L: Tensor) -> None:
        """Keeps the partials until they land."""
        self._posted[module] = partial_L

    def land(self, module: int) -> Tensor:
        """Their sum over lanes in the fixed tree order."""
        return tree_sum(self._posted.pop(module))

    def sum_lanes(self, x_L: Tensor) -> Tensor:
        """The sum over lanes in the fixed tree order."""
        return tree_sum(x_L)

    def gather_lanes(self, x_L: Tensor) -> Tensor:
        """x itself: all lanes are here."""
        return x_L

    def shared(self, x: Tensor) -> Tensor:
        """x itself: all lanes are here."""
        return x


def run_schedule(
    schedule: Schedule, num_lanes: int, x_L: Tensor, module: Callable[[int, Tensor], Tensor], exchange: Exchange
) -> Tensor:
    """The residual streams after all modules.

    x_L [l, ..., D] are the streams of the lanes of this process (l of the model's `num_lanes`), and
    `module(n, x_L)` gives their partials of module n in the same shape. Sums are formed in the accumulation type.
    """
    own_L: dict[int, Tensor] = {}
    totals: dict[int, Tensor] = {}
    for n, step in enumerate(schedule.steps):
        partial_L = module(n, x_L)
        if step.sends:
            exchange.post(n, partial_L)
            own_L[n] = partial_L
        if step.own is not Own.NONE:
            scale = step.own.scale(num_lanes)
            x_L = x_L + (partial_L if scale == 1.0 else partial_L * scale)
        for landing in step.lands:
            m = landing.module
            if m not in totals:
                totals[m] = exchange.land(m)
            arrived = totals[m] if landing.with_own else totals[m] - own_L[m].to(totals[m].dtype)
            x_L = x_L + arrived.to(x_L.dtype)
            if schedule.last_use[m] == n:
                del totals[m], own_L[m]
    return x_L
