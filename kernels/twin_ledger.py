"""Who may rely on what: happens-before among the programs of all ranks, kept with vector clocks.

A program's clock counts what it did. Two things pass it on. A signal that was waited for passes on `seen`: what the
signaller wrote, or saw others write, may be read. A mailbox word that was landed passes on only `after`: the sender
had done so much before it sent, so that what it read by then may be overwritten, but its other writes may not be read.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from laneformer.kernels.plan import PlanError
from laneformer.kernels.plan_phases import Phase

Key = tuple[Any, ...]


class TwinError(PlanError):
    """The twin found a plan at fault; the message names phase, program, rank, buffer and the signal that is missing."""


class Actor(NamedTuple):
    """A program of a rank at work on a phase of a token."""

    index: int
    rank: int
    program: int
    token: int
    phase: Phase

    def __str__(self) -> str:
        return f"{self.phase.place}, program {self.program} of rank {self.rank}, token {self.token}"

    def waited(self) -> str:
        """What it has waited for, which did not suffice."""
        phase = self.phase
        if phase.waits_for is None or self.program >= phase.waiters:
            return "it waits for no signal"
        return f"it waits for {phase.target} arrivals of the token at {phase.waits_for}"


class Need(NamedTuple):
    """What a program waits for: a counter of its rank at a count, or mailbox words."""

    actor: Actor
    counter: str | None = None
    target: int = 0
    words: tuple[Key, ...] = ()


class Access(NamedTuple):
    """What an actor did to a region, at which tick of its clock."""

    actor: Actor
    tick: int

    def missing(self) -> str:
        """The signal that would have ordered it."""
        if self.actor.phase.signals is None:
            return f"any signal after {self.actor}"
        return f"the signal {self.actor.phase.signals} of {self.actor}"


@dataclass
class Region:
    """A part of a buffer that is written and read as a whole; `tag` says what it holds."""

    written: Access
    tag: Key
    readers: dict[int, Access] = field(default_factory=dict)
    adders: dict[int, Access] = field(default_factory=dict)

    @property
    def writers(self) -> tuple[Access, ...]:
        """Who has made it what it holds."""
        return (self.written, *self.adders.values())


@dataclass
class Word:
    """Words of a mailbox that are filled and re-armed together."""

    rearmed: Access | None = None
    tag: Key | None = None
    sent: Access | None = None
    after: np.ndarray | None = None


class Ledger:
    """The clocks, counters, regions and mailbox words of a run; counters are (rank, name)."""

    def __init__(self, programs: int) -> None:
        self.seen = np.zeros((programs, programs), dtype=np.int64)
        self.after = np.zeros((programs, programs), dtype=np.int64)
        self.signal_ticks: list[list[int]] = [[] for _ in range(programs)]
        self.counters: dict[tuple[int, str], list[tuple[np.ndarray, np.ndarray]]] = {}
        self.regions: dict[Key, Region] = {}
        self.words: dict[Key, Word] = {}

    def tick(self, q: int) -> int:
        """One more thing that a program did; its tick."""
        self.seen[q, q] += 1
        self.after[q, q] = self.seen[q, q]
        return int(self.seen[q, q])

    def write(self, actor: Actor, key: Key, tag: Key) -> None:
        """A region is overwritten: everybody who wrote or read it must be done. Raises TwinError."""
        tick, known = self.tick(actor.index), self.after[actor.index]
        old = self.regions.get(key)
        for access in () if old is None else (*old.writers, *old.readers.values()):
            if access.tick > known[access.actor.index]:
                raise TwinError(f"{actor} overwrites {name(key)} without having waited for {access.missing()}")
        self.regions[key] = Region(Access(actor, tick), tag)

    def read(self, actor: Actor, key: Key, tag: Key) -> None:
        """A region is read: it must hold `tag`, and its writer's signal must have been waited for. Raises TwinError."""
        tick, region = self.tick(actor.index), self.regions.get(key)
        if region is None:
            raise TwinError(f"{actor} reads {name(key)}, which nobody has written; {actor.waited()}")
        self._known(actor, "reads", key, region.writers)
        if region.tag != tag:
            raise TwinError(
                f"{actor} reads {name(key)}, which holds {region.tag} of {region.written.actor} and not {tag}; "
                f"{actor.waited()}"
            )
        region.readers[actor.index] = Access(actor, tick)

    def add(self, actor: Actor, key: Key, tag: Key) -> None:
        """Numbers are added to a region, by others too in any order, until it is read. Raises TwinError.

        It must hold `tag`, and whoever put that there must have been waited for; what nobody has written is zero.
        """
        tick = self.tick(actor.index)
        region = self.regions.setdefault(key, Region(Access(actor, 0), tag))
        self._known(actor, "adds to", key, (region.written,))
        if region.tag != tag:
            raise TwinError(
                f"{actor} adds to {name(key)}, which holds {region.tag} of {region.written.actor} and not {tag}"
            )
        for access in region.readers.values():
            raise TwinError(f"{actor} adds to {name(key)}, which {access.actor} has read already")
        region.adders[actor.index] = Access(actor, tick)

    def _known(self, actor: Actor, does: str, key: Key, accesses: tuple[Access, ...]) -> None:
        """Raises TwinError unless what was written has been seen."""
        for access in accesses:
            if access.tick > self.seen[actor.index, access.actor.index]:
                raise TwinError(f"{actor} {does} {name(key)} without having waited for {access.missing()}")

    def signal(self, actor: Actor, counter: str) -> None:
        """One more arrival; it passes on what this program and all earlier arrivals did and saw."""
        q = actor.index
        self.signal_ticks[q].append(self.tick(q))
        arrivals = self.counters.setdefault((actor.rank, counter), [])
        seen, after = self.seen[q].copy(), self.after[q].copy()
        if arrivals:
            seen, after = np.maximum(seen, arrivals[-1][0]), np.maximum(after, arrivals[-1][1])
        arrivals.append((seen, after))

    def arrived(self, rank: int, counter: str) -> int:
        """Arrivals at a counter since the beginning."""
        return len(self.counters.get((rank, counter), ()))

    def wait(self, actor: Actor, counter: str, target: int) -> None:
        """Takes over what the first `target` arrivals pass on, and no more: more is not what was waited for."""
        if target > 0:
            seen, after = self.counters[actor.rank, counter][target - 1]
            np.maximum(self.seen[actor.index], seen, out=self.seen[actor.index])
            np.maximum(self.after[actor.index], after, out=self.after[actor.index])

    def filled(self, key: Key) -> bool:
        """Whether words of a mailbox have arrived."""
        word = self.words.get(key)
        return word is not None and word.tag is not None

    def post(self, actor: Actor, key: Key, tag: Key) -> None:
        """Words are filled: they must be re-armed, and the sender must have heard of it. Raises TwinError."""
        tick, word = self.tick(actor.index), self.words.setdefault(key, Word())
        if word.tag is not None:
            raise TwinError(f"{actor} posts into {name(key)}, not re-armed: it still holds {word.tag}")
        if word.rearmed is not None:
            reader = word.rearmed.actor.index
            ticks = self.signal_ticks[reader]
            later = bisect_right(ticks, word.rearmed.tick)
            if later == len(ticks) or ticks[later] > self.after[actor.index, reader]:
                raise TwinError(
                    f"{actor} posts into {name(key)} without having heard that it was re-armed: "
                    f"it has landed nothing sent after {word.rearmed.missing()}"
                )
        word.tag, word.sent, word.after = tag, Access(actor, tick), self.after[actor.index].copy()

    def land(self, actor: Actor, key: Key, tag: Key, rearms: bool) -> None:
        """Words that have arrived are read, and re-armed if asked. Raises TwinError if of another message."""
        tick, word = self.tick(actor.index), self.words[key]
        if word.tag != tag or word.after is None or word.sent is None:
            raise TwinError(f"{actor} lands {name(key)} with {word.tag} of {word.sent and word.sent.actor}, not {tag}")
        np.maximum(self.after[actor.index], word.after, out=self.after[actor.index])
        if rearms:
            word.tag, word.rearmed = None, Access(actor, tick)


def name(key: Key) -> str:
    """A region's or a mailbox word's name: the buffer, its rank, and where in it."""
    buffer, rank, *where = key
    return f"{buffer} of rank {rank}" + (f" at {', '.join(map(str, where))}" if where else "")
