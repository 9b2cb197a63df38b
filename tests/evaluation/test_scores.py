"""pass@k is what it says, and intervals hold what they should."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from laneformer.evaluation.scores import bootstrap, pass_at_k, score_pass_at_k, wilson


def test_pass_at_k_is_the_share_of_all_ways_to_choose_k_samples():
    for samples in range(1, 8):
        for correct in range(samples + 1):
            for k in range(1, samples + 1):
                chosen = list(combinations([True] * correct + [False] * (samples - correct), k))
                expected = sum(any(ways) for ways in chosen) / len(chosen)
                assert pass_at_k(samples, correct, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_refuses_what_it_cannot_estimate():
    with pytest.raises(ValueError, match="--samples 10"):
        pass_at_k(5, 1, 10)
    with pytest.raises(ValueError):
        pass_at_k(5, 6, 1)


def test_wilson_gives_the_textbook_numbers_and_stays_inside_zero_and_one():
    assert wilson(82, 164) == pytest.approx((0.4243, 0.5757), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    low, high = wilson(164, 164)
    assert low == pytest.approx(0.9771, abs=1e-4) and high == pytest.approx(1.0) and high <= 1.0


def test_a_bootstrap_interval_is_that_of_the_mean_over_problems():
    values = np.random.default_rng(1).random(400)
    low, high = bootstrap(values)
    error = values.std() / np.sqrt(len(values))
    assert (low, high) == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=2e-3)
    assert bootstrap(values) == (low, high)


def test_the_method_is_named_and_fits_the_samples():
    one = score_pass_at_k([(1, 1), (1, 0), (1, 0)], 1)
    assert one.mean == pytest.approx(1 / 3) and one.method.startswith("Wilson")
    assert (one.low, one.high) == wilson(1, 3)
    many = score_pass_at_k([(4, 1), (4, 0), (4, 4)], 2)
    assert many.mean == pytest.approx((0.5 + 0.0 + 1.0) / 3) and many.method.startswith("bootstrap")
    assert many.low <= many.mean <= many.high
