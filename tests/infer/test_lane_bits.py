"""A lane's arithmetic gives the same bits whichever lanes are held with it: what lets any number of ranks agree.

Where memory starts decides in which order a CPU library adds, so sizes here put lanes at all kinds of addresses.
"""

from __future__ import annotations

import pytest
import torch

from laneformer.infer.exchange import LocalExchange
from laneformer.infer.forward import Forward
from laneformer.infer.weights import ALIGNMENT, RankWeights, aligned, aligned_lanes, empty_lanes

CAPACITY = 39
SIZES = {
    "narrow": {"hidden_size": 7, "head_dim": 6, "intermediate_size": 4 * 13},
    "grouped heads": {"hidden_size": 31, "num_attention_heads": 12, "head_dim": 10, "intermediate_size": 4 * 7},
    "wide head": {"hidden_size": 100, "head_dim": 34, "intermediate_size": 4 * 21},
    "half": {"hidden_size": 31, "torch_dtype": "bfloat16", "intermediate_size": 4 * 7},
    "tied": {"hidden_size": 13, "tie_word_embeddings": True},
}
# New positions of one pass after another: the sizes at which libraries take other paths.
PASSES = (3, 1, 2, 9, 1, 5, 1)


def partials(folder, lanes):
    """Every module's partials, and the head's products, of some lanes over several passes."""
    weights = RankWeights.load(folder, lanes)
    forward, found = Forward(weights, LocalExchange(), CAPACITY), []
    random = torch.Generator().manual_seed(3)
    for count in PASSES:
        start = forward.cache.length
        x_LSD = torch.randn(4, count, weights.config.hidden_size, generator=random)[list(lanes)].clone()
        rope, masks = (forward.cos_TE[start : start + count], forward.sin_TE[start : start + count]), {}
        for layer in range(3):
            found.append(forward.attention(layer, x_LSD, torch.arange(start, start + count), rope, masks))
            found.append(forward.feed_forward(layer, x_LSD))
        found.append(forward.head_product(forward.norm(x_LSD, weights.norm_LD)))
        forward.cache.advance(count)
    return found


@torch.inference_mode()
@pytest.mark.parametrize("sizes", SIZES)
def test_a_lane_gives_the_same_bits_alone_in_pairs_and_with_all_others(sizes, checkpoint):
    folder = checkpoint(**SIZES[sizes], sliding_window=5, swa_layers=(1,))
    every = partials(folder, range(4))
    for lanes in ((0,), (1,), (2,), (3,), (0, 1), (2, 3)):
        for i, (whole, part) in enumerate(zip(every, partials(folder, lanes), strict=True)):
            assert torch.equal(whole[list(lanes)], part), (lanes, PASSES[i // 7], i % 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lanes_are_packed_at_aligned_addresses_with_nothing_lost(dtype):
    lanes = empty_lanes((3, 5, 7), dtype)
    assert lanes.shape == (3, 5, 7) and lanes.dtype == dtype
    assert {lane.data_ptr() % ALIGNMENT for lane in lanes} == {0}
    values = torch.arange(105, dtype=dtype).view(3, 5, 7)
    moved = aligned_lanes(values)
    assert torch.equal(moved, values) and {lane.data_ptr() % ALIGNMENT for lane in moved} == {0}
    assert torch.equal(aligned(values[1]), values[1]) and aligned(values[1]).data_ptr() % ALIGNMENT == 0


def test_what_lies_right_already_is_not_copied():
    lanes = torch.zeros(3, 4, 16)
    assert aligned_lanes(lanes) is lanes
    assert aligned(lanes[2]).data_ptr() == lanes[2].data_ptr()
