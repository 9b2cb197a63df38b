"""Which source does a sample come from? Weights of each source over the phases of a run, with no state.

Shape suffixes: N samples, K sources, M slots of a phase's table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from laneformer.config_json import ConfigError, nearest
from laneformer.train.shuffle import derived_seed, mixed

# Shares are rounded to 1/65536: the smallest weight in use, 0.0025, is off by a thousandth of itself.
SLOTS = 2**16
JITTER_BITS = 40


@dataclass(frozen=True)
class Phase:
    """One stretch of a run: the share of the steps at which it ends, and the weight of each source during it."""

    until: float
    weights: dict[str, float]

    def __post_init__(self) -> None:
        if not 0 < self.until <= 1:
            raise ConfigError(f"until is the share of the steps at which a phase ends, 0 to 1, got {self.until}")
        for source, weight in self.weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError(f"the weight of source {source} must be 0 or more, got {weight}")
        if not any(self.weights.values()):
            raise ConfigError(
                f"the phase until {self.until} gives no source a weight above 0; give one to at least one"
            )


def check_phases(phases: Sequence[Phase], sources: Sequence[str] | None = None) -> None:
    """Raises ConfigError for phases that do not end one after another and at 1, or name none of `sources`, if given."""
    ends = [phase.until for phase in phases]
    if not ends or ends[-1] != 1 or any(after <= before for before, after in pairwise(ends)):
        raise ConfigError(f"the phases end at {ends}; give ends that increase, the last one 1.0")
    for source in (name for phase in phases for name in phase.weights):
        if sources is not None and source not in sources:
            known = ", ".join(sources)
            raise ConfigError(
                f"no folder has text to learn of source {source!r}, only {known}{nearest(source, sources)}"
            )


def slot_counts(weights: Sequence[float], slots: int) -> list[int]:
    """How many of `slots` each weight gets: rounded by largest remainder, at least one for a weight above 0.

    Exact fractions: a sum of floats would depend on the version of Python.
    """
    total = sum(map(Fraction, weights), Fraction())
    quotas = [Fraction(weight) * slots / total for weight in weights]
    counts = [max(math.floor(quota), int(quota > 0)) for quota in quotas]
    while sum(counts) < slots:
        most = max(range(len(counts)), key=lambda k: quotas[k] - counts[k])
        counts[most] += 1
    while sum(counts) > slots:
        counts[max(range(len(counts)), key=lambda k: counts[k])] -= 1
    return counts


def slot_sources(counts: Sequence[int], seed: int) -> np.ndarray:
    """Which source each slot belongs to, int64 [M]: the slots of each spread evenly, with a jitter by the seed.

    Of n slots one lies in each n-th of the table, at a random place. A plain shuffle would leave a stretch of m samples
    off its shares by about sqrt(m); here it is off by at most one for each source and one more, so that short runs and
    single batches get what the weights say, and yet no fixed rhythm.
    """
    sources, places = [], []
    for source, count in enumerate(counts):
        numbers = np.arange(count, dtype=np.uint64)
        base = np.uint64(derived_seed(seed, str(source)))
        with np.errstate(over="ignore"):
            jitter = mixed(numbers + base) >> np.uint64(64 - JITTER_BITS)
        places.append(((numbers << np.uint64(JITTER_BITS)) + jitter) // np.uint64(max(count, 1)))
        sources.append(np.full(count, source, np.int64))
    return np.concatenate(sources)[np.argsort(np.concatenate(places), kind="stable")]


class Table:
    """One phase's slots: whose each is, and how many of its source's come before it."""

    def __init__(self, counts: Sequence[int], seed: int) -> None:
        self.source_M = slot_sources(counts, seed)
        self.count_K = np.array(counts, np.int64)
        self.before_M = np.empty_like(self.source_M)
        for source, count in enumerate(counts):
            self.before_M[self.source_M == source] = np.arange(count)

    def locate(self, position_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of the samples at positions of this phase, and how many of that source the phase took before."""
        round_N, slot_N = np.divmod(position_N, len(self.source_M))
        source_N = self.source_M[slot_N]
        return source_N, round_N * self.count_K[source_N] + self.before_M[slot_N]

    def taken(self, count: int) -> np.ndarray:
        """How many samples of each source lie among the phase's first `count`, int64 [K]."""
        rounds, rest = divmod(count, len(self.source_M))
        return rounds * self.count_K + np.bincount(self.source_M[:rest], minlength=len(self.count_K))


class Mixture:
    """Where in which source each sample of a run lies, computed from its position alone."""

    def __init__(
        self, phases: Sequence[Phase], sources: Sequence[str], total_samples: int, seed: int, slots: int = SLOTS
    ) -> None:
        check_phases(phases, sources)
        if total_samples < 1:
            raise ConfigError(f"a run takes at least one sample, got {total_samples}")
        # The last phase has no end of its own: a run that is prolonged goes on with it.
        self.starts = [0, *(round(phase.until * total_samples) for phase in phases[:-1])]
        self.tables = [
            Table(
                slot_counts([phase.weights.get(source, 0.0) for source in sources], slots), derived_seed(seed, str(n))
            )
            for n, phase in enumerate(phases)
        ]
        self._taken = [np.zeros(len(sources), np.int64)]
        for table, (start, end) in zip(self.tables, pairwise(self.starts), strict=False):
            self._taken.append(self._taken[-1] + table.taken(end - start))

    def locate(self, position_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each sample, and how many samples of that source come before it in the run, int64 [N] each."""
        source_N, index_N = np.empty_like(position_N), np.empty_like(position_N)
        phase_N = np.searchsorted(self.starts, position_N, side="right") - 1
        for phase in np.unique(phase_N):
            now = phase_N == phase
            source_N[now], index_N[now] = self.tables[phase].locate(position_N[now] - self.starts[phase])
            index_N[now] += self._taken[phase][source_N[now]]
        return source_N, index_N

    def taken(self, position: int) -> np.ndarray:
        """How many samples of each source come before this position of the run, int64 [K]."""
        phase = int(np.searchsorted(self.starts, position, side="right")) - 1
        return self._taken[phase] + self.tables[phase].taken(position - self.starts[phase])


def described(phases: Sequence[Phase], mixture: Mixture) -> list[Mapping[str, object]]:
    """The phases as JSON: the sample at which each starts, and its weights."""
    return [
        {"from": start, "weights": dict(sorted(phase.weights.items()))}
        for start, phase in zip(mixture.starts, phases, strict=True)
    ]
