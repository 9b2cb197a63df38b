"""Mixtures: shares that are exact, evenly spread, and go on within each source where a phase ends."""

from __future__ import annotations

import numpy as np
import pytest

from laneformer.train.mixture import SLOTS, Mixture, Phase, check_phases, slot_counts

SOURCES = ["chat", "code", "prose"]
PHASES = [
    Phase(0.3, {"code": 0.55, "prose": 0.45}),
    Phase(0.45, {"prose": 1.0}),
    Phase(1.0, {"code": 0.2, "prose": 0.3, "chat": 0.5}),
]


def mixture(phases=PHASES, total=1000, seed=3, slots=97):
    return Mixture(phases, SOURCES, total, seed, slots)


def test_slots_are_shared_by_largest_remainder_and_no_source_goes_without():
    assert slot_counts([1, 1, 1], 10) == [4, 3, 3]
    assert slot_counts([0.5, 0.3, 0.2], 7) == [4, 2, 1]
    assert slot_counts([1e-9, 0.0, 1.0], 9) == [1, 0, 8]
    # Two of the small ones are raised to one slot each, which the large one gives.
    assert slot_counts([0.97, 0.01, 0.01, 0.01], 10) == [7, 1, 1, 1]


def test_over_one_table_the_counts_are_exact():
    one = mixture([Phase(1.0, {"chat": 0.15, "code": 0.6, "prose": 0.25})], slots=1000)
    for start in (0, 1, 377, 123_456):
        source, _ = one.locate(np.arange(start, start + 1000))
        assert np.bincount(source).tolist() == [150, 600, 250]


def test_the_full_table_keeps_shares_to_its_resolution():
    weights = {"chat": 0.0025, "code": 0.6, "prose": 0.3975}
    source, _ = mixture([Phase(1.0, weights)], slots=SLOTS).locate(np.arange(SLOTS))
    np.testing.assert_allclose(np.bincount(source) / SLOTS, [0.0025, 0.6, 0.3975], atol=1 / SLOTS)


def test_each_sample_is_the_next_of_its_source_also_where_a_phase_ends():
    one, seen = mixture(), [0, 0, 0]
    sources, indices = one.locate(np.arange(1400))
    for position, (source, index) in enumerate(zip(sources.tolist(), indices.tolist(), strict=True)):
        if position % 23 == 0:
            assert one.taken(position).tolist() == seen
        assert index == seen[source], position
        seen[source] += 1
    # Both sides of each switch are reached, and rounds of the table too.
    assert min(seen) > 97


def test_each_phase_starts_at_its_share_of_the_run():
    sources, _ = mixture().locate(np.arange(1400))
    assert set(sources[:300]) == {1, 2} and set(sources[300:450]) == {2} and set(sources[450:]) == {0, 1, 2}
    assert 1 in sources[290:300] and 0 in sources[450:460]


def test_every_stretch_has_its_shares_to_within_a_few_samples():
    weights = [0.02, 0.35, 0.63]
    one = mixture([Phase(1.0, dict(zip(SOURCES, weights, strict=True)))], slots=SLOTS)
    taken = np.array([one.taken(position) for position in range(0, 5000, 7)])
    expected = np.arange(0, 5000, 7)[:, None] * np.array(weights)
    # At most one for the source itself and its share of one for each source.
    assert abs(taken - expected).max() < 2
    # A fixed rhythm would repeat the distance between two samples of a source.
    sources, _ = one.locate(np.arange(5000))
    assert len(set(np.diff(np.flatnonzero(sources == 0)))) > 20


def test_the_order_depends_on_seed_and_position_alone():
    whole = mixture().locate(np.arange(1400))
    parts = [mixture().locate(np.arange(start, start + 7)) for start in range(0, 1400, 7)]
    assert all(np.array_equal(whole[i], np.concatenate([part[i] for part in parts])) for i in (0, 1))
    assert not np.array_equal(whole[0], mixture(seed=4).locate(np.arange(1400))[0])
    assert not np.array_equal(whole[0][450:547], mixture(PHASES[2:]).locate(np.arange(97))[0])


def test_the_order_is_the_same_in_every_version():
    assert mixture().locate(np.arange(444, 460))[0].tolist() == [2, 2, 2, 2, 2, 2, 1, 0, 2, 0, 0, 2, 1, 2, 0, 0]


@pytest.mark.parametrize(
    ("until", "weights", "message"),
    [
        (0.0, {"a": 1.0}, "until is the share"),
        (1.2, {"a": 1.0}, "got 1.2"),
        (1.0, {"a": 1.0, "b": -0.5}, "weight of source b must be 0 or more, got -0.5"),
        (1.0, {"a": float("nan")}, "source a must be"),
        (1.0, {"a": 0.0}, "no source a weight above 0"),
        (1.0, {}, "no source a weight above 0"),
    ],
)
def test_a_phase_that_cannot_be_says_why(until, weights, message):
    with pytest.raises(ValueError, match=message):
        Phase(until, weights)


@pytest.mark.parametrize("ends", [[], [0.5], [0.5, 0.5, 1.0], [0.7, 0.5, 1.0], [1.0, 1.0]])
def test_phases_end_one_after_another_and_with_the_run(ends):
    with pytest.raises(ValueError, match="give ends that increase"):
        check_phases([Phase(end, {"code": 1.0}) for end in ends])


def test_an_unknown_source_names_the_nearest():
    with pytest.raises(ValueError, match=r"'cede', only chat, code, prose; did you mean code\?"):
        mixture([Phase(1.0, {"cede": 1.0})])
    with pytest.raises(ValueError, match="at least one sample, got 0"):
        mixture(total=0)
