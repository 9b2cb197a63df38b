"""What counting alone predicts: n-gram models with interpolated, modified Kneser-Ney smoothing.

Shape suffixes: N positions of a token stream, U different n-grams, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Level:
    """The counts of all n-grams of one length, as sorted keys, and what belongs to their contexts."""

    context_keys: np.ndarray
    gram_keys: np.ndarray
    # By n-gram: its discounted count; by context: the sum of its counts, and what the discounts took from them.
    discounted: np.ndarray
    total: np.ndarray
    taken: np.ndarray


class NgramModel:
    """Interpolated Kneser-Ney with three discounts a level (Chen and Goodman 1999), over token ids below `vocab_size`.

    Documents lie between end tokens; a context reaches back to the end token before its document, which then fills
    the places that are left. Order 1 is the unigram model, over a uniform share.
    """

    def __init__(self, order: int, vocab_size: int, end_id: int = 0) -> None:
        if order < 1 or not 0 <= end_id < vocab_size:
            raise ValueError(f"order {order}, end token {end_id}: expected order >= 1, 0 <= end token < {vocab_size}")
        self.order, self.vocab_size, self.end_id = order, vocab_size, end_id
        self.levels: list[Level] = []

    def fit(self, tokens_N: np.ndarray) -> NgramModel:
        """Counts every token after the first of a stream that starts with the end token; returns the model."""
        columns = self._columns(tokens_N)
        contexts, context_keys = self._fitted_contexts(columns)
        keys = [contexts[length] * self.vocab_size + columns[0] for length in range(self.order)]
        levels: list[Level] = []
        # Only the longest n-grams count how often they occur; shorter ones count the tokens that they occur after.
        first, counts = slice(None), None
        for length in reversed(range(self.order)):
            gram_keys, where, counts = np.unique(keys[length][first], return_index=True, return_counts=True)
            first = where if isinstance(first, slice) else first[where]
            levels.append(_level(context_keys[length], gram_keys, counts, self.vocab_size))
        self.levels = levels[::-1]
        return self

    def nats(self, tokens_N: np.ndarray) -> float:
        """The negative log-likelihood of every token after the first, summed, in nats."""
        columns = self._columns(tokens_N)
        return float(-np.log(self._probability(columns)).sum())

    def bits_per_byte(self, tokens_N: np.ndarray, num_bytes: int) -> float:
        """The same in bits, by the UTF-8 bytes of the documents."""
        return self.nats(tokens_N) / math.log(2) / num_bytes

    def distribution(self, before: np.ndarray) -> np.ndarray:
        """The probability of each token [V] after a stream that starts with the end token."""
        after_V = np.arange(self.vocab_size)
        column = self._columns(np.append(before, 0))
        return self._probability([after_V, *(np.full(self.vocab_size, past[-1]) for past in column[1:])])

    def _columns(self, tokens_N: np.ndarray) -> list[np.ndarray]:
        """The targets [N - 1], then for each step back the token there, or the end token before the document."""
        if len(tokens_N) < 2 or tokens_N[0] != self.end_id:
            raise ValueError(f"expected a stream that starts with the end token {self.end_id} and holds another token")
        if int(tokens_N.max()) >= self.vocab_size:
            raise ValueError(f"the stream has token {int(tokens_N.max())}, the model {self.vocab_size} entries")
        position_N = np.arange(len(tokens_N), dtype=np.int32)
        start_N = np.maximum.accumulate(np.where(tokens_N == self.end_id, position_N, 0))
        # The end token that ends a document is predicted inside it.
        start_N, position_N = start_N[:-1], position_N[:-1]
        columns = [tokens_N[1:].astype(np.int64)]
        for back in range(self.order - 1):
            columns.append(tokens_N[np.maximum(position_N - back, start_N)].astype(np.int64))
        return columns

    def _fitted_contexts(self, columns: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The number of each position's context by length, and the sorted keys those numbers stand for.

        The key of a context is the number of the one that is a token shorter, and the token further back.
        """
        numbers, keys = [np.zeros(len(columns[0]), np.int64)], [np.zeros(1, np.int64)]
        for column in columns[1:]:
            key, number = np.unique(numbers[-1] * self.vocab_size + column, return_inverse=True)
            numbers.append(number.astype(np.int64))
            keys.append(key)
        return numbers, keys

    def _probability(self, columns: list[np.ndarray]) -> np.ndarray:
        """The probability of each target, from the shortest context to the longest that was seen."""
        if not self.levels:
            raise ValueError("the model has counted nothing yet; call fit first")
        probability_N = np.full(len(columns[0]), 1 / self.vocab_size)
        number_N = np.zeros(len(columns[0]), np.int64)
        for length, level in enumerate(self.levels):
            if length:
                number_N = np.where(number_N < 0, -1, number_N * self.vocab_size + columns[length])
                number_N = _find(level.context_keys, number_N)
            at_N = _find(level.gram_keys, np.where(number_N < 0, -1, number_N * self.vocab_size + columns[0]))
            count_N = np.where(at_N < 0, 0.0, level.discounted[at_N])
            mixed_N = (count_N + level.taken[number_N] * probability_N) / level.total[number_N]
            probability_N = np.where(number_N < 0, probability_N, mixed_N)
        return probability_N


def _find(keys_U: np.ndarray, wanted_N: np.ndarray) -> np.ndarray:
    """Where each wanted key lies among sorted ones, -1 where it does not."""
    at_N = np.minimum(np.searchsorted(keys_U, wanted_N), len(keys_U) - 1)
    return np.where(keys_U[at_N] == wanted_N, at_N, -1)


def _level(context_keys: np.ndarray, gram_keys: np.ndarray, counts_U: np.ndarray, vocab_size: int) -> Level:
    """One length's counts with its discounts taken off."""
    discount_U = discounts(counts_U)[np.minimum(counts_U, 3)]
    context_U = gram_keys // vocab_size
    size = len(context_keys)
    total = np.bincount(context_U, counts_U, size)
    return Level(context_keys, gram_keys, counts_U - discount_U, total, np.bincount(context_U, discount_U, size))


def discounts(counts_U: np.ndarray) -> np.ndarray:
    """What is taken off counts of 0, 1, 2 and 3 or more: equation 26 of Chen and Goodman (1999).

    A count that too few n-grams have for an estimate loses half of one.
    """
    n1, n2, n3, n4 = (int((counts_U == count).sum()) for count in range(1, 5))
    y = n1 / (n1 + 2 * n2) if n1 else 0.0
    found = [0.0]
    for count, now, above in ((1, n1, n2), (2, n2, n3), (3, n3, n4)):
        estimate = count - (count + 1) * y * above / now if now and above and y else 0.5
        found.append(estimate if 0 < estimate < count else 0.5)
    return np.array(found)
