"""The plan carried out in plain PyTorch, program by program in a random order, with every signal checked.

All programs of all ranks are generators in one process. A program may go on once the counter it waits for has reached
its target, or the mailbox words it polls are there; which of those that may go on does, a seed decides. Whatever a
program reads must have been written by a program whose signal has reached it (kernels/twin_ledger.py). The control
words by which ranks stop alike are not carried out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laneformer.kernels.plan import Plan
from laneformer.kernels.plan_phases import Phase, token_phases
from laneformer.kernels.twin_draw import selects
from laneformer.kernels.twin_ledger import Actor, Ledger, Need, TwinError, name
from laneformer.kernels.twin_rank import Rank, Weights, World

if TYPE_CHECKING:
    from laneformer.kernels.launch import Settings

Phases = Callable[[Plan, int], tuple[Phase, ...]]


class Twin:
    """The ranks of a plan; weights: one Weights a rank, of one type, which the cache has too; sums are wide.

    phases: what the programs do, the plan's own phases unless a test changes them. generations: messages that a
    mailbox holds, likewise. sampling: how tokens are drawn, greedily unless given; what was fed so far counts as seen.
    A twin runs once.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Sequence[Weights],
        phases: Phases | None = None,
        generations: int | None = None,
        sampling: Settings | None = None,
    ) -> None:
        kinds = selects(sampling, plan.config.vocab_size)
        self.plan, self.phases = plan, phases or partial(token_phases, selects=kinds)
        self.ledger = Ledger(plan.ranks * plan.programs)
        self.world = World(plan, plan.generations if generations is None else generations, self.ledger, sampling)
        self.world.ranks += [Rank(self.world, rank, held) for rank, held in enumerate(weights)]
        self._planned: list[tuple[tuple[Phase, ...], dict[str, int]]] = []

    def run(self, tokens: Sequence[int], count: int | None = None, seed: int = 0) -> tuple[list[int], Tensor]:
        """The token drawn after each of `tokens`, then after each drawn one up to `count`; and logits [count, V].

        Raises TwinError at the first thing the plan does not order, and if all programs wait for one another.
        """
        self.world.tokens = list(tokens)
        count = len(tokens) if count is None else count
        order = random.Random(seed)
        running = [self._program(rank, p, count) for rank in self.world.ranks for p in range(self.plan.programs)]
        # Some programs are much slower than others, and others at another time.
        needs = [next(program, None) for program in running]
        step, speeds = 0, [1.0] * len(running)
        while any(need is not None for need in needs):
            if step % 97 == 0:
                speeds = [order.choice((1.0, 30.0, 1000.0)) for _ in running]
            ready = [q for q, need in enumerate(needs) if need is not None and self._met(need)]
            if not ready:
                raise TwinError(self._stuck([need for need in needs if need is not None]))
            q = order.choices(ready, [speeds[q] for q in ready])[0]
            needs[q] = next(running[q], None)
            step += 1
        return self._results(count)

    def _results(self, count: int) -> tuple[list[int], Tensor]:
        rows = []
        for t in range(count):
            for rank in range(1, self.plan.ranks):
                if not torch.equal(self.world.logits[0, t], self.world.logits[rank, t]):
                    raise TwinError(f"rank {rank} has other logits than rank 0 for token {t}")
            if len({token for (_, _, at), token in self.world.drawn.items() if at == t}) != 1:
                raise TwinError(f"programs have drawn different tokens after token {t}")
            rows.append(self.world.logits[0, t])
        return [self.world.drawn[0, 0, t] for t in range(count)], torch.stack(rows)

    def _met(self, need: Need) -> bool:
        if need.counter is not None and self.ledger.arrived(need.actor.rank, need.counter) < need.target:
            return False
        return all(self.ledger.filled(key) for key in need.words)

    def _stuck(self, needs: list[Need]) -> str:
        """What every program waits for that will never come; mailboxes say most, as others wait for who polls them."""
        need = next((need for need in needs if need.words), needs[0])
        if need.counter is not None:
            seen = self.ledger.arrived(need.actor.rank, need.counter)
            what = f"{need.target} arrivals at {need.counter}, which has {seen}"
        else:
            what = f"{name(next(key for key in need.words if not self.ledger.filled(key)))}, which nobody fills"
        return f"all {len(needs)} programs wait for one another: {need.actor} for {what}"

    def planned(self, token: int) -> tuple[tuple[Phase, ...], dict[str, int]]:
        """A token's phases, and the arrivals that every counter had before it."""
        while len(self._planned) <= token:
            before: dict[str, int] = {}
            if self._planned:
                earlier, before = self._planned[-1][0], dict(self._planned[-1][1])
                for phase in earlier:
                    if phase.signals:
                        before[phase.signals] = before.get(phase.signals, 0) + phase.arrivals
            self._planned.append((self.phases(self.plan, len(self._planned)), before))
        return self._planned[token]

    def _program(self, rank: Rank, p: int, count: int) -> Iterator[Need]:
        """One program: every phase of every token."""
        for token in range(count):
            phases, before = self.planned(token)
            for phase in phases:
                actor = Actor(rank.number * self.plan.programs + p, rank.number, p, token, phase)
                if phase.waits_for and p < phase.waiters:
                    need = Need(actor, phase.waits_for, before.get(phase.waits_for, 0) + phase.target)
                    yield need
                    self.ledger.wait(actor, phase.waits_for, need.target)
                else:
                    # Without a wait another program may still come first.
                    yield Need(actor)
                yield from rank.work(actor)
                if phase.signals and p < phase.arrivals:
                    self.ledger.signal(actor, phase.signals)
