"""The schedules against the equations of each variant, played out on one number per lane."""

from __future__ import annotations

import math

import pytest
import torch

from laneformer import LaneConfig, Schedule
from laneformer.lanes import InProcess, run_schedule
from laneformer.schedule import Landing, Own, Step

LANES, LAYERS = 3, 5
MODULES = range(2 * LAYERS)


def partial(lane, n, x):
    """An arbitrary bounded function, another for every lane and module."""
    return math.sin((1.3 + 0.37 * lane) * x + 0.7 * n) + 0.1 * lane


def play(add):
    """The lanes' streams when lane l adds `add(l, n, o)` after module n, o[m][j] being lane j's partial of module m."""
    x = [0.5] * LANES
    o = []
    for n in MODULES:
        o.append([partial(lane, n, x[lane]) for lane in range(LANES)])
        x = [x[lane] + add(lane, n, o) for lane in range(LANES)]
    return x


def played_by(schedule):
    """The same streams by the loop that the model runs."""

    def module(n, x_L):
        return torch.tensor([[partial(lane, n, x_L[lane].item())] for lane in range(LANES)], dtype=torch.float64)

    start = torch.full((LANES, 1), 0.5, dtype=torch.float64)
    return run_schedule(schedule, LANES, start, module, InProcess()).flatten().tolist()


def others(lane, o):
    return sum(o[j] for j in range(LANES) if j != lane)


def delayed(delay, early=False):
    def add(lane, n, o):
        if n < delay:
            return sum(o[n]) if early else math.sqrt(LANES) * o[n][lane]
        return o[n][lane] + others(lane, o[n - delay])

    return add


def config(**changes):
    return LaneConfig(
        hidden_size=12, num_hidden_layers=LAYERS, num_attention_heads=3, intermediate_size=9, vocab_size=11,
        num_lanes=LANES, **changes,
    )  # fmt: skip


def test_standard_tensor_parallelism_adds_the_sum_over_lanes_at_once():
    expected = play(lambda lane, n, o: sum(o[n]))
    assert played_by(Schedule.tensor_parallel(LAYERS)) == pytest.approx(expected, rel=1e-10)
    assert max(expected) == min(expected)


@pytest.mark.parametrize("delay", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("early", [False, True])
def test_delayed_adds_its_own_now_and_the_others_that_many_modules_later(delay, early):
    expected = play(delayed(delay, early))
    assert played_by(Schedule.delayed(LAYERS, delay, early)) == pytest.approx(expected, rel=1e-10)
    assert len({round(value, 6) for value in expected}) == LANES


def test_a_delay_of_nothing_is_tensor_parallel_and_one_of_all_modules_is_silent():
    assert Schedule.delayed(LAYERS, 0) == Schedule.tensor_parallel(LAYERS)
    assert Schedule.delayed(LAYERS, 0, early=True) == Schedule.tensor_parallel(LAYERS)
    assert Schedule.delayed(LAYERS, 2 * LAYERS) == Schedule.silent(LAYERS)
    assert Schedule.delayed(LAYERS, 2 * LAYERS, early=True) == Schedule.tensor_parallel(LAYERS)


def test_silent_lanes_scale_their_own_by_the_root_of_the_lanes():
    expected = play(lambda lane, n, o: math.sqrt(LANES) * o[n][lane])
    assert played_by(Schedule.silent(LAYERS)) == pytest.approx(expected, rel=1e-10)


def test_ladder_reads_a_stream_without_the_module_before():
    last = 2 * LAYERS - 1

    def add(lane, n, o):
        late = sum(o[n - 1]) if n else 0.0
        return late + (sum(o[n]) if n == last else 0.0)

    assert played_by(Schedule.ladder(LAYERS)) == pytest.approx(play(add), rel=1e-10)


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("feed_forward", [False, True])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("delay", [0, 1, 2, 4, 5, 7])
def test_a_checkpoint_counts_its_delay_in_layers_and_may_silence_a_kind(attention, feed_forward, early, delay):
    def add(lane, n, o):
        if n // 2 < delay:
            return sum(o[n]) if early else math.sqrt(LANES) * o[n][lane]
        if not (feed_forward if n % 2 else attention):
            return math.sqrt(LANES) * o[n][lane]
        return o[n][lane] + others(lane, o[n - 2 * delay])

    schedule = Schedule.from_config(config(
        broadcast_delay=delay, use_early_comm=early, use_attention_comm=attention, use_mlp_comm=feed_forward
    ))  # fmt: skip
    assert played_by(schedule) == pytest.approx(play(add), rel=1e-10)


@pytest.mark.parametrize(("delay", "early"), [(1, False), (2, False), (2, True), (5, True)])
def test_a_checkpoint_of_both_kinds_is_delayed_by_two_modules_a_layer(delay, early):
    schedule = Schedule.from_config(config(broadcast_delay=delay, use_early_comm=early))
    assert schedule == Schedule.delayed(LAYERS, 2 * delay, early)


def test_the_published_2b_is_delayed_by_four_modules():
    assert Schedule.from_config(LaneConfig.preset("2b")) == Schedule.delayed(15, 4)


@pytest.mark.parametrize(("schedule", "messages", "outstanding", "equal"), [
    (Schedule.tensor_parallel(LAYERS), 10, 1, True),
    (Schedule.ladder(LAYERS), 10, 2, True),
    (Schedule.delayed(LAYERS, 3), 7, 4, False),
    # The four early messages land at once and only their second landing is late, so two are under way at most.
    (Schedule.delayed(LAYERS, 4, early=True), 6, 2, False),
    (Schedule.silent(LAYERS), 0, 0, False),
])  # fmt: skip
def test_a_schedule_counts_its_messages(schedule, messages, outstanding, equal):
    assert (schedule.num_layers, schedule.num_messages) == (LAYERS, messages)
    assert (schedule.max_outstanding, schedule.streams_stay_equal) == (outstanding, equal)


def test_the_last_modules_of_a_delay_send_nothing_but_still_land():
    steps = Schedule.delayed(LAYERS, 3).steps
    assert [step.sends for step in steps] == [True] * 7 + [False] * 3
    assert steps[9] == Step(Own.ONE, (Landing(6, False),), False)
    assert steps[2] == Step(Own.SQRT_LANES, (), True)


def test_a_partial_is_kept_until_its_last_landing():
    assert Schedule.delayed(2, 1, early=True).last_use == (1, 2, 3, 3)
    assert Schedule.tensor_parallel(2).last_use == (0, 1, 2, 3)
    assert Schedule.ladder(2).last_use == (1, 2, 3, 3)


def test_equality_is_in_the_steps_and_not_in_the_way_they_were_made():
    assert Schedule(Schedule.delayed(LAYERS, 3).steps) == Schedule.delayed(LAYERS, 3)
    assert hash(Schedule.ladder(2)) == hash(Schedule(Schedule.ladder(2).steps))
    every = [Schedule.tensor_parallel(2), Schedule.ladder(2), Schedule.silent(2), Schedule.silent(3)]
    every += [Schedule.delayed(2, delay, early) for delay in (1, 2, 3) for early in (False, True)]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("text", ["tensor-parallel", "ladder", "silent", "delayed:1", "delayed:3", "delayed:4:early"])
def test_a_text_form_is_read_back_as_it_was_written(text):
    schedule = Schedule.parse(text, config())
    assert str(schedule) == text
    assert Schedule.parse(str(schedule), config()) == schedule


@pytest.mark.parametrize(("text", "schedule"), [
    (" TP ", Schedule.tensor_parallel(LAYERS)), ("Tensor_Parallel", Schedule.tensor_parallel(LAYERS)),
    ("delayed:0", Schedule.tensor_parallel(LAYERS)), ("delayed:10", Schedule.silent(LAYERS)),
    ("checkpoint", Schedule.delayed(LAYERS, 2)),
])  # fmt: skip
def test_other_spellings_mean_the_same(text, schedule):
    assert Schedule.parse(text, config(broadcast_delay=1)) == schedule


def test_a_schedule_with_no_text_form_says_how_much_it_sends():
    schedule = Schedule.from_config(config(broadcast_delay=1, use_attention_comm=False))
    assert str(schedule) == "custom (4 messages in 10 modules)"


@pytest.mark.parametrize("text", ["", "delay:3", "delayed", "delayed:x", "delayed:2:late", "ladder:2", "silent:early"])
def test_an_unknown_text_form_is_refused_with_the_known_ones(text):
    with pytest.raises(ValueError, match="the forms are tensor-parallel, delayed:D, delayed:D:early, ladder, silent"):
        Schedule.parse(text, config())


@pytest.mark.parametrize("text", ["delayed:11", "delayed:-1", "delayed:99:early"])
def test_a_delay_beyond_the_modules_is_refused_with_the_limit(text):
    with pytest.raises(ValueError, match=rf"0\.\.10 for 5 layers, got {text.split(':')[1]}"):
        Schedule.parse(text, config())


@pytest.mark.parametrize(("build", "words"), [
    (lambda: Schedule.delayed(LAYERS, 1.5), "a delay counts modules, .* got 1.5"),
    (lambda: Schedule.delayed(LAYERS, True), "a delay counts modules, .* got True"),
    (lambda: Schedule.ladder(0), "needs at least 1 layer, got 0"),
    (lambda: Schedule((Step(Own.ONE),)), "two modules a layer, got 1"),
    (lambda: Schedule(()), "two modules a layer, got 0"),
    (lambda: Schedule((Step(Own.ONE, (Landing(1, True),)), Step(Own.ONE, (), True))), "lands module 1, which is"),
    (lambda: Schedule((Step(Own.ONE), Step(Own.ONE, (Landing(0, True),)))), "lands module 0, which sends nothing"),
    (lambda: Schedule((Step(Own.ONE, (), True), Step(Own.ONE))), r"modules \[0\] send a partial that nothing lands"),
])  # fmt: skip
def test_steps_that_cannot_be_played_are_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()
