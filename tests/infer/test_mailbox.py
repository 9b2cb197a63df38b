"""Messages between ranks: values arrive whole, slots are written only when free, and every wait ends."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from conftest import HANDLED_S
from forked import run_ranks

from laneformer.infer import mailbox as mailboxes
from laneformer.infer.mailbox import Mailbox, RunAborted, WaitTimeout, generations, mailbox_bytes
from laneformer.infer.shared_memory import BUSY, STAGE, SharedBlock, Status

MODULES = 6


def ends(ranks=2, slots=5, words=11, limit_s=3.0):
    """Every rank's end of one set of mailboxes."""
    block = SharedBlock.create(Status.num_bytes(ranks) + mailbox_bytes(ranks, slots, words))
    status = Status(block, ranks, MODULES)
    return [Mailbox(block, status, rank, ranks, slots, words, limit_s) for rank in range(ranks)]


def send(sender, receiver, values):
    payload = np.array(values, np.float32)
    got = np.full_like(payload, 77.0)
    receiver.take(sender.post(payload), sender.rank, got)
    return got


@pytest.mark.parametrize("last", [1.5, 0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-40, np.finfo(np.float32).max])
def test_every_kind_of_number_arrives_as_the_value_it_was(last):
    one, other = ends()
    values = np.array([0.0, -0.0, np.nan, -np.inf, 1e-45, 3.0, last], np.float32)
    got = send(one, other, values)
    np.testing.assert_array_equal(got, values)
    written = values.view(np.uint32) != 0
    np.testing.assert_array_equal(got.view(np.uint32)[written], values.view(np.uint32)[written])


def test_messages_keep_their_numbers_when_they_are_taken_out_of_step():
    one, other = ends(slots=6)
    for start in range(0, 600, 3):
        numbers = [one.post(np.full(1 + (start + i) % 11, start + i, np.float32)) for i in range(3)]
        for i in (1, 0, 2):
            got = np.zeros(1 + (start + i) % 11, np.float32)
            other.take(numbers[i], 0, got)
            assert (got == start + i).all()


def talk(rank, every, messages, window, seed):
    """Posts and takes numbered messages, at most `window` under way, at random speed; what came wrong."""
    mailbox, rng, wrong = every[rank], random.Random(seed + rank), []
    for step in range(messages + window - 1):
        if step < messages:
            assert mailbox.post(np.arange(1 + step % 11, dtype=np.float32) + 1000 * rank + step) == step
        if rng.random() < 0.02:
            time.sleep(rng.random() * 2e-3)
        number = step - window + 1
        for peer in mailbox.peers if number >= 0 else ():
            got = np.empty(1 + number % 11, np.float32)
            mailbox.take(number, peer, got)
            if not np.array_equal(got, np.arange(len(got), dtype=np.float32) + 1000 * peer + number):
                wrong.append((number, peer, got))
    return wrong


@pytest.mark.parametrize(("ranks", "window"), [(2, 1), (2, 3), (4, 2)])
def test_processes_that_run_at_random_speeds_exchange_many_messages_round_the_ring(ranks, window):
    every = ends(ranks, generations(window), 11, limit_s=30.0)
    assert run_ranks(ranks, talk, every, 1500 if ranks == 2 else 300, window, 9) == [[]] * ranks


@pytest.mark.parametrize("cause", ["limit", "abort"])
def test_a_wait_ends_when_its_limit_is_over_or_the_run_is_ended(cause):
    one, other = ends(limit_s=0.3 if cause == "limit" else 60.0)
    one.status.row(0)[STAGE] = BUSY
    one.progress.at(5)
    began = time.monotonic()
    if cause == "limit":
        with pytest.raises(WaitTimeout, match=r"rank 1 waited 0\.\d s for message 7 of rank 0") as error:
            other.take(7, 0, np.empty(3, np.float32))
        assert error.value.peer == 0
        assert "layer 2 feed-forward" in str(error.value)
    else:
        threading.Timer(0.2, one.status.abort).start()
        with pytest.raises(RunAborted, match="rank 1 stopped waiting for rank 0"):
            other.take(7, 0, np.empty(3, np.float32))
    assert time.monotonic() - began < HANDLED_S
    assert one.status.waiting_for(1) == 0, "who was waited for stays readable"


def test_a_message_of_which_one_word_is_missing_is_not_there():
    one, other = ends(limit_s=0.1)
    for missing in range(5):
        number = one.post(np.arange(1, 6, dtype=np.float32))
        slot = one._every[1, 0, number % one.slots]
        slot[mailboxes.STAMP_WORDS + missing] = 0
        with pytest.raises(WaitTimeout):
            other.take(number, 0, np.empty(5, np.float32))
        slot[:] = 0


@pytest.mark.parametrize("latency_s", [0.02, 0.11])
def test_with_an_emulated_link_no_message_is_readable_before_its_latency_has_passed(latency_s):
    one, other = ends()
    one.latency_s = other.latency_s = latency_s
    for values in ([1.0, 2.0, 0.0], [5.0]):
        began = time.perf_counter()
        np.testing.assert_array_equal(send(one, other, values), values)
        assert time.perf_counter() - began >= latency_s
    assert 2 * latency_s * 0.9 <= other.waited_s
    assert one.waited_s == 0


def test_a_message_that_is_older_than_the_latency_is_not_waited_for():
    one, other = ends()
    one.latency_s = other.latency_s = 0.02
    number = one.post(np.ones(3, np.float32))
    time.sleep(0.03)
    other.take(number, 0, np.empty(3, np.float32))
    assert other.waited_s == 0


@pytest.mark.parametrize("latency_s", [0.0, 1e-4])
def test_a_message_that_was_taken_leaves_a_free_slot_time_stamp_included(latency_s):
    one, other = ends()
    one.latency_s = other.latency_s = latency_s
    for _ in range(3 * one.slots):
        send(one, other, [0.0, 1.0, np.nan])
    assert not one._every.any()


def test_the_link_latency_may_change_between_two_messages():
    one, other = ends(slots=4)
    for i in range(20):
        one.latency_s = other.latency_s = 1e-4 * (i % 2)
        np.testing.assert_array_equal(send(one, other, [i, 0.0, -i]), [i, 0.0, -i])


def test_waiting_is_counted_only_when_a_message_was_not_there_at_first_look():
    one, other = ends()
    send(one, other, [1.0, 2.0])
    assert other.waited_s == 0
    timer = threading.Timer(0.1, lambda: one.post(np.ones(2, np.float32)))
    timer.start()
    other.take(1, 0, np.empty(2, np.float32))
    assert 0.05 < other.waited_s < HANDLED_S
    assert other.status.waiting_for(1) is None
    timer.join()
