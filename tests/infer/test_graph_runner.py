"""The graph runner's decode step gives the golden logits and the eager runner's tokens, over one rank and two."""

from __future__ import annotations

import pytest
import torch
from golden_cases import CASES
from safetensors.torch import load_file

from laneformer import Schedule
from laneformer.infer.device import DeviceError, Place, place
from laneformer.infer.engine import all_logits, generate
from laneformer.infer.exchange import LocalExchange
from laneformer.infer.graph import GraphRunner, buckets
from laneformer.infer.ranks import RankSettings
from laneformer.infer.request import Request
from laneformer.infer.runners import EagerRunner, make_runner
from laneformer.infer.sampling import Sampling
from laneformer.infer.session import Session
from laneformer.infer.weights import RankWeights


def worst(logits, wanted) -> float:
    return ((torch.as_tensor(logits).double() - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_decoding_token_by_token_gives_the_golden_logits(golden, name, text, expected):
    wanted = load_file(golden / name / f"{expected}.safetensors")
    weights = RankWeights.load(golden / name)
    runner = GraphRunner(weights, LocalExchange(), 64, smallest_bucket=8)
    logits = all_logits(runner, wanted["input_ids"].tolist(), Schedule.parse(text, weights.config), 3)
    assert worst(logits, wanted["logits"]) < 5e-6


@pytest.mark.parametrize("exchange", ["mailbox", "gloo"])
def test_two_ranks_give_the_golden_logits_of_every_schedule(golden, exchange):
    cases = [case for case in CASES if case[0] == "dtp-delay1"]
    schedules = tuple(text for _, text, _ in cases)
    folder = golden / "dtp-delay1"
    settings = RankSettings(
        str(folder), 2, schedules, "graph", exchange, capacity=64, threads=1, device="cpu", wait_limit_s=30
    )
    with Session(settings) as session:
        assert session.runner == "graph"
        assert session.notes == ["graph (uncaptured: no GPU)"]
        for _, text, expected in cases:
            wanted = load_file(folder / f"{expected}.safetensors")
            logits = session.logits(wanted["input_ids"].tolist(), text, 3)
            assert worst(logits, wanted["logits"]) < 5e-6, text


@pytest.mark.parametrize("text", ["tensor-parallel", "delayed:3", "ladder"])
def test_64_greedy_tokens_are_those_of_the_eager_runner(golden, text):
    weights = RankWeights.load(golden / "dtp-delay2-swa")
    request = Request((5, 6, 7), 64, schedule=text, ignore_end=True)
    found = [
        [token.id for token in generate(kind(weights, LocalExchange(), 96), request)]
        for kind in (EagerRunner, GraphRunner)
    ]
    assert found[0] == found[1]
    assert len(set(found[0])) > 5


def test_draws_that_need_the_logits_on_the_host_are_those_of_the_eager_runner(golden):
    weights = RankWeights.load(golden / "dtp-delay1")
    sampling = Sampling(temperature=0.9, top_k=20, repetition_penalty=1.2, seed=3)
    request = Request((5, 6, 7), 12, sampling, ignore_end=True)
    found = [
        [token.id for token in generate(kind(weights, LocalExchange(), 32), request)]
        for kind in (EagerRunner, GraphRunner)
    ]
    assert found[0] == found[1]


def test_a_second_request_starts_from_nothing(golden):
    weights = RankWeights.load(golden / "dtp-delay1")
    runner = GraphRunner(weights, LocalExchange(), 32)
    first, second = Request((5, 6, 7), 9, ignore_end=True), Request((8, 9), 9, ignore_end=True)
    alone = [token.id for token in generate(runner, first)]
    for _, _ in zip(generate(runner, second), range(3), strict=False):
        pass
    assert [token.id for token in generate(runner, first)] == alone


def test_buckets_double_up_to_the_capacity():
    assert buckets(500, 128) == [128, 256, 500]
    assert buckets(128, 128) == [128]
    assert buckets(9, 128) == [9]


def test_devices_that_are_not_there_are_refused_and_shared_ones_are_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="--device cuda needs a GPU"):
        place("cuda")
    with pytest.raises(DeviceError, match="no device 'gpu'"):
        place("gpu")
    assert place("auto", 1, 2).kind == "cpu"
    with pytest.raises(DeviceError, match="the nccl exchange needs GPUs"):
        place("cpu").exchange("nccl")
    shared = Place("cuda", 0, 1, 2, "H200")
    assert shared.exchange("auto") == "mailbox"
    assert "2 ranks share 1 GPU" in shared.notes("mailbox")[0]
    with pytest.raises(DeviceError, match="2 ranks share 1"):
        shared.exchange("nccl")
    assert Place("cuda", 1, 2, 2, "H200").exchange("auto") == "nccl"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_a_captured_step_gives_the_golden_logits(golden, name, text, expected):
    wanted = load_file(golden / name / f"{expected}.safetensors")
    weights = RankWeights.load(golden / name, device=torch.device("cuda"))
    schedule = Schedule.parse(text, weights.config)
    runner = make_runner("graph", weights, LocalExchange(), 64, (schedule,))
    assert runner.name == "graph"
    logits = all_logits(runner, wanted["input_ids"].tolist(), schedule, 3)
    assert worst(logits, wanted["logits"]) < 2e-4
