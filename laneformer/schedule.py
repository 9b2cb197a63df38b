"""Which partials a lane adds now and which it sends, module by module: the one thing that tells the variants apart.

A module is one attention or one feed-forward block, n = 0..2N-1, even = attention. After computing its partial of
module n a lane adds `own` times that partial to its residual stream, then everything that step n lands. A landing
names the module whose sum over lanes arrives, and whether the lane's own partial is part of what it adds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import LaneConfig

TEXT_FORMS = "tensor-parallel, delayed:D, delayed:D:early, ladder, silent, checkpoint"


class Own(Enum):
    """The factor on a lane's own partial, added at once."""

    NONE = "none"
    ONE = "one"
    SQRT_LANES = "sqrt_lanes"

    def scale(self, num_lanes: int) -> float:
        """The factor as a number."""
        return {Own.NONE: 0.0, Own.ONE: 1.0, Own.SQRT_LANES: math.sqrt(num_lanes)}[self]


@dataclass(frozen=True)
class Landing:
    """Module `module`'s sum over lanes arrives; `with_own` says whether the lane adds its own share of it too."""

    module: int
    with_own: bool


@dataclass(frozen=True)
class Step:
    """What one module does to the stream: `own` factor now, `lands` afterwards, and whether its partial is sent."""

    own: Own
    lands: tuple[Landing, ...] = ()
    sends: bool = False


@dataclass(frozen=True)
class Schedule:
    """The steps of all 2N modules. Two schedules are equal when their steps are, whatever they were called."""

    steps: tuple[Step, ...]
    # For each module, the step at which its partial is last landed (itself when it never is).
    last_use: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.steps) < 2 or len(self.steps) % 2:
            raise ValueError(f"a schedule has two modules a layer, got {len(self.steps)} modules")
        landed: set[int] = set()
        for n, step in enumerate(self.steps):
            for landing in step.lands:
                m = landing.module
                if not 0 <= m <= n:
                    raise ValueError(f"module {n} lands module {m}, which is not computed yet (0..{n} are)")
                if not self.steps[m].sends:
                    raise ValueError(f"module {n} lands module {m}, which sends nothing")
                landed.add(m)
        lost = [n for n, step in enumerate(self.steps) if step.sends and n not in landed]
        if lost:
            raise ValueError(f"modules {lost} send a partial that nothing lands")
        last = list(range(len(self.steps)))
        for n, step in enumerate(self.steps):
            for landing in step.lands:
                last[landing.module] = n
        object.__setattr__(self, "last_use", tuple(last))

    @property
    def num_layers(self) -> int:
        """Layers N."""
        return len(self.steps) // 2

    @property
    def num_messages(self) -> int:
        """Partials each lane sends a token."""
        return sum(step.sends for step in self.steps)

    @property
    def max_outstanding(self) -> int:
        """The most messages a lane may have sent and not yet landed."""
        most = waiting = 0
        landed: set[int] = set()
        for step in self.steps:
            waiting += step.sends
            most = max(most, waiting)
            new = {landing.module for landing in step.lands} - landed
            waiting -= len(new)
            landed |= new
        return most

    @property
    def streams_stay_equal(self) -> bool:
        """Whether every lane's stream is the same throughout, as in standard tensor parallelism and ladder."""
        return all(step.own is Own.NONE and all(la.with_own for la in step.lands) for step in self.steps)

    @classmethod
    def tensor_parallel(cls, num_layers: int) -> Schedule:
        """Standard tensor parallelism: every module's sum over lanes is added at once; everybody waits 2N times."""
        return cls.delayed(num_layers, 0)

    @classmethod
    def delayed(cls, num_layers: int, delay: int, early: bool = False) -> Schedule:
        """Own partial now, the others' `delay` modules later (Kog, Delayed Tensor Parallelism, 2026).

        The first `delay` modules add sqrt(L) times their own, or with `early` the sum over lanes at once (the others'
        share of it lands a second time `delay` modules later, as the equations have it); the last `delay` send
        nothing. A delay of 0 is standard tensor parallelism, one of 2N (without `early`) is silent.
        """
        _check_layers(num_layers)
        limit = 2 * num_layers
        if not isinstance(delay, int) or isinstance(delay, bool) or not 0 <= delay <= limit:
            raise ValueError(f"a delay counts modules, 0..{limit} for {num_layers} layers, got {delay!r}")
        rules = ["early" if early else "silent"] * delay + ["late"] * (limit - delay)
        return cls(_steps(rules, delay))

    @classmethod
    def ladder(cls, num_layers: int) -> Schedule:
        """Ladder residual (arXiv 2501.06589): everything, own partial included, lands one module late."""
        _check_layers(num_layers)
        last = 2 * num_layers - 1
        steps = [Step(Own.NONE, (Landing(n - 1, True),) if n else (), True) for n in range(last)]
        return cls((*steps, Step(Own.NONE, (Landing(last - 1, True), Landing(last, True)), True)))

    @classmethod
    def silent(cls, num_layers: int) -> Schedule:
        """No communication between lanes: sqrt(L) times the own partial, always."""
        return cls.delayed(num_layers, 2 * num_layers)

    @classmethod
    def from_config(cls, config: LaneConfig) -> Schedule:
        """The schedule a checkpoint was trained with (its delay counts layers, so 2 modules each)."""
        layers = config.num_hidden_layers
        delay = min(config.broadcast_delay, layers)
        rules = []
        for layer in range(layers):
            for uses in (config.use_attention_comm, config.use_mlp_comm):
                if layer < delay:
                    rules.append("early" if config.use_early_comm else "silent")
                else:
                    rules.append("late" if uses else "silent")
        return cls(_steps(rules, 2 * delay))

    @classmethod
    def parse(cls, text: str, config: LaneConfig) -> Schedule:
        """A schedule from its text form for a model of `config`'s layers; raises ValueError with the forms."""
        name, *rest = text.strip().lower().replace("_", "-").split(":")
        plain = {"tensor-parallel": cls.tensor_parallel, "tp": cls.tensor_parallel, "ladder": cls.ladder,
                 "silent": cls.silent}  # fmt: skip
        if name in plain and not rest:
            return plain[name](config.num_hidden_layers)
        if name == "checkpoint" and not rest:
            return cls.from_config(config)
        if name == "delayed" and rest and rest[0].lstrip("-").isdigit() and rest[1:] in ([], ["early"]):
            return cls.delayed(config.num_hidden_layers, int(rest[0]), early=len(rest) == 2)
        raise ValueError(f"no schedule {text!r}; the forms are {TEXT_FORMS}")

    def __str__(self) -> str:
        """The text form that `parse` reads back, or a count of messages where none fits."""
        layers = self.num_layers
        if self == Schedule.tensor_parallel(layers):
            return "tensor-parallel"
        if self == Schedule.ladder(layers):
            return "ladder"
        if self == Schedule.silent(layers):
            return "silent"
        for delay in range(1, 2 * layers):
            for early in (False, True):
                if self == Schedule.delayed(layers, delay, early):
                    return f"delayed:{delay}" + (":early" if early else "")
        return f"custom ({self.num_messages} messages in {2 * layers} modules)"


def _check_layers(num_layers: int) -> None:
    if not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(f"a schedule needs at least 1 layer, got {num_layers!r}")


def _steps(rules: list[str], delay: int) -> tuple[Step, ...]:
    """Steps from each module's rule: `early` sums now, `silent` keeps to itself, `late` lands module n - delay."""
    landed_late = {n - delay for n, rule in enumerate(rules) if rule == "late"} if delay else set()
    steps = []
    for n, rule in enumerate(rules):
        # With no delay the own partial arrives with the others: one sum, no subtraction.
        if rule == "early" or (rule == "late" and delay == 0):
            steps.append(Step(Own.NONE, (Landing(n, True),), True))
        elif rule == "late":
            steps.append(Step(Own.ONE, (Landing(n - delay, False),), n in landed_late))
        else:
            steps.append(Step(Own.SQRT_LANES, (), n in landed_late))
    return tuple(steps)
