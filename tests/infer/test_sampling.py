"""Drawing tokens: the right noise, the right probabilities, the right candidates, and the same draw everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest

from laneformer.infer.sampling import Sampling, candidates, draw, gumbel_noise, philox

# Random123 1.14, tests/kat_vectors: philox4x32 with 10 rounds, as counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
LOGITS = np.array([1.3, -0.7, 2.1, 0.0, 2.1, -3.0, 0.9, 1.7, -1.1, 0.4, 1.3], np.float32)


def words(text):
    return [int(word, 16) for word in text.split()]


def softmax(scores):
    weights = [math.exp(score - max(scores)) for score in scores]
    return np.array([weight / sum(weights) for weight in weights])


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_known_answers(counter, key, result):
    low, high = words(key)
    got = philox(np.array([words(counter), words(counter)], np.uint32).T, high << 32 | low)
    assert got.dtype == np.uint32
    assert got.T.tolist() == [words(result)] * 2


def counts_of(sampling, draws=1500):
    drawn = [draw(LOGITS, sampling, position) for position in range(draws)]
    return np.bincount(drawn, minlength=len(LOGITS))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.3])
@pytest.mark.parametrize("seed", [0, 12345678901234567890])
def test_draws_over_many_positions_follow_the_softmax(temperature, seed):
    counts = counts_of(Sampling(temperature, seed=seed))
    expected = softmax(LOGITS.astype(float) / temperature) * counts.sum()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 10 degrees of freedom: 29.6 is exceeded by one fair generator in a thousand. The seeds are fixed.
    assert chi_square < 29.6


def test_draws_over_many_seeds_at_one_position_follow_the_softmax_too():
    counts = np.bincount([draw(LOGITS, Sampling(1.0, seed=seed), 7) for seed in range(1500)], minlength=len(LOGITS))
    expected = softmax(LOGITS.astype(float)) * 1500
    assert ((counts - expected) ** 2 / expected).sum() < 29.6


def test_noise_is_independent_from_one_position_token_and_seed_to_the_next():
    ids = np.arange(1001)
    noise = {key: gumbel_noise(ids, *key) for key in ((5, 3), (5, 4), (6, 3), (5 + (1 << 32), 3))}
    tables = list(noise.values())
    for i, one in enumerate(tables):
        assert abs(one.mean() - 0.5772) < 0.15 and abs(one.var() - math.pi**2 / 6) < 0.3
        assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.1
        assert all(abs(np.corrcoef(one, other)[0, 1]) < 0.1 for other in tables[:i])


def test_the_noise_of_a_token_does_not_depend_on_which_candidates_come_with_it():
    whole = gumbel_noise(np.arange(37), 9, 4)
    for ids in ([3, 8, 36], [36, 3, 8], [0], [5, 5, 6]):
        np.testing.assert_array_equal(gumbel_noise(np.array(ids), 9, 4), whole[ids])


def naive_candidates(scores, top_k, top_p):
    """Top-k and then top-p, as one would explain them."""
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    kept = ranked[:top_k] if top_k else ranked
    share, chosen = 0.0, []
    for i, weight in zip(kept, softmax([scores[i] for i in kept]), strict=True):
        if share >= top_p:
            break
        chosen.append(i)
        share += weight
    return sorted(chosen)


@pytest.mark.parametrize("top_k", [0, 1, 2, 5, 11, 30])
@pytest.mark.parametrize("top_p", [1.0, 0.93, 0.5, 0.17, 1e-6])
def test_top_k_and_then_top_p_leave_what_a_naive_implementation_leaves(top_k, top_p):
    scores = LOGITS.astype(np.float64)
    assert candidates(scores, Sampling(1.0, top_k, top_p)).tolist() == naive_candidates(scores.tolist(), top_k, top_p)
    left = set(naive_candidates(scores.tolist(), top_k, top_p))
    assert {draw(LOGITS, Sampling(1.0, top_k, top_p), position) for position in range(300)} <= left


def test_among_the_candidates_draws_follow_the_renormalised_softmax():
    sampling = Sampling(0.8, top_k=5, top_p=0.7)
    left = naive_candidates((LOGITS.astype(float) / 0.8).tolist(), 5, 0.7)
    assert 1 < len(left) < 5
    counts = counts_of(sampling)
    expected = softmax(LOGITS[left].astype(float) / 0.8) * counts.sum()
    assert counts.sum() == counts[left].sum()
    assert ((counts[left] - expected) ** 2 / expected).sum() < 18.5


@pytest.mark.parametrize("penalty", [1.0, 1.4, 0.5])
def test_a_repetition_penalty_makes_seen_tokens_less_likely_on_either_side_of_zero(penalty):
    seen = [2, 5, 5, 7, 2, 3]
    expected = LOGITS.astype(np.float64)
    for i in set(seen):
        expected[i] = expected[i] / penalty if expected[i] > 0 else expected[i] * penalty
    for position in range(200):
        got = draw(LOGITS, Sampling(1.0, repetition_penalty=penalty, seed=4), position, seen)
        # The penalised logits themselves, through the same draw.
        assert got == int((expected + gumbel_noise(np.arange(11), 4, position)).argmax())


def test_ties_go_to_the_smallest_id():
    assert draw(LOGITS, Sampling(), 0) == 2
    assert candidates(np.zeros(9), Sampling(1.0, top_k=3)).tolist() == [0, 1, 2]
    assert candidates(np.zeros(9), Sampling(1.0, top_p=0.34)).tolist() == [0, 1, 2, 3]


def test_greedy_takes_the_largest_logit_after_the_penalty_and_ignores_seed_and_position():
    penalty = Sampling(repetition_penalty=3.0, seed=8)
    assert [draw(LOGITS, penalty, position, [2, 4]) for position in (0, 1, 99)] == [7, 7, 7]


def test_a_draw_is_a_function_of_logits_settings_seed_and_position_only():
    sampling = Sampling(1.1, top_k=7, top_p=0.95, seed=77)
    first = [draw(LOGITS, sampling, position) for position in range(50)]
    np.random.default_rng(0).random(99)
    assert [draw(LOGITS.copy(), sampling, position) for position in reversed(range(50))] == first[::-1]
    assert first != [draw(LOGITS, Sampling(1.1, 7, 0.95, seed=78), position) for position in range(50)]


@pytest.mark.parametrize(("settings", "text"), [
    ({"temperature": -0.1}, "temperature must be 0 (greedy) or above, got -0.1"),
    ({"temperature": math.nan}, "got nan"), ({"temperature": math.inf}, "got inf"),
    ({"top_k": -1}, "top_k must be 0 (off) or above, got -1"),
    ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"), ({"top_p": 1.1}, "got 1.1"),
    ({"top_p": math.nan}, "got nan"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"), ({"repetition_penalty": math.nan}, "got nan"),
    ({"seed": -1}, "seed must be at least 0"), ({"seed": 2**64}, "below 2**64"),
])  # fmt: skip
def test_settings_outside_their_range_are_refused_with_the_range(settings, text):
    with pytest.raises(ValueError) as error:
        Sampling(**settings)
    assert text in str(error.value)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7), Sampling(0.7, top_k=3, top_p=0.9)])
@pytest.mark.parametrize("bad", [[0.5, math.nan, 1.0], [-math.inf] * 3, [0.5, math.inf, 1.0]])
def test_logits_that_are_not_numbers_are_refused(bad, sampling):
    with pytest.raises(ValueError, match="the logits for position 6 are not numbers"):
        draw(np.array(bad, np.float32), sampling, 6)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.5)])
def test_a_token_of_minus_infinity_is_never_drawn(sampling):
    logits = np.array([-math.inf, -40.0, -math.inf, -41.0], np.float32)
    assert {draw(logits, sampling, position) for position in range(60)} <= {1, 3}
