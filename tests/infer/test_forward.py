"""Decoding without kernels gives the golden logits, however the prompt is cut."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from laneformer import LaneConfig, Laneformer, Schedule
from laneformer.infer.engine import all_logits
from laneformer.infer.exchange import LocalExchange
from laneformer.infer.reference import TOLERANCE
from laneformer.infer.runners import EagerRunner
from laneformer.infer.weights import RankWeights

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(
    f"{path.parent.name}/{path.stem.removeprefix('expected').lstrip('-') or 'checkpoint'}"
    for path in GOLDEN.glob("*/expected*.safetensors")
)
# Ten times below the published 2e-4, and ten times above what float32 gives.
FLOAT32 = 2e-5
DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}
OTHER_FEATURES = [
    {"lm_head_type": "lane", "sliding_window": 5, "swa_layers": (0, 1, 2), "head_norms": True},
    {"lm_head_type": "vocab_parallel", "vocab_size": 104, "replicated_rmsn_scale": False},
    {"tie_word_embeddings": True, "pre_norm_lane_agg": True, "sliding_window": 7, "swa_layers": (1,)},
    {"num_lanes": 1, "tie_word_embeddings": True},
    {"torch_dtype": "bfloat16", "sliding_window": 1, "swa_layers": (2,)},
]


@functools.cache
def expected(name):
    folder, schedule = name.split("/")
    suffix = "" if schedule == "checkpoint" else f"-{schedule}"
    tensors = load_file(GOLDEN / folder / f"expected{suffix}.safetensors")
    return GOLDEN / folder, schedule.replace("delayed", "delayed:"), tensors["input_ids"].tolist(), tensors["logits"]


def eager(folder, capacity, dtype=torch.float32):
    return EagerRunner(RankWeights.load(folder, dtype=dtype), LocalExchange(), capacity)


def share_of_largest(got_SV, expected_SV):
    """The largest difference over the largest expected logit."""
    assert got_SV.shape == expected_SV.shape and got_SV.dtype == torch.float32
    return ((got_SV.double() - expected_SV).abs().max() / expected_SV.abs().max()).item()


def reference(folder, tokens, schedule="checkpoint"):
    """Float64 logits [S, V] of the model that decoding must agree with."""
    model = Laneformer.from_pretrained(folder, dtype=torch.float64, schedule=schedule)
    with torch.inference_mode():
        return model(torch.tensor([tokens]))[0]


def some_tokens(folder, count):
    vocabulary = LaneConfig.from_pretrained(folder).vocab_size
    return np.random.default_rng(count).integers(0, vocabulary, count).tolist()


@pytest.mark.parametrize("name", CASES)
def test_a_golden_checkpoint_gives_its_logits_at_every_split_of_prefill_and_decode(name):
    folder, schedule, tokens, logits = expected(name)
    runner = eager(folder, len(tokens))
    plan = Schedule.parse(schedule, runner.config)
    for prefill, chunk in ((48, 64), (48, 7), (1, 64), (13, 5), (47, 48)):
        assert share_of_largest(all_logits(runner, tokens, plan, prefill, chunk), logits) < FLOAT32, (prefill, chunk)


@pytest.mark.parametrize("changes", OTHER_FEATURES, ids=lambda changes: "-".join(changes))
@pytest.mark.parametrize("schedule", ["delayed:3", "ladder"])
def test_heads_norms_and_windows_give_the_logits_of_the_reference_model(changes, schedule, checkpoint):
    folder = checkpoint(**changes)
    tokens = some_tokens(folder, 37)
    runner = eager(folder, 39)
    plan = Schedule.parse(schedule, runner.config)
    for prefill, chunk in ((37, 11), (3, 2)):
        got = all_logits(runner, tokens, plan, prefill, chunk)
        assert share_of_largest(got, reference(folder, tokens, schedule)) < FLOAT32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["dtp-delay2-swa/checkpoint", "lane-head/checkpoint"])
def test_half_precision_stays_within_the_tolerance_of_its_gate(name, dtype):
    folder, schedule, tokens, logits = expected(name)
    runner = eager(folder, len(tokens), DTYPES[dtype])
    got = all_logits(runner, tokens, Schedule.parse(schedule, runner.config), 13)
    assert FLOAT32 < share_of_largest(got, logits) < TOLERANCE[dtype]


def test_a_forgotten_cache_leaves_no_trace():
    folder, schedule, tokens, logits = expected("dtp-delay2-swa/checkpoint")
    runner = eager(folder, len(tokens))
    plan = Schedule.parse(schedule, runner.config)
    all_logits(runner, tokens[::-1], plan, 11)
    assert share_of_largest(all_logits(runner, tokens, plan, 5, 2), logits) < FLOAT32


def test_a_capacity_beyond_the_need_changes_no_value():
    folder, schedule, tokens, logits = expected("dtp-delay2-swa/checkpoint")
    for capacity in (48, 49, 131):
        runner = eager(folder, capacity)
        got = all_logits(runner, tokens, Schedule.parse(schedule, runner.config), 17)
        assert share_of_largest(got, logits) < FLOAT32


def test_logits_can_be_had_for_as_many_tokens_as_the_model_has_positions(checkpoint):
    folder = checkpoint(max_position_embeddings=23)
    tokens = some_tokens(folder, 23)
    runner = eager(folder, 23)
    got = all_logits(runner, tokens, Schedule.parse("checkpoint", runner.config), 12)
    assert share_of_largest(got, reference(folder, tokens)) < FLOAT32


def test_every_schedule_is_a_function_of_its_own():
    tables = [expected(name)[3] for name in CASES if name.startswith("dtp-delay1")]
    for i, logits in enumerate(tables):
        assert all(share_of_largest(logits.float(), other) > 1e-2 for other in tables[:i])
