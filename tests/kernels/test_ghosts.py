"""One rank among ghosts computes what it would among ranks with its own weights."""

from __future__ import annotations

import pytest
import torch
from planted_bugs import tiny_weights
from simulated_ranks import Ranks

from laneformer.config import LaneConfig
from laneformer.kernels.ghosts import ghost_peers
from laneformer.kernels.launch import RankLaunch
from laneformer.kernels.plan import DeviceShape, Plan, PlanError
from laneformer.schedule import Schedule


@pytest.mark.parametrize("text", ["tensor-parallel", "delayed:1", "ladder"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_rank_among_ghosts_decodes_as_among_its_equals(text, count):
    weights = tiny_weights(ranks=count, lanes=count)
    wanted, logits, _ = Ranks([weights[0]] * count, text, 8, 1, tile=1 << 16).run(5, 0, 3)
    config = weights[0].config
    plan = Plan(config, Schedule.parse(text, config), count, DeviceShape(1, tile=1 << 16, block_positions=4), 8)
    ranks = Ranks([weights[0]] * count, text, 8, 1, tile=1 << 16)
    cache, tables = ranks.caches[0], ranks.tables[0]
    launch = RankLaunch(plan, 0, weights[0], cache.k, cache.v, ghost_peers(plan), tables.cos, tables.sin, 2)
    launch.clear()
    launch.start(5, 0, 2, 1.0)
    assert list(launch.stream()) == wanted[:2]
    assert launch.finish() == (2, None)
    launch.start(wanted[1], 2, 1, 1.0, keep=True)
    assert launch.finish() == (1, None)
    assert torch.equal(launch.logits(), logits[2])


def test_sizes_that_cannot_be_shifted_are_refused():
    config = LaneConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=10, vocab_size=333, num_lanes=2,
        max_position_embeddings=64,
    )  # fmt: skip
    plan = Plan(config, Schedule.parse("silent", config), 2, DeviceShape(1), 8)
    with pytest.raises(PlanError, match="got 333 tokens"):
        ghost_peers(plan)
