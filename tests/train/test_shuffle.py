"""The order of samples: a permutation for each seed and epoch, the same in every version."""

from __future__ import annotations

import numpy as np
import pytest

from laneformer.train.shuffle import derived_seed, draws, permuted


@pytest.mark.parametrize("size", [1, 2, 3, 17, 64, 1000])
def test_each_epoch_is_a_permutation_of_its_own(size):
    epochs = [permuted(np.arange(size), size, seed=5, epoch=epoch).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(size)) for order in epochs)
    if size > 10:
        assert len({tuple(order) for order in epochs}) == 3
        assert permuted(np.arange(size), size, seed=6, epoch=0).tolist() != epochs[0]


def test_the_permutation_is_the_same_in_every_version():
    assert permuted(np.arange(11), 11, seed=3, epoch=2).tolist() == [1, 9, 8, 10, 2, 7, 0, 4, 3, 6, 5]
    large = permuted(np.arange(4), 2**40 + 7, seed=0, epoch=0)
    assert large.tolist() == [617216419816, 517082748679, 859485352522, 792820785203]


def test_several_permutations_at_once_give_what_each_gives_alone():
    sizes, seeds, epochs = np.array([17, 5, 1000, 1]), np.array([3, 2**64 - 5, 3, 0], np.uint64), np.array([0, 7, 1, 2])
    index = np.array([16, 2, 613, 0])
    alone = [
        int(permuted(np.array([i]), int(size), int(seed), int(epoch))[0])
        for i, size, seed, epoch in zip(index, sizes, seeds, epochs, strict=True)
    ]
    assert permuted(index, sizes, seeds, epochs).tolist() == alone


def test_every_place_gets_every_value_about_equally_often():
    size, repeats = 10, 1500
    counts = np.zeros((size, size))
    for seed in range(repeats):
        counts[np.arange(size), permuted(np.arange(size), size, seed, epoch=0).astype(int)] += 1
    expected = repeats / size
    # 81 degrees of freedom: six standard deviations above the mean is 81 + 6 sqrt(162).
    assert ((counts - expected) ** 2 / expected).sum() < 158


def test_draws_belong_to_their_whole_key_and_stay_the_same():
    assert draws(1, 2, 3) == draws(1, 2, 3)
    assert len({draws(1, 2, 3), draws(2, 1, 3), draws(1, 2, 4), draws(1, 2)}) == 4
    assert len(set(draws(1, 2, 3))) == 4
    assert [number >> 48 for number in draws(7, 2**64 - 1)] == [61995, 62015, 44010, 50854]
    mean = np.mean([[number / 2**64 for number in draws(5, n)] for n in range(2000)], 0)
    # The mean of 2,000 uniform numbers is off by more than 0.03 once in about a million times.
    assert (abs(mean - 0.5) < 0.03).all()


def test_seeds_for_different_names_differ():
    assert len({derived_seed(1, "code"), derived_seed(1, "prose"), derived_seed(2, "code")}) == 3
