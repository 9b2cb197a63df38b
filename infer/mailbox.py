"""One-sided messages between the ranks of one machine, through memory they share.

Every rank has, for every sender, a ring of slots. A sender writes straight into the receiver's slot; the receiver
polls its own. The data is its own flag: a 32-bit word of zero means "not written yet", so a message is there when all
its words are non-zero, and a float of +0.0 travels as -0.0. Fresh memory is zero, hence armed. After reading, the
receiver zeroes the slot again. No word orders another, so no fence is needed for the data, on Arm neither.

What must be ordered is the re-use of a slot: message e + G goes where message e was, after its receiver has zeroed it.
With at most `m` messages sent and not yet landed per rank, a sender about to post e' has landed its peer's e' - m - 1,
which the peer posted after landing (and zeroing) everything up to e' - 2m - 2; so G >= 2m + 2 slots are enough. The
zeroing is ordered before the peer's later posts by a lock taken and released between them (a release store, then an
acquire of the same word).
"""

from __future__ import annotations

import os
import platform
import threading
import time
from typing import NamedTuple

import numpy as np

from laneformer.infer.limits import WAIT_LIMIT_S
from laneformer.infer.shared_memory import WAITING_FOR, Progress, SharedBlock, Status

# Words before the payload: the time of posting, one 64-bit word, for links with an emulated latency.
STAMP_WORDS = 2
MIN_GENERATIONS = 4
NEGATIVE_ZERO = np.uint32(0x80000000)
# Polls between two looks at the clock and the abort flag, and yields before a waiting rank starts to sleep.
POLLS_PER_CHECK = 32
YIELDS_BEFORE_SLEEP = 4000
NAP_S = 50e-6


class WaitTimeout(RuntimeError):
    """A message of rank `peer` (None: of some peer) did not come within the limit."""

    def __init__(self, text: str, peer: int | None = None) -> None:
        super().__init__(text)
        self.peer = peer


class RunAborted(RuntimeError):
    """Another rank, or the parent, ended the run."""


def generations(max_outstanding: int) -> int:
    """Slots of a ring for ranks that have at most `max_outstanding` messages under way."""
    return max(MIN_GENERATIONS, 2 * max_outstanding + 2)


def mailbox_bytes(ranks: int, slots: int, words: int) -> int:
    """Bytes of all mailboxes of a run, whose messages have at most `words` 32-bit words."""
    return ranks * ranks * slots * slot_words(words) * 4


def slot_words(words: int) -> int:
    """32-bit words of a slot for messages of at most `words`: an even number, so that every stamp is aligned."""
    return STAMP_WORDS + words + words % 2


class Views(NamedTuple):
    """All views for messages of one length: out [slot][peer], and words and floats in [peer][slot]."""

    out: list[list[np.ndarray]]
    words: dict[int, list[np.ndarray]]
    floats: dict[int, list[np.ndarray]]


class Mailbox:
    """This rank's end of all mailboxes. Messages are numbered alike on every rank: the n-th post meets the n-th wait.

    `latency_s` makes a message readable only that long after it was posted (an emulated link). `waited_s` sums the
    time spent in waits that were not over at first look.
    """

    def __init__(
        self,
        block: SharedBlock,
        status: Status,
        rank: int,
        ranks: int,
        slots: int,
        words: int,
        limit_s: float = WAIT_LIMIT_S,
    ) -> None:
        self.rank, self.ranks, self.slots, self.words, self.limit_s = rank, ranks, slots, words, limit_s
        self.status = status
        self.latency_s = 0.0
        self.waited_s = 0.0
        self.posted = 0
        self._row = status.row(rank)
        self.progress = Progress(status, rank)
        size = slot_words(words)
        every = block.array("<u4", Status.num_bytes(ranks), ranks * ranks * slots * size)
        # Indexed [receiver, sender, slot, word].
        self._every = every.reshape(ranks, ranks, slots, size)
        self.peers = [r for r in range(ranks) if r != rank]
        self._views: dict[int, Views] = {}
        stamps = self._every[..., :STAMP_WORDS].view(np.int64)
        self._stamps_out = [[stamps[peer, rank, s] for peer in self.peers] for s in range(slots)]
        self._stamps_in = {peer: [stamps[rank, peer, s] for s in range(slots)] for peer in self.peers}
        # x86 keeps stores in order; elsewhere a lock orders freeing a slot before the next post.
        self._fence = None if platform.machine() in ("x86_64", "AMD64") else threading.Lock()

    def _of_length(self, count: int) -> Views:
        """The views for messages of `count` words, made at their first use."""
        if count not in self._views:
            end, slots = STAMP_WORDS + count, range(self.slots)
            mine, theirs = self._every[self.rank], self._every[:, self.rank]
            self._views[count] = Views(
                out=[[theirs[peer, s, STAMP_WORDS:end].view(np.float32) for peer in self.peers] for s in slots],
                words={peer: [mine[peer, s, STAMP_WORDS:end] for s in slots] for peer in self.peers},
                floats={peer: [mine[peer, s, STAMP_WORDS:end].view(np.float32) for s in slots] for peer in self.peers},
            )
        return self._views[count]

    def post(self, payload: np.ndarray) -> int:
        """Pushes float32 [n] into every peer's slot; returns the message's number."""
        number = self.posted
        self.posted = number + 1
        # Counting is three times as fast here as all(); it takes -0.0 for zero, which is then only looked at again.
        if np.count_nonzero(payload) < len(payload):
            words = payload.view(np.uint32)
            payload = np.where(words == 0, NEGATIVE_ZERO, words).view(np.float32)
        slot = number % self.slots
        if self._fence is not None:
            with self._fence:
                pass
        for out in self._of_length(len(payload)).out[slot]:
            out[:] = payload
        if self.latency_s:
            now_ns = time.perf_counter_ns()
            for stamp in self._stamps_out[slot]:
                stamp[0] = now_ns
        return number

    def wait(self, number: int, peer: int, count: int) -> np.ndarray:
        """Waits for message `number` of `peer`; its float32 [count], in place: zero it to free the slot."""
        slot, views = number % self.slots, self._of_length(count)
        self._wait(views.words[peer][slot], peer, number)
        if self.latency_s:
            stamp = self._stamps_in[peer][slot]
            self._wait(stamp, peer, number)
            self._wait_until(int(stamp[0]) + int(self.latency_s * 1e9))
            stamp[0] = 0
        return views.floats[peer][slot]

    def take(self, number: int, peer: int, out: np.ndarray) -> None:
        """Waits for message `number` of `peer`, copies its payload into float32 `out` [n] and frees the slot."""
        message = self.wait(number, peer, len(out))
        out[:] = message
        message.fill(0)

    def _wait(self, message: np.ndarray, peer: int, number: int) -> None:
        size = len(message)
        if np.count_nonzero(message) == size:
            return
        began = time.perf_counter()
        self._row[WAITING_FOR] = peer + 1
        polls = 0
        while np.count_nonzero(message) < size:
            polls += 1
            if polls % POLLS_PER_CHECK == 0:
                self._check(began, peer, number)
            if polls < YIELDS_BEFORE_SLEEP:
                os.sched_yield()
            else:
                time.sleep(NAP_S)
        self._row[WAITING_FOR] = 0
        self.waited_s += time.perf_counter() - began

    def _wait_until(self, due_ns: int) -> None:
        """Waits out the emulated link."""
        now = began = time.perf_counter_ns()
        while now < due_ns:
            os.sched_yield()
            now = time.perf_counter_ns()
        self.waited_s += (now - began) * 1e-9

    def _check(self, began: float, peer: int, number: int) -> None:
        if self.status.aborted:
            raise RunAborted(f"rank {self.rank} stopped waiting for rank {peer}: the run was ended")
        waited = time.perf_counter() - began
        if waited > self.limit_s:
            raise WaitTimeout(
                f"rank {self.rank} waited {waited:.1f} s for message {number} of rank {peer}, "
                f"which was last seen {self.status.where(peer)}",
                peer,
            )
