"""How are documents packed into rows of one length: which tokens a row holds, learns, and may attend to?

A row is a window of S + 1 tokens of a shard, of which the next window starts with the last, so that every token but a
shard's first is a target exactly once. Documents lie end to end; their numbers keep attention within each.

Shape suffix: S positions of a row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laneformer.data.shards import Shard
from laneformer.train.folders import ShardPlace
from laneformer.train.loss import IGNORED


@dataclass(frozen=True)
class Row:
    """One packed row, int64 [S] each: `documents_S` numbers the document that each input's target belongs to.

    The first `filled` positions hold text, the others padding; `masked` says that some of the text may be no target.
    """

    inputs_S: np.ndarray
    targets_S: np.ndarray
    documents_S: np.ndarray
    filled: int
    masked: bool


def num_windows(num_tokens: int, length: int) -> int:
    """How many windows of `length` targets a stream has; the last one may be shorter."""
    return -(-(num_tokens - 1) // length)


def document_numbers(ends: np.ndarray, start: int, count: int) -> np.ndarray:
    """For `count` inputs from token `start` on, the number of the document that each predicts, from 0, int64 [S].

    `ends` has one past each document's end token. An end token thus belongs to the document that it starts.
    """
    first, last = bisect_right(ends, start + 1), bisect_right(ends, start + count)
    numbers_S = np.zeros(count, np.int64)
    # The input in front of a document's first token; a document has a token at least, so no two agree.
    numbers_S[ends[first:last] - 1 - start] = 1
    return numbers_S.cumsum()


def padded_row(
    inputs: np.ndarray, targets: np.ndarray, documents: np.ndarray, length: int, pad: int, masked: bool = False
) -> Row:
    """A row from what it holds: behind it `pad` as inputs, no targets, and a document number of its own."""
    filled = len(inputs)
    if filled == length:
        return Row(inputs, targets, documents, filled, masked)
    rows = [np.full(length, fill, np.int64) for fill in (pad, IGNORED, int(documents[-1]) + 1)]
    for row, values in zip(rows, (inputs, targets, documents), strict=True):
        row[:filled] = values
    return Row(rows[0], rows[1], rows[2], filled, masked)


class Stream:
    """The tokens of an opened shard as rows."""

    def __init__(self, shard: Shard, pad: int) -> None:
        # Plain arrays over the same mapped memory: numpy's memmap class makes each small read several times slower.
        self.tokens, self.ends = np.asarray(shard.tokens), np.asarray(shard.documents)[:, 0]
        self.learn = None if shard.learn is None else np.asarray(shard.learn)
        self.pad = pad

    def row(self, window: int, length: int) -> Row:
        """Window number `window` of `length` targets."""
        start = window * length
        ids = self.tokens[start : start + length + 1].astype(np.int64)
        targets = ids[1:]
        if self.learn is not None:
            targets = np.where(self.learn[start + 1 : start + len(ids)], targets, IGNORED)
        documents = document_numbers(self.ends, start, len(targets))
        return padded_row(ids[:-1], targets, documents, length, self.pad, self.learn is not None)


class SourceWindows:
    """The windows of all shards of one source, numbered through."""

    def __init__(self, places: Sequence[ShardPlace], length: int) -> None:
        self.places, self.length = places, length
        self.firsts = np.cumsum([0, *(num_windows(place.info.num_tokens, length) for place in places)])
        self.count = int(self.firsts[-1])

    def find(self, window: int) -> tuple[ShardPlace, int]:
        """The shard that a window lies in, and its number there."""
        shard = int(np.searchsorted(self.firsts, window, side="right")) - 1
        return self.places[shard], window - int(self.firsts[shard])
