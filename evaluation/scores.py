"""From counts of right samples to pass@k with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS, Z_95 = 10_000, 1.959963984540054


@dataclass(frozen=True)
class Score:
    """A mean over problems, the ends of its 95 % interval, and how they were found."""

    mean: float
    low: float
    high: float
    method: str


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that one of k samples is right, without bias from n >= k samples (arXiv 2107.03374, equation 1).

    It is 1 - C(n - c, k) / C(n, k) for n samples with c right ones. Raises ValueError for fewer samples than k.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be had from {samples} samples with {correct} right ones; give --samples {k}")
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - correct + 1, samples + 1))


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927): sensible also at 0 and 1."""
    share, z = successes / trials, Z_95
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of a mean over problems, from drawing problems again (percentiles)."""
    array = np.asarray(values)
    random = np.random.default_rng(seed)
    means = [array[random.integers(0, len(array), len(array))].mean() for _ in range(DRAWS)]
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def score_share(right: int, trials: int) -> Score:
    """A share of yes-or-no results."""
    return Score(right / trials, *wilson(right, trials), "Wilson, 95 %")


def score_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> Score:
    """pass@k over problems, each with its number of samples and of right ones."""
    if k == 1 and all(samples == 1 for samples, _ in counts):
        return score_share(sum(correct for _, correct in counts), len(counts))
    values = [pass_at_k(samples, correct, k) for samples, correct in counts]
    return Score(float(np.mean(values)), *bootstrap(values), f"bootstrap over problems, {DRAWS} draws, 95 %")
