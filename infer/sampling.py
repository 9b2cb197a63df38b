"""From logits to a token: greedy, temperature, top-k, top-p and repetition penalty.

A draw depends only on (logits, settings, seed, position): the noise of token i at a position comes from a counter-based
generator, so every rank and every runner draws the same token. Shape suffixes: V vocabulary, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
MASK_32 = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; temperature 0 is greedy. Raises ValueError for settings outside their range."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be 0 (greedy) or above, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or above, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise ValueError(f"repetition_penalty must be above 0 (1 is off), got {self.repetition_penalty}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be at least 0 and below 2**64, got {self.seed}")


def philox(counter_4C: np.ndarray, seed: int) -> np.ndarray:
    """Philox-4x32-10 (Salmon et al., SC 2011): uint32 [4, C] from counters uint32 [4, C] and a 64-bit key."""
    c0, c1, c2, c3 = (word.astype(np.uint64) for word in counter_4C)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(PHILOX_ROUNDS):
        low = c0 * np.uint64(PHILOX_MULTIPLIERS[0])
        high = c2 * np.uint64(PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (high >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            high & MASK_32,
            (low >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            low & MASK_32,
        )
        k0, k1 = (k0 + PHILOX_WEYL[0]) & 0xFFFFFFFF, (k1 + PHILOX_WEYL[1]) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3)).astype(np.uint32)


def gumbel_noise(ids_C: np.ndarray, seed: int, position: int) -> np.ndarray:
    """Standard Gumbel noise, float64 [C], of each token id at a position."""
    blocks, where = np.unique(ids_C // 4, return_inverse=True)
    counter = np.zeros((4, len(blocks)), np.uint32)
    counter[0], counter[1] = blocks, position
    words = philox(counter, seed)[ids_C % 4, where]
    return -np.log(-np.log((words + 0.5) / 2.0**32))


def draw(logits_V: np.ndarray, sampling: Sampling, position: int, seen: Iterable[int] = ()) -> int:
    """The token for `position`; `seen` are the ids a repetition penalty applies to. Ties go to the smallest id.

    Raises ValueError for NaN or infinity among the logits, and when all are -infinity.
    """
    scores = logits_V.astype(np.float64)
    if sampling.repetition_penalty != 1.0:
        ids = np.unique(np.fromiter(seen, np.int64))
        held = scores[ids]
        # As Hugging Face does (arXiv 1909.05858): towards less likely on either side of zero.
        scores[ids] = np.where(held > 0, held / sampling.repetition_penalty, held * sampling.repetition_penalty)
    # The largest is NaN if any is.
    if not np.isfinite(scores.max()):
        raise ValueError(f"the logits for position {position} are not numbers; the model or its weights are broken")
    if sampling.temperature == 0:
        return int(scores.argmax())
    ids_C = candidates(scores / sampling.temperature, sampling)
    noise = gumbel_noise(ids_C, sampling.seed, position)
    return int(ids_C[(scores[ids_C] / sampling.temperature + noise).argmax()])


def candidates(scores_V: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The ids that top-k and then top-p leave, ascending."""
    ids = np.arange(len(scores_V))
    if 0 < sampling.top_k < len(ids):
        ids = np.lexsort((ids, -scores_V))[: sampling.top_k]
    if sampling.top_p < 1:
        order = ids[np.lexsort((ids, -scores_V[ids]))]
        weights = np.exp(scores_V[order] - scores_V[order[0]])
        before = np.concatenate(([0.0], np.cumsum(weights)[:-1]))
        ids = order[before < sampling.top_p * weights.sum()]
    return np.sort(ids)
