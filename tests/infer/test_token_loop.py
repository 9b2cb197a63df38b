"""The loop for one token is run_schedule, bit for bit, whatever the schedule and the head."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from conftest import SIZES

from laneformer import LaneConfig, Schedule
from laneformer.infer.exchange import LocalExchange
from laneformer.infer.token_loop import LaneSteps, TokenLoop
from laneformer.lanes import InProcess, run_schedule
from laneformer.ops import rms_norm, tree_sum

SCHEDULES = ["checkpoint", "tensor-parallel", "delayed:1", "delayed:3", "delayed:2:early", "ladder", "silent"]
HEADS = {
    "replicate": {}, "sum before the norm": {"pre_norm_lane_agg": True}, "lane": {"lm_head_type": "lane"},
    "vocab_parallel": {"lm_head_type": "vocab_parallel", "vocab_size": 104}, "one lane": {"num_lanes": 1},
}  # fmt: skip


class Steps:
    """Modules, norm and head with random matrices, for streams [L, D]; a module depends on its token's angles."""

    def __init__(self, config):
        random = torch.Generator().manual_seed(1)
        lanes, hidden = config.num_lanes, config.hidden_size
        self.share = config.vocab_size if config.lm_head_type == "lane" else -(-config.vocab_size // lanes)
        self.config, self.modules = config, 2 * config.num_hidden_layers
        self.w = torch.randn(self.modules, lanes, hidden, hidden, generator=random) / hidden**0.5
        self.heads = torch.randn(lanes, self.share, hidden, generator=random)

    def module(self, n, lane, x_D, cos, sin):
        return torch.tanh(self.w[n][lane] @ x_D) * cos + sin

    def norm(self, x_D):
        return rms_norm(x_D, torch.ones(1), self.config.norm_eps)

    def product(self, lane, x_D):
        return self.heads[lane] @ x_D

    def of_lanes(self):
        """What the loop is given: a kernel for every lane."""
        lanes = range(self.config.num_lanes)
        modules = [[partial(self.module, n, lane) for lane in lanes] for n in range(self.modules)]
        return LaneSteps(modules, [self.norm for _ in lanes], [partial(self.product, lane) for lane in lanes])

    def products(self, x_LD):
        return torch.stack([self.product(lane, x_D) for lane, x_D in enumerate(x_LD)])

    def expected(self, schedule, x_LD, cos, sin):
        """The logits by run_schedule and the head's equations."""
        config = self.config

        def module(n, x_LD):
            return torch.stack([self.module(n, lane, x_D, cos, sin) for lane, x_D in enumerate(x_LD)])

        x_LD = run_schedule(schedule, config.num_lanes, x_LD, module, InProcess())
        normed = torch.stack([self.norm(x_D) for x_D in x_LD])
        if config.lm_head_type == "lane":
            return tree_sum(self.products(normed))
        if config.pre_norm_lane_agg:
            normed = self.norm(tree_sum(x_LD)).expand(config.num_lanes, -1)
        elif config.lm_head_type == "replicate":
            normed = (tree_sum(normed) / config.num_lanes).expand(config.num_lanes, -1)
        return self.products(normed).flatten()[: config.vocab_size]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("text", SCHEDULES)
def test_one_token_after_another_gives_the_bits_of_run_schedule(text, head):
    config = LaneConfig(**{**SIZES, **HEADS[head]})
    schedule, steps = Schedule.parse(text, config), Steps(config)
    loop = TokenLoop(schedule, config, config.num_lanes, LocalExchange())
    for token in range(3):
        embedding_D = torch.randn(config.hidden_size, generator=torch.Generator().manual_seed(token))
        cos, sin = torch.tensor(0.9 - token), torch.tensor(0.1 * token)
        loop.start(embedding_D)
        logits = loop.run(steps.of_lanes(), cos, sin)
        expected = steps.expected(schedule, embedding_D.expand(config.num_lanes, -1), cos, sin)
        assert logits.dtype == np.float32 and logits.shape == (config.vocab_size,)
        assert logits.tobytes() == expected.numpy().tobytes()
