"""The order of sums: whatever the number of ranks, the same tree over the lanes, bit for bit."""

from __future__ import annotations

import pytest
import torch

from laneformer.infer.sum_tree import SumTree
from laneformer.ops import tree_sum

SHARES = [(lanes, ranks) for lanes in range(1, 10) for ranks in range(1, lanes + 1) if lanes % ranks == 0]


def wild(lanes, dtype=torch.float32):
    """Numbers of very different sizes, so that another order of adding gives other bits."""
    random = torch.Generator().manual_seed(lanes)
    size = torch.exp(6 * torch.randn(lanes, 7, 13, generator=random))
    return (torch.randn(lanes, 7, 13, generator=random) * size).to(dtype)


def sums_of_ranks(tree, x_L, ranks):
    share = x_L.shape[0] // ranks
    return [tree.own(rank, x_L[rank * share : (rank + 1) * share]) for rank in range(ranks)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("lanes", "ranks"), SHARES)
def test_every_number_of_ranks_adds_the_lanes_in_the_order_of_one_process(lanes, ranks, dtype):
    x_L = wild(lanes, dtype)
    tree = SumTree.over(lanes, ranks)
    total = tree.finish(sums_of_ranks(tree, x_L, ranks))
    assert total.dtype == tree_sum(x_L).dtype
    assert torch.equal(total, tree_sum(x_L))


def test_the_numbers_of_these_tests_tell_one_order_from_another():
    x_L = wild(9)
    in_a_row = x_L[0]
    for lane in x_L[1:]:
        in_a_row = in_a_row + lane
    assert not torch.equal(in_a_row, tree_sum(x_L))
    assert not torch.equal(tree_sum(x_L.flip(0)[[0, 2, 1, 3, 4, 5, 6, 7, 8]]), tree_sum(x_L))


def test_a_rank_whose_lanes_are_no_single_subtree_sends_several_sums():
    tree = SumTree.over(6, 3)
    assert tree.nodes == (((0, 1), (1, 2)), ((2, 3), (3, 4)), ((4, 6),))
    assert tree.width == 2
    x_L = wild(6)
    sent = sums_of_ranks(tree, x_L, 3)
    assert [sums.shape[0] for sums in sent] == [2, 2, 1]
    assert torch.equal(sent[0], x_L[:2]) and torch.equal(sent[2][0], x_L[4] + x_L[5])
    expected = (x_L[0] + (x_L[1] + x_L[2])) + (x_L[3] + (x_L[4] + x_L[5]))
    assert torch.equal(tree.finish(sent), expected)


def test_rows_that_only_fill_a_message_up_to_the_widest_are_not_added():
    tree = SumTree.over(6, 3)
    x_L = wild(6)
    sent = sums_of_ranks(tree, x_L, 3)
    sent[2] = torch.cat((sent[2], torch.full_like(sent[2], torch.nan)))
    assert torch.equal(tree.finish(sent), tree_sum(x_L))


@pytest.mark.parametrize(("lanes", "ranks"), SHARES)
def test_every_lane_is_sent_exactly_once_by_the_rank_that_holds_it(lanes, ranks):
    share = lanes // ranks
    for rank, nodes in enumerate(SumTree.over(lanes, ranks).nodes):
        assert [lane for lo, hi in nodes for lane in range(lo, hi)] == list(range(rank * share, (rank + 1) * share))


@pytest.mark.parametrize(("lanes", "ranks", "fits"), [
    (6, 4, "[1, 2, 3, 6]"), (4, 0, "[1, 2, 4]"), (4, 8, "[1, 2, 4]"), (9, 2, "[1, 3, 9]"), (4, -2, "[1, 2, 4]"),
])  # fmt: skip
def test_ranks_that_cannot_share_the_lanes_equally_are_refused_with_those_that_can(lanes, ranks, fits):
    with pytest.raises(ValueError, match=f"{lanes} lanes cannot be shared equally by {ranks} ranks") as error:
        SumTree.over(lanes, ranks)
    assert str(error.value).endswith(f"ranks may be {fits}")
