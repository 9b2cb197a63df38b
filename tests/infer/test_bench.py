"""The comparison measures in turn, checks before it measures, and tells no speed of a wrong runner."""

from __future__ import annotations

import numpy as np
import pytest

from laneformer import LaneConfig
from laneformer.infer import bench
from laneformer.infer.bench import Bench, BenchSettings, GateError, Samples, Variant, parse_list, run_bench
from laneformer.infer.reference import TOLERANCE, Verdict, expected_file, gate_tokens, judge, reference_logits
from laneformer.infer.request import RequestError
from laneformer.infer.session import Timing


class StandIn:
    """A session that answers at once: right logits unless `wrong`, and times that are made up."""

    wrong: float = 0.0
    opened: list = []

    def __init__(self, settings):
        self.settings, self.ranks, self.runner, self.notes = settings, settings.ranks, settings.runner, ["a note"]
        self.weight_bytes, self.streamed_bytes, self.loading_bytes = [70], [1000] * settings.ranks, [80]
        self.devices, self.exchange = ["cpu"] * settings.ranks, "mailbox"
        self.asked = []
        self.opened.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.opened.remove(self)

    def logits(self, tokens, schedule, prefill):
        assert 0 < prefill < len(tokens)
        expected, _ = reference_logits(self.settings.folder, tokens, schedule, "float32")
        return (expected + self.wrong * np.abs(expected).max()).astype(np.float32)

    def timed(self, request):
        self.asked.append((request.schedule, request.link_latency_us, request.max_tokens))
        waits = ((1e-4,) * request.max_tokens,) * self.ranks
        return Timing(tuple(0.1 + 0.01 * i for i in range(request.max_tokens)), waits, waits, ())

    def read_seconds(self, rounds):
        return [0.004] * rounds


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(StandIn, "wrong", 0.0)
    monkeypatch.setattr(StandIn, "opened", [])
    monkeypatch.setattr(bench, "Session", StandIn)
    return StandIn


def settings(folder, **changes):
    keys = {"schedules": ("tensor-parallel", "delayed:2"), "latencies_us": (0.0, 50.0), "prompt_tokens": 5,
            "new_tokens": 7, "rounds": 3, "runner": "eager"}  # fmt: skip
    return BenchSettings(str(folder), **{**keys, **changes})


def test_rounds_go_over_all_variants_in_turn_each_time_from_another_start(stand_in, checkpoint):
    with Bench(settings(checkpoint(), ranks=(1, 2))) as running:
        order = [(number, v.ranks, v.schedule, v.latency_us) for number, v in running.rounds()]
        one, two = running.sessions.values()
        variants = [(1, "tensor-parallel", 0.0), (1, "delayed:2", 0.0)] + [
            (2, schedule, latency) for latency in (0.0, 50.0) for schedule in ("tensor-parallel", "delayed:2")
        ]
        for number in range(3):
            expected = variants[number:] + variants[:number]
            assert [item[1:] for item in order if item[0] == number] == expected
        warm_up = [item for item in one.asked + two.asked if item[2] == bench.WARM_UP_TOKENS]
        assert len(warm_up) == 6
        assert {item[2] for item in one.asked[2:] + two.asked[4:]} == {7}
    assert stand_in.opened == []


def test_a_runner_with_wrong_logits_ends_the_comparison_before_any_time_is_taken(stand_in, checkpoint, monkeypatch):
    monkeypatch.setattr(StandIn, "wrong", 3e-4)
    monkeypatch.setattr(StandIn, "timed", lambda *_: pytest.fail("measured a wrong runner"))
    with pytest.raises(GateError, match=r"tensor-parallel, 2 ranks: the logits differ by 3\.\de-04 .* no speed"):
        run_bench(settings(checkpoint()))
    assert stand_in.opened == [], "the ranks are closed"


def test_a_document_says_how_far_every_gate_was_from_its_tolerance(stand_in, checkpoint, monkeypatch):
    monkeypatch.setattr(StandIn, "wrong", 1e-4)
    steps = []
    document = run_bench(settings(checkpoint()), step=lambda done, total: steps.append((done, total)))
    assert steps == [(done, 12) for done in range(13)]
    assert list(document["gates"]) == ["tensor-parallel, 2 ranks", "delayed:2, 2 ranks"]
    for gate in document["gates"].values():
        assert gate["error"] == pytest.approx(1e-4, rel=0.01)
        assert (gate["tolerance"], gate["reference"]) == (2e-4, "float64")
    assert document["notes"] == ["a note"]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_gate_passes_up_to_its_tolerance_and_fails_beyond_it_and_for_nan(dtype):
    expected = np.linspace(-2, 1, 12).reshape(3, 4)
    for share, passes in ((0.9, True), (1.1, False), (np.nan, False), (np.inf, False)):
        off = expected.copy()
        off[1, 2] += 2 * TOLERANCE[dtype] * share
        assert judge(off, expected, dtype, "float64").passed is passes
    assert Verdict(0.1, 0.1, "").passed


def test_the_gate_refuses_logits_of_another_shape():
    with pytest.raises(RequestError, match=r"x has logits \[3, 4\], the model gives \[3, 5\]"):
        judge(np.zeros((3, 5)), np.zeros((3, 4)), "float32", "x")


def test_the_tokens_of_the_gate_are_the_same_every_time_and_fit_the_model(checkpoint):
    config = LaneConfig.from_pretrained(checkpoint())
    assert gate_tokens(config) == gate_tokens(config) and len(gate_tokens(config)) == 24
    assert set(gate_tokens(config)) <= set(range(101)) and len(set(gate_tokens(config))) > 15
    assert len(gate_tokens(config.replace(max_position_embeddings=9))) == 9


def test_an_expected_file_gives_tokens_and_logits(golden):
    tokens, logits = expected_file(golden / "dtp-delay1" / "expected.safetensors")
    assert len(tokens) == 48 and logits.shape == (48, 96) and logits.dtype == np.float64
    found, name = reference_logits(golden / "dtp-delay1", tokens, "checkpoint", "float32")
    assert name == "float64" and np.abs(found - logits).max() < 1e-9


def test_the_reference_has_the_weights_of_the_runner_but_wide_arithmetic(golden):
    tokens, logits = expected_file(golden / "dtp-delay1" / "expected.safetensors")
    rounded, name = reference_logits(golden / "dtp-delay1", tokens, "checkpoint", "bfloat16")
    assert name == "float64" and rounded.dtype == np.float64
    assert 1e-4 < np.abs(rounded - logits).max() / np.abs(logits).max() < TOLERANCE["bfloat16"]


def test_samples_keep_each_rounds_median_and_leave_out_what_prefill_waited():
    samples = Samples()
    samples.add(Timing((0.5, 0.6, 0.9, 1.0), ((9.0, 1.0, 5.0, 3.0),), ((8.0, 2.0, 2.0, 4.0),), ()), 0.25)
    assert samples.ttft_s == [0.5] and samples.read_s == [0.25]
    np.testing.assert_allclose(samples.itl_s[0], [0.1, 0.3, 0.1])
    np.testing.assert_allclose(samples.round_itl_s, [0.1])
    assert samples.wait_s == [[3.0]] and samples.head_wait_s == [[2.0]]


def test_the_baseline_of_a_variant_is_tensor_parallelism_on_the_same_ranks_and_link():
    assert Variant("ladder", "eager", 4, 50.0).baseline == Variant("tensor-parallel", "eager", 4, 50.0)


def test_lists_are_read_item_by_item_and_mistakes_are_named():
    assert parse_list("1, 2,3", int, "--ranks") == (1, 2, 3)
    with pytest.raises(RequestError, match="--ranks has '', expected numbers"):
        parse_list("1,,2", int, "--ranks")
    with pytest.raises(RequestError, match="--x names a,b,a with something twice"):
        parse_list("a,b,a", str, "--x")
