"""The persistent runner gives the golden logits and the eager runner's tokens, over one rank and two."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import laneformer.kernels.launch as launch_module
from laneformer import Schedule
from laneformer.infer.bench import Variant
from laneformer.infer.engine import all_logits, generate
from laneformer.infer.exchange import LocalExchange
from laneformer.infer.generate import describe, summary
from laneformer.infer.mailbox import WaitTimeout
from laneformer.infer.persistent import PersistentError, PersistentRunner, check_triton
from laneformer.infer.ranks import RankError, RankSettings
from laneformer.infer.report import number
from laneformer.infer.request import Request, RequestError
from laneformer.infer.runners import EagerRunner, make_runner
from laneformer.infer.sampling import Sampling
from laneformer.infer.session import Session
from laneformer.infer.weights import RankWeights
from laneformer.kernels.plan import shared_words

SMALL = {"num_hidden_layers": 2, "num_lanes": 2}
DRAWN = Sampling(temperature=0.9, top_k=20, repetition_penalty=1.3, seed=2**64 - 3)


def worst(logits, wanted) -> float:
    return ((torch.as_tensor(logits).double() - wanted).abs().max() / wanted.abs().max()).item()


def tokens_of(runner, request: Request) -> list[int]:
    return [token.id for token in generate(runner, request)]


def eager_tokens(weights, request: Request, capacity: int = 96) -> list[int]:
    return tokens_of(EagerRunner(weights, LocalExchange(), capacity), request)


@pytest.fixture(scope="module")
def small(checkpoint):
    return RankWeights.load(checkpoint(**SMALL))


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("dtp-delay2-swa", "checkpoint", "expected"), ("dtp-delay1", "ladder", "expected-ladder"),
    ("lane-norms-vocab-parallel", "checkpoint", "expected"),
])  # fmt: skip
def test_decoding_after_a_prefill_gives_the_golden_logits(golden, name, text, expected):
    wanted = load_file(golden / name / f"{expected}.safetensors")
    weights = RankWeights.load(golden / name)
    runner = PersistentRunner(weights, LocalExchange(), 32)
    # The window of 12 positions has wrapped in the prefill.
    logits = all_logits(runner, wanted["input_ids"][:18].tolist(), Schedule.parse(text, weights.config), 16)
    assert worst(logits, wanted["logits"][:18]) < 5e-6


def test_greedy_tokens_are_those_of_the_eager_runner(small):
    request = Request((5, 6, 7), 20, schedule="delayed:2", ignore_end=True)
    wanted = eager_tokens(small, request)
    assert tokens_of(PersistentRunner(small, LocalExchange(), 96, tokens=8), request) == wanted
    assert len(set(wanted)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("text", ["checkpoint", "tensor-parallel", "delayed:3", "ladder", "silent"])
@pytest.mark.parametrize("name", ["dtp-delay1", "dtp-delay2-swa", "lane-head", "lane-norms-vocab-parallel"])
def test_64_greedy_tokens_of_golden_models_are_those_of_the_eager_runner(golden, name, text):
    weights = RankWeights.load(golden / name)
    request = Request((5, 6, 7), 64, schedule=text, ignore_end=True)
    assert tokens_of(PersistentRunner(weights, LocalExchange(), 96), request) == eager_tokens(weights, request)


@pytest.mark.parametrize("tokens", [1, 4])
def test_draws_are_those_of_the_host_and_requests_follow_each_other(small, tokens):
    runner = PersistentRunner(small, LocalExchange(), 96, tokens=tokens)
    for prompt in ((5, 6, 7), (9, 9)):
        request = Request(prompt, 7, sampling=DRAWN, schedule="delayed:1", ignore_end=True)
        assert tokens_of(runner, request) == eager_tokens(small, request)


def test_a_request_left_early_and_a_stop_id_do_no_harm(small):
    runner = PersistentRunner(small, LocalExchange(), 96, tokens=4)
    request = Request((5, 6, 7), 8, schedule="delayed:1", ignore_end=True)
    wanted = eager_tokens(small, request)
    stopped = next(n for n in range(2, 8) if wanted[n] not in wanted[:n])
    left = generate(runner, request, lambda token: token == wanted[1])
    assert [token.id for token in left] == wanted[:2]
    ended = list(generate(runner, Request((5, 6, 7), 8, stop_ids=(wanted[stopped],), schedule="delayed:1")))
    assert [token.id for token in ended] == wanted[: stopped + 1]
    assert ended[-1].finish == "stop_id"
    assert tokens_of(runner, request) == wanted


def test_counters_start_again_before_they_overflow(small, monkeypatch):
    monkeypatch.setattr(launch_module, "COUNTER_LIMIT", 0)
    request = Request((5, 6, 7), 6, schedule="delayed:1", ignore_end=True)
    assert tokens_of(PersistentRunner(small, LocalExchange(), 96, tokens=2), request) == eager_tokens(small, request)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
def test_narrow_weights_stay_within_their_rounding(golden, dtype, allowed):
    wanted = load_file(golden / "dtp-delay1" / "expected.safetensors")
    weights = RankWeights.load(golden / "dtp-delay1", dtype=dtype)
    tokens = wanted["input_ids"][:4].tolist()
    schedule = Schedule.parse("checkpoint", weights.config)
    logits = all_logits(PersistentRunner(weights, LocalExchange(), 32), tokens, schedule, 1)
    assert worst(logits, wanted["logits"][:4]) < allowed


def test_two_ranks_give_the_golden_logits_and_one_ranks_draws(golden, nothing_left):
    folder = golden / "dtp-delay1"
    cases = (("delayed:3", "expected-delayed3"), ("tensor-parallel", "expected-tensor-parallel"))
    request = Request((5, 6, 7), 4, sampling=DRAWN, schedule="delayed:3", ignore_end=True)
    texts = tuple(text for text, _ in cases)
    with Session(RankSettings(str(folder), 2, texts, "persistent", capacity=32, threads=1, device="cpu")) as session:
        assert session.runner == "persistent"
        assert "speed means nothing" in session.notes[0]
        for text, expected in cases:
            wanted = load_file(folder / f"{expected}.safetensors")
            logits = session.logits(wanted["input_ids"][:5].tolist(), text, 3)
            assert worst(logits, wanted["logits"][:5]) < 5e-6, text
        found = [token.id for token in session.generate(request)]
    assert found == eager_tokens(RankWeights.load(folder), request)


def test_a_rank_that_ends_in_the_middle_ends_the_run_with_its_name(golden, nothing_left):
    fault = {"rank": 1, "kind": "exit", "module": 0, "count": 4}
    settings = RankSettings(
        str(golden / "dtp-delay1"), 2, ("delayed:1",), "persistent", capacity=32, threads=1, device="cpu", fault=fault
    )
    with pytest.raises(RankError, match="rank 1 ended with exit code 3"), Session(settings) as session:
        list(session.generate(Request((1, 2, 3), 6, schedule="delayed:1", ignore_end=True)))


class Alone(LocalExchange):
    """An exchange of a rank whose peers answer everything but the kernel's messages."""


def test_a_rank_that_sends_nothing_is_named(checkpoint):
    folder = checkpoint(**SMALL)
    weights = RankWeights.load(folder, [0])
    schedule = Schedule.parse("tensor-parallel", weights.config)
    words = shared_words(weights.config, schedule, 2)
    memory = [torch.empty(words, dtype=torch.int32) for _ in range(2)]
    runner = PersistentRunner(weights, Alone(), 16, [schedule], lambda count: memory, 0, 0.02)
    with pytest.raises(WaitTimeout, match=r"layer 0 attention \(output\), waited too long for a partial of rank 1"):
        runner.step(5, schedule)


def test_logits_that_are_no_numbers_are_an_error_and_no_hang(checkpoint):
    weights = RankWeights.load(checkpoint(**SMALL))
    runner = PersistentRunner(weights, LocalExchange(), 32)
    request = Request((5, 6), 4, schedule="delayed:1", ignore_end=True)
    wanted = tokens_of(runner, request)
    kept = weights.layers[1].down_LOI.clone()
    with torch.inference_mode():
        decoding = generate(runner, request)
        next(decoding)
        weights.layers[1].down_LOI.fill_(float("nan"))
        with pytest.raises(ValueError, match="the logits for position 3 are not numbers"):
            list(decoding)
        assert runner.step(5, Schedule.parse("delayed:1", weights.config)).isnan().any()
        weights.layers[1].down_LOI.copy_(kept)
    assert tokens_of(runner, request) == wanted


def test_what_cannot_run_falls_back_and_says_why(small, checkpoint, monkeypatch):
    half = RankWeights.load(checkpoint(**SMALL), [0])
    with pytest.raises(PersistentError, match="cannot reach a GPU's memory"):
        check_triton(torch.device("cuda"))
    with pytest.raises(PersistentError, match="no memory"):
        PersistentRunner(half, LocalExchange(), 16)
    with pytest.warns(UserWarning, match="eager runner, because the persistent kernel cannot run here: triton is not"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert make_runner("persistent", small, LocalExchange(), 16).name == "eager"


def test_what_it_refuses_is_said(small, checkpoint):
    runner = PersistentRunner(small, LocalExchange(), 16)
    with pytest.raises(RequestError, match="emulated link latency needs the eager or compiled runner"):
        runner.set_latency(1e-4)
    half = RankWeights.load(checkpoint(**SMALL), [0])
    memory = [torch.empty(64, dtype=torch.int32) for _ in range(2)]
    runner = PersistentRunner(half, LocalExchange(), 16, (), lambda count: memory)
    with pytest.raises(RequestError, match="was not announced"):
        runner.step(5, Schedule.parse("ladder", half.config))


def test_times_that_it_does_not_know_are_null_and_not_nan(small):
    request = Request((5, 6, 7), 2, schedule="delayed:1", ignore_end=True)
    runner = PersistentRunner(small, LocalExchange(), 16)
    result = summary(list(generate(runner, request)), "", request, 1, runner.name)
    assert (result["wait_us_per_token"], result["head_wait_us_per_token"]) == (None, None)
    assert "waiting for partials" not in describe(result)
    assert number(np.float64("nan"), Variant("silent", "persistent", 1, 0.0)) is None
    assert number(np.float64(3.0), Variant("silent", "eager", 1, 0.0)) == 3.0
