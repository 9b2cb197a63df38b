"""Anonymous memory that the ranks of one run share: no name, so nothing can be left behind and no two runs can meet."""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np

WORDS_PER_RANK = 8
# A rank's words in the status block.
PROGRESS, WAITING_FOR, STAGE = 0, 1, 2
# What a rank is doing, its STAGE word.
STARTING, IDLE, BUSY = 0, 1, 2


class SharedBlock:
    """A zeroed block of `size` bytes behind a file descriptor that child processes inherit."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self._map = mmap.mmap(fd, size)

    @classmethod
    def create(cls, size: int) -> SharedBlock:
        """A new block; it vanishes with the last process that has it open, however that one ends."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("laneformer")
        else:
            with tempfile.TemporaryFile() as handle:
                fd = os.dup(handle.fileno())
        os.ftruncate(fd, size)
        return cls(fd, size)

    def array(self, dtype: str, offset: int, count: int) -> np.ndarray:
        """A view of `count` elements at a byte offset."""
        return np.frombuffer(self._map, dtype=dtype, count=count, offset=offset)

    def close(self) -> None:
        """Gives the descriptor back; the pages go when the last view does."""
        os.close(self.fd)


class Status:
    """What every rank of a run can see of every other: an abort flag, and each rank's progress.

    Progress counts modules since the start (token * modules + module), so it names layer and module. Words are
    single aligned 64-bit stores: each is read whole, and none is used to order anything else.
    """

    def __init__(self, block: SharedBlock, ranks: int, modules: int) -> None:
        self.modules = modules
        self._words = block.array("<i8", 0, (ranks + 1) * WORDS_PER_RANK).reshape(ranks + 1, WORDS_PER_RANK)

    @staticmethod
    def num_bytes(ranks: int) -> int:
        """Bytes of the block's head that the status takes."""
        return (ranks + 1) * WORDS_PER_RANK * 8

    @property
    def aborted(self) -> bool:
        """Whether some rank or the parent has ended the run."""
        return bool(self._words[-1, 0])

    def abort(self) -> None:
        """Tells every rank to leave."""
        self._words[-1, 0] = 1

    def row(self, rank: int) -> np.ndarray:
        """The words of one rank."""
        return self._words[rank]

    def stage(self, rank: int) -> int:
        """STARTING, IDLE or BUSY."""
        return int(self._words[rank, STAGE])

    def progress(self, rank: int) -> int:
        """Modules begun since the start."""
        return int(self._words[rank, PROGRESS])

    def waiting_for(self, rank: int) -> int | None:
        """The rank that `rank` waits for at this moment; the number of ranks where it is no one in particular."""
        word = int(self._words[rank, WAITING_FOR])
        return word - 1 if word else None

    def where(self, rank: int) -> str:
        """Where a rank was last seen, for people."""
        if self.stage(rank) == STARTING:
            return "while starting"
        return "at " + name_module(self.progress(rank) % (self.modules + 1), self.modules)


class Progress:
    """A rank's own progress word, moved on module by module."""

    def __init__(self, status: Status, rank: int) -> None:
        self._row = status.row(rank)
        self._cycle = status.modules + 1
        self._now = status.progress(rank)

    def at(self, module: int) -> None:
        """Notes for all who watch that the rank begins `module` of its current token (the head comes last)."""
        self._now += (module - self._now) % self._cycle or self._cycle
        self._row[PROGRESS] = self._now


def name_module(module: int, modules: int) -> str:
    """`layer 3 attention`, `layer 3 feed-forward`, or `the head` past the last module."""
    if module >= modules:
        return "the head"
    return f"layer {module // 2} {'feed-forward' if module % 2 else 'attention'}"
