"""Tokens drawn on the device are those that laneformer.infer.sampling draws from the same logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_rig import Rig

from laneformer.config import LaneConfig
from laneformer.infer.sampling import Sampling, draw
from laneformer.infer.weights import RankWeights
from laneformer.model import Laneformer
from laneformer.schedule import Schedule

SETTINGS = [
    Sampling(),
    Sampling(temperature=1.3, seed=3),
    Sampling(temperature=0.8, top_k=5, seed=2**63 - 5),
    Sampling(temperature=2.0, top_p=0.6, seed=11),
    Sampling(temperature=1.5, top_k=20, top_p=0.5, repetition_penalty=1.7, seed=12),
    Sampling(repetition_penalty=3.0),
]


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(5)
    config = LaneConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=10, vocab_size=333, num_lanes=2,
        max_position_embeddings=64,
    )  # fmt: skip
    model = Laneformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return RankWeights.from_model(model)


def rig_of(weights) -> Rig:
    return Rig(weights, Schedule.parse("silent", weights.config), 24)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_a_launch_of_many_tokens_draws_what_the_host_would(weights, sampling):
    rig = rig_of(weights)
    rig.memory.tensors["SEEN"][7] = 1
    tokens, logits = rig.run(7, 0, 6, sampling)
    seen = [7]
    for position, (token, row) in enumerate(zip(tokens, logits.numpy(), strict=True), 1):
        assert token == draw(row, sampling, position, seen)
        seen.append(token)
    assert len(tokens) == 6


def test_two_launches_go_on_where_one_would(weights):
    sampling = Sampling(temperature=1.0, top_k=9, seed=4)
    whole, _ = rig_of(weights).run(5, 0, 7, sampling)
    rig = rig_of(weights)
    first, _ = rig.run(5, 0, 3, sampling)
    second, _ = rig.run(first[-1], 3, 4, sampling)
    assert first + second == whole


def test_equal_logits_go_to_the_smallest_token(weights):
    rig = rig_of(weights)
    for head in weights.head_L:
        head[::2] = head[0]
    tokens, logits = rig.run(3, 0, 1)
    assert tokens == [int(np.argmax(logits[0].numpy()))]


def test_a_stop_id_ends_the_launch_after_its_token(weights):
    whole, _ = rig_of(weights).run(9, 0, 5, Sampling(temperature=1.0, seed=8))
    stop = whole[2]
    tokens, _ = rig_of(weights).run(9, 0, 5, Sampling(temperature=1.0, seed=8), stops=(332, stop))
    assert tokens == whole[: whole.index(stop) + 1]


def test_a_cancelled_launch_ends_after_a_token(weights):
    rig = rig_of(weights)
    rig.memory.tensors["CANCEL"][0] = 1
    tokens, _ = rig.run(9, 0, 5)
    assert len(tokens) == 1


def test_logits_that_are_no_numbers_are_an_error_code_and_no_hang(weights):
    rig = rig_of(weights)
    weights.norm_LD[0, 3] = torch.nan
    try:
        tokens, _ = rig.run(9, 4, 5)
    finally:
        weights.norm_LD[0, 3] = 1.0
    assert rig.shared.abort[0] == 2
    assert rig.shared.abort[4] == 5
    assert len(tokens) == 1


def test_a_wait_that_never_ends_is_given_up_and_says_where(weights):
    rig = rig_of(weights)
    # The kernel expects three signals more than there will be.
    rig.memory.tensors["TARGETS"][0] = 3
    rig.run(9, 0, 4)
    code, rank, program, place, seen, wanted = rig.shared.abort[:6].tolist()
    assert (code, rank, program, place, seen, wanted) == (1, 0, 0, 0, 1, 4)
    # Everybody leaves at the end of the token.
    assert rig.memory.tensors["RESULT"][0] == 1
