"""Rank processes decode together: the same bits for any number of them, the same draws, and waits that are counted."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from test_forward import FLOAT32, eager, expected, reference, share_of_largest, some_tokens

from laneformer import Schedule
from laneformer.infer.engine import all_logits, generate
from laneformer.infer.ranks import RankError, RankSettings
from laneformer.infer.request import Request, RequestError
from laneformer.infer.sampling import Sampling
from laneformer.infer.session import Session
from laneformer.infer.weights import RankWeights

EIGHT_LANES = {"num_lanes": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4,
               "intermediate_size": 56, "sliding_window": 11, "swa_layers": (0, 2)}  # fmt: skip
SCHEDULES = ("checkpoint", "tensor-parallel", "delayed:1", "delayed:3", "delayed:2:early", "ladder", "silent")
LENGTH, CAPACITY = 70, 96
DRAWN = Request((9, 1, 77, 30), 20, Sampling(1.2, top_k=60, top_p=0.97, repetition_penalty=1.1, seed=2**40 + 7))
LATENCY_US = 2000.0
# Enough for many ranks on few cores; how failures end is tested elsewhere.
PATIENCE_S = 60.0


def settings_of(folder, ranks, **changes):
    return RankSettings(str(folder), ranks, SCHEDULES, capacity=CAPACITY, threads=1, wait_limit_s=PATIENCE_S, **changes)


@pytest.fixture(scope="module")
def eight(checkpoint):
    return checkpoint(**EIGHT_LANES)


@pytest.fixture(scope="module")
def two_ranks(eight):
    """Two ranks that hold four lanes each, kept for the whole file."""
    with Session(settings_of(eight, 2)) as session:
        yield session


@pytest.fixture(scope="module")
def of_one_process(eight):
    """What one process that holds all lanes computes: logits by (schedule, prefill), and drawn tokens by schedule."""
    runner, tokens = eager(eight, CAPACITY), some_tokens(eight, LENGTH)
    logits = {
        (text, prefill): all_logits(runner, tokens, Schedule.parse(text, runner.config), prefill).numpy()
        for text, prefill in asked()
    }
    drawn = {text: [t.id for t in generate(runner, with_schedule(text))] for text in SCHEDULES[:2]}
    return tokens, logits, drawn


def asked():
    return [(text, 67) for text in SCHEDULES] + [("checkpoint", 50), ("ladder", 59)]


def with_schedule(text):
    return Request(DRAWN.prompt, DRAWN.max_tokens, DRAWN.sampling, schedule=text)


def check_bits(session, of_one_process):
    tokens, logits, drawn = of_one_process
    for (text, prefill), wanted in logits.items():
        got = session.logits(tokens, text, prefill)
        assert got.tobytes() == wanted.tobytes(), (text, prefill, np.abs(got - wanted).max())
    for text, wanted in drawn.items():
        assert [token.id for token in session.generate(with_schedule(text))] == wanted


def test_two_ranks_give_the_bits_and_the_draws_of_one(two_ranks, of_one_process):
    check_bits(two_ranks, of_one_process)


@pytest.mark.parametrize(("ranks", "exchange"), [(1, "mailbox"), (4, "mailbox"), (8, "mailbox"), (2, "gloo")])
def test_any_number_of_ranks_over_any_exchange_gives_the_same_bits_and_draws(ranks, exchange, eight, of_one_process):
    with Session(settings_of(eight, ranks, exchange=exchange)) as session:
        check_bits(session, of_one_process)


@pytest.mark.slow
def test_compiled_ranks_give_the_same_bits_for_any_number_of_them(eight, of_one_process):
    found = []
    for ranks in (1, 2, 4):
        with Session(settings_of(eight, ranks, runner="compiled")) as session:
            assert session.runner == "compiled"
            found.append([session.logits(of_one_process[0], text, 5).tobytes() for text in SCHEDULES])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_logits_of_the_reference_model(schedule, eight, of_one_process):
    tokens, logits, _ = of_one_process
    assert share_of_largest(torch.from_numpy(logits[schedule, 67]), reference(eight, tokens, schedule)) < FLOAT32


def test_two_sessions_at_once_do_not_meet_and_leaving_one_early_ends_only_that_one(
    two_ranks, of_one_process, nothing_left
):
    folder, schedule, tokens, logits = expected("dtp-delay1/delayed3")
    request = Request((3, 4), 60, ignore_end=True)
    alone = [t.id for t in generate(eager(folder, 96), request)]
    with Session(RankSettings(str(folder), 2, ("checkpoint", schedule), capacity=96, threads=1)) as other:
        got = torch.from_numpy(other.logits(tokens, schedule, 20).copy())
        assert share_of_largest(got, logits) < FLOAT32
        ours, theirs = two_ranks.generate(with_schedule("ladder")), other.generate(request)
        pairs = [(one.id, other.id) for one, other in zip(ours, theirs, strict=False)]
        assert [b for _, b in pairs] == alone[:20]
        theirs.close()
        assert other.process_ids == []
        with pytest.raises(RankError, match="the ranks have ended"):
            next(other.generate(Request((3, 4), 5)))
    assert len(pairs) == 20
    assert [t.id for t in two_ranks.generate(with_schedule("checkpoint"))] == of_one_process[2]["checkpoint"]


def timing(session, schedule, latency_us=LATENCY_US):
    request = Request((9, 1, 77), 9, schedule=schedule, link_latency_us=latency_us, ignore_end=True)
    return session.timed(request)


def per_token(waits):
    """Seconds, the median over decoded tokens: of the rank that waited longest, for one that comes late waits less."""
    return float(np.median(np.max(waits, axis=0)[1:]))


def test_standard_tensor_parallelism_waits_for_the_link_at_every_module_and_silence_never(two_ranks):
    modules = 2 * two_ranks.config.num_hidden_layers
    measured = timing(two_ranks, "tensor-parallel")
    assert len(measured.wait_s) == len(measured.head_wait_s) == 2
    assert per_token(measured.wait_s) >= modules * LATENCY_US * 1e-6 * 0.9
    assert per_token(measured.head_wait_s) >= 2 * LATENCY_US * 1e-6 * 0.9
    assert np.median(np.diff(measured.at_s)) >= (modules + 2) * LATENCY_US * 1e-6 * 0.9
    silent = timing(two_ranks, "silent")
    assert silent.wait_s == ((0.0,) * 9,) * 2
    assert per_token(silent.head_wait_s) >= 2 * LATENCY_US * 1e-6 * 0.9


def test_a_link_latency_changes_no_token_and_holds_for_its_own_request_only(two_ranks, of_one_process):
    slow, fast = timing(two_ranks, "delayed:3"), timing(two_ranks, "delayed:3", 0.0)
    assert slow.tokens == fast.tokens and len(fast.tokens) == 9
    assert [t.id for t in two_ranks.generate(with_schedule("checkpoint"))] == of_one_process[2]["checkpoint"]


def test_timed_and_streamed_requests_decode_the_same_tokens_and_end_alike(two_ranks):
    request = Request((9, 1, 77), 9, ignore_end=True)
    streamed = list(two_ranks.generate(request))
    measured = two_ranks.timed(request)
    assert measured.tokens == tuple(token.id for token in streamed)
    assert [token.finish for token in streamed] == [None] * 8 + ["length"]
    assert [len(waits) for waits in measured.wait_s] == [9, 9]
    assert len(measured.at_s) == 9 and min(np.diff(measured.at_s)) > 0


def test_a_refused_request_leaves_the_session_as_it_was(two_ranks):
    for request, text in ((Request(()), "empty"), (Request((101,)), "outside the vocabulary")):
        with pytest.raises(RequestError, match=text):
            next(two_ranks.generate(request))
        with pytest.raises(RequestError, match=text):
            two_ranks.timed(request)
    with pytest.raises(RequestError, match="97 tokens, but at most 96 fit"):
        two_ranks.logits([1] * 97)
    assert two_ranks.logits([1] * 96).shape == (96, 101)


def test_ranks_say_what_they_hold_and_how_fast_they_can_read_it(two_ranks):
    held = [RankWeights.load(two_ranks.settings.folder, lanes) for lanes in (range(4), range(4, 8))]
    assert two_ranks.weight_bytes == [weights.num_bytes for weights in held]
    assert two_ranks.streamed_bytes == [weights.streamed_bytes for weights in held]
    assert len(two_ranks.read_seconds(3)) == 3 and min(two_ranks.read_seconds()) > 0
    assert all(peak > 50e6 for peak in two_ranks.peak_bytes())
    assert two_ranks.notes == [] and two_ranks.runner == "eager"


@pytest.mark.parametrize(("changes", "text"), [
    ({"ranks": 3}, "8 lanes cannot be shared equally by 3 ranks; ranks may be"),
    ({"exchange": "mpi"}, "no exchange 'mpi'; there are auto, mailbox, gloo, nccl"),
    ({"schedules": ("delayed:9",)}, "a delay counts modules, 0..6 for 3 layers, got 9"),
    ({"runner": "fast"}, "no runner 'fast'; there are eager, compiled"),
])  # fmt: skip
def test_settings_that_cannot_work_are_refused_before_any_process_starts(changes, text, eight, nothing_left):
    keys = {"folder": str(eight), "ranks": 2, **changes}
    start = functools.partial(Session, RankSettings(**keys))
    with pytest.raises(ValueError) as error:
        start()
    assert text in str(error.value)
