"""Memory as the simulator's programs see it: at once and in order, or late and out of order as on a GPU.

The weak model follows the rules that GPUs promise and no more, so that code that leans on anything else fails in some
run. A program stands for a block of threads. Each rank has a view of memory; programs read the view of their rank.

- A plain store stays with its program and reaches each rank's view at some later time, words in any order, but always
  in the end. Stores of one program to one word keep their order; the views agree on the order of all stores to a word.
- A store is covered once its program has passed a block barrier: only then may another thread's release speak for it.
- A releasing atomic first takes the program's covered stores to every view (scope sys) or to its own rank's (gpu); cta
  takes them nowhere. It also takes along what programs of its rank released before at a narrower scope.
- A plain load gives, word by word, either what is in the view now or what the program last knew of the word, as caches
  and early loads do. An acquiring atomic makes the program know the whole view (sys), or what its own rank wrote or had
  come to know (gpu).
- Atomics and volatile loads are done in the view itself; a gpu atomic is seen by other ranks only later. They are
  relaxed unless they say otherwise.
- A program's own stores are seen by its own loads, except that until the next block barrier a plain load may still give
  the word before: another thread of the block may have stored it.

Not modelled: values out of thin air, two threads of a block that race, and what a program saw but never acquired being
passed on by its release.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from laneformer.kernels.memory_model import Named, Region, interpreter

# Chances: that a switch moves a delayed store on, that it moves only some of its words, that a load is stale.
DRIFT, PARTIAL, STALE = 0.3, 0.5, 0.5


@dataclass
class Delayed:
    """A store under way: words of one region, and for each rank the words that have not reached it."""

    program: int
    rank: int
    region: int
    places: np.ndarray
    values: np.ndarray
    orders: np.ndarray
    left: list[np.ndarray]
    covered: bool = False
    released: bool = False


class WeakMemory(Named):
    """Memory by the rules above, with the choices made by `rng`."""

    def __init__(self, regions: list[Region], ranks: int, rng: random.Random) -> None:
        super().__init__(regions)
        self.ranks, self.rng, self.random = ranks, rng, np.random.default_rng(rng.getrandbits(32))
        self.version, self.order = 0, 1
        self.views = [[region.raw.copy() for region in regions] for _ in range(ranks)]
        # When the store was made that a view's word (by its first byte) comes from, and which rank made it.
        self.stamps = [[np.zeros(region.raw.size, np.int64) for region in regions] for _ in range(ranks)]
        self.writers = [[np.full(region.raw.size, -1, np.int8) for region in regions] for _ in range(ranks)]
        self.known_to_rank = [0] * ranks
        self.delayed: list[Delayed] = []

    def start(self, programs: Sequence[Any]) -> None:
        """Every program knows memory as it is at the start."""
        sizes = [region.raw.size for region in self.regions]
        count = len(programs)
        self.known = [[region.raw.copy() for region in self.regions] for _ in range(count)]
        self.before = [[region.raw.copy() for region in self.regions] for _ in range(count)]
        self.own = [[np.zeros(size, np.int16) for size in sizes] for _ in range(count)]
        self.fresh = [[np.zeros(size, bool) for size in sizes] for _ in range(count)]

    def place(self, ptrs: np.ndarray, mask: np.ndarray, width: int) -> tuple[int, np.ndarray]:
        """(region, word numbers) of the masked addresses; region -1 where they are not simulated."""
        used = ptrs[mask]
        i = self.find(int(used[0])) if used.size else -1
        if i < 0:
            return -1, used
        offsets = used - np.uint64(self.regions[i].start)
        assert int(offsets.max()) < self.regions[i].raw.size, f"an access leaves {self.regions[i].name}"
        return i, (offsets // np.uint64(width)).astype(np.int64)

    def load(self, program: Any, ptrs: Any, mask: Any, other: Any, dtype: Any, volatile: bool) -> np.ndarray:
        """Present words if volatile; else each present or as last known."""
        ptrs, mask = np.broadcast_arrays(ptrs, mask)
        width = np.dtype(dtype).itemsize
        i, words = self.place(ptrs, mask, width)
        if i < 0:
            return interpreter().load(ptrs, mask, other, dtype)
        me, first = program.number, words * width
        present = self.views[program.rank][i].view(dtype)[words]
        known = self.known[me][i].view(dtype)
        own = self.own[me][i][first] > 0
        values = np.where(own, known[words], present)
        if not volatile:
            stale = self.random.random(words.shape) < STALE
            values = np.where(stale, known[words], values)
            torn = self.fresh[me][i][first] & (self.random.random(words.shape) < STALE)
            values = np.where(torn, self.before[me][i].view(dtype)[words], values)
            # A word once seen is not unseen; what may be torn stays in doubt.
            known[words[~torn]] = values[~torn]
        else:
            known[words] = values
        out = np.array(np.broadcast_to(other, ptrs.shape), dtype=dtype)
        out[mask] = values
        return out

    def store(self, program: Any, ptrs: Any, values: Any, mask: Any) -> None:
        """Delays a plain store."""
        ptrs, mask, values = np.broadcast_arrays(ptrs, mask, values)
        i, words = self.place(ptrs, mask, values.dtype.itemsize)
        if i < 0:
            if words.size:
                interpreter().store(ptrs, np.ascontiguousarray(values), mask)
            return
        # Of several values for a word in one store the last one counts, as in the interpreter.
        _, last = np.unique(words[::-1], return_index=True)
        keep = len(words) - 1 - last
        words, data = words[keep], values[mask][keep]
        me, first = program.number, words * data.dtype.itemsize
        known, before, fresh = (
            self.known[me][i].view(data.dtype),
            self.before[me][i].view(data.dtype),
            self.fresh[me][i],
        )
        anew = ~fresh[first]
        before[words[anew]] = known[words[anew]]
        known[words], fresh[first] = data, True
        self.own[me][i][first] += 1
        everybody = [np.ones(len(words), bool) for _ in range(self.ranks)]
        self.delayed.append(Delayed(me, program.rank, i, words, data, np.zeros(len(words), np.int64), everybody))
        self.version += 1

    def move(self, entry: Delayed, rank: int, some: np.ndarray) -> None:
        """Takes some words of a delayed store to a rank's view, older stores of the program to the same words first."""
        for older in self.delayed:
            if older is entry:
                break
            if older.program == entry.program and older.region == entry.region and older.left[rank].any():
                same = older.left[rank] & np.isin(older.places, entry.places[some])
                if same.any():
                    self.arrive(older, rank, same)
        self.arrive(entry, rank, some)

    def arrive(self, entry: Delayed, rank: int, some: np.ndarray) -> None:
        """Words reach a view, unless a later store has reached it before them."""
        some = some & entry.left[rank]
        unordered = some & (entry.orders == 0)
        count = int(unordered.sum())
        entry.orders[unordered] = np.arange(self.order, self.order + count)
        self.order += count
        width = entry.values.dtype.itemsize
        first = entry.places * width
        newer = some & (entry.orders > self.stamps[rank][entry.region][first])
        self.views[rank][entry.region].view(entry.values.dtype)[entry.places[newer]] = entry.values[newer]
        self.stamps[rank][entry.region][first[newer]] = entry.orders[newer]
        self.writers[rank][entry.region][first[newer]] = entry.rank
        if rank == entry.rank and entry.program >= 0:
            self.own[entry.program][entry.region][first[some]] -= 1
        entry.left[rank] = entry.left[rank] & ~some
        self.version += 1

    def atomic(self, program: Any, ptrs: Any, mask: Any, apply: Callable[[], Any], sem: str, scope: str) -> Any:
        """Releases, does the operation in the rank's view (all views if sys), acquires."""
        ptrs, mask = np.broadcast_arrays(ptrs, mask)
        if "release" in sem:
            self.release(program, scope)
        i = self.find(int(ptrs[mask].reshape(-1)[0])) if mask.any() else -1
        if i < 0:
            return apply()
        region, view = self.regions[i], self.views[program.rank][i]
        offsets = (ptrs[mask] - np.uint64(region.start)).astype(np.int64)
        for entry in list(self.delayed):
            if entry.program == program.number and entry.region == i:
                self.move(entry, program.rank, np.isin(entry.places * entry.values.dtype.itemsize, offsets))
        # The operation is done where the interpreter does it, on the tensor's own memory.
        region.raw[:] = view
        result = apply()
        changed = np.nonzero(region.raw != view)[0]
        view[:] = region.raw
        width = result.data.dtype.itemsize
        touched = np.unique(changed // width)
        self.spread(program, i, touched, region.raw.view(result.data.dtype)[touched].copy(), scope)
        self.known[program.number][i].view(result.data.dtype)[offsets // width] = (
            view.view(result.data.dtype)[offsets // width])  # fmt: skip
        if "acq" in sem:
            self.acquire(program, scope)
        return result

    def spread(self, program: Any, region: int, words: np.ndarray, values: np.ndarray, scope: str) -> None:
        """Makes an atomic's new values known to every rank, late if its scope is narrower than that."""
        if not len(words):
            return
        orders = np.arange(self.order, self.order + len(words))
        self.order += len(words)
        first = words * values.dtype.itemsize
        self.stamps[program.rank][region][first] = orders
        self.writers[program.rank][region][first] = program.rank
        left = [np.full(len(words), rank != program.rank) for rank in range(self.ranks)]
        entry = Delayed(-1, program.rank, region, words, values, orders, left, covered=True)
        self.delayed.append(entry)
        self.version += 1
        if scope == "sys":
            for rank in range(self.ranks):
                self.arrive(entry, rank, entry.left[rank])

    def release(self, program: Any, scope: str) -> None:
        """Takes covered stores to the views that the scope reaches."""
        if scope == "cta":
            return
        ranks = range(self.ranks) if scope == "sys" else [program.rank]
        for entry in list(self.delayed):
            mine = entry.program == program.number and entry.covered
            passed_on = scope == "sys" and entry.released and entry.rank == program.rank
            if mine or passed_on:
                entry.released = True
                for rank in ranks:
                    self.move(entry, rank, entry.left[rank])

    def acquire(self, program: Any, scope: str) -> None:
        """The program knows its rank's view from now on, or the part of it that the scope reaches."""
        if scope == "cta":
            return
        rank, me = program.rank, program.number
        if scope == "sys":
            self.known_to_rank[rank] = self.order
        for i in range(len(self.regions)):
            view, known, own = self.views[rank][i], self.known[me][i], self.own[me][i]
            width = 4 if view.size % 4 == 0 else 1
            take = np.ones(view.size // width, bool)
            heads = slice(None, None, width)
            if scope == "gpu":
                writer, stamp = self.writers[rank][i][heads], self.stamps[rank][i][heads]
                take = (writer == rank) | (stamp <= self.known_to_rank[rank])
            # A word of 8 bytes has its marks on its first half.
            held = own[heads] > 0
            held[1:] |= held[:-1] & self._wide(i)
            take &= ~held
            kind = np.dtype(f"u{width}")
            known.view(kind)[take] = view.view(kind)[take]

    def _wide(self, region: int) -> bool:
        return any(e.region == region and e.values.dtype.itemsize == 8 for e in self.delayed)

    def barrier(self, program: Any) -> None:
        """Covers the program's stores, which its loads see from now on."""
        for fresh in self.fresh[program.number]:
            fresh[:] = False
        for entry in self.delayed:
            if entry.program == program.number:
                entry.covered = True

    def ended(self, program: Any) -> None:
        """A program's stores arrive once it has ended."""
        for entry in list(self.delayed):
            if entry.program == program.number:
                entry.covered = True

    def drift(self) -> None:
        """Now and then something arrives somewhere."""
        if self.delayed and self.rng.random() < DRIFT:
            self.advance()
        if self.rng.random() < 0.05:
            self.delayed = [entry for entry in self.delayed if any(left.any() for left in entry.left)]

    def advance(self) -> None:
        """Takes a delayed store, or some of its words, to a view."""
        entry = self.rng.choice(self.delayed)
        rank = self.rng.randrange(self.ranks)
        some = entry.left[rank]
        if self.rng.random() < PARTIAL:
            some = some & (self.random.random(len(some)) < 0.5)
        if some.any():
            self.move(entry, rank, some)

    def settle(self) -> bool:
        """When all programs wait, what is under way arrives; False if there was nothing."""
        self.delayed = [entry for entry in self.delayed if any(left.any() for left in entry.left)]
        if not self.delayed:
            return False
        entry = self.rng.choice(self.delayed)
        for rank in range(self.ranks):
            if entry.left[rank].any():
                self.move(entry, rank, entry.left[rank])
        return True

    def finish(self) -> None:
        """Everything arrives, and tensors hold what rank 0 sees."""
        while self.settle():
            pass
        for region, view in zip(self.regions, self.views[0], strict=True):
            region.raw[:] = view
