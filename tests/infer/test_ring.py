"""How many slots a ring needs: two ranks play every schedule in random order, and no slot is written before it is free.

The ranks are real mailboxes in one process; which of them goes on next is drawn anew at every step.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from test_mailbox import ends

from laneformer import LaneConfig, Schedule
from laneformer.infer.mailbox import generations
from laneformer.lanes import run_schedule

LAYERS = 4
CONFIG = LaneConfig(
    hidden_size=6, num_hidden_layers=LAYERS, num_attention_heads=1, intermediate_size=3, vocab_size=5, broadcast_delay=2
)
DELAYS = range(1, 2 * LAYERS)
SCHEDULES = [
    "tensor-parallel", "ladder", "silent", "checkpoint", *(f"delayed:{d}" for d in DELAYS),
    *(f"delayed:{d}:early" for d in DELAYS),
]  # fmt: skip
TOKENS, TRIALS = 3, 25


class Recorder:
    """An exchange that notes in which order messages are posted and landed."""

    def __init__(self):
        self.events, self._sent, self._count = [], {}, 0

    def post(self, module, partial_L):
        self._sent[module] = self._count
        self.events.append(("post", self._count))
        self._count += 1

    def land(self, module):
        self.events.append(("take", self._sent.pop(module)))
        return torch.zeros(1)

    def head(self):
        for _ in range(2):
            self.post(-1, None)
            self.land(-1)


def events_of(schedule, tokens=TOKENS):
    """What every rank does in some tokens: posts and takes by message number."""
    recorder = Recorder()
    for _ in range(tokens):
        run_schedule(schedule, 2, torch.zeros(1, 1), lambda n, x_L: x_L, recorder)
        recorder.head()
    return recorder.events


class Overwritten(AssertionError):
    """A message was written into a slot that its receiver had not freed."""


def play(events, slots, seed):
    """Two ranks carry out the events in one random order; raises Overwritten."""
    rng, ranks, at = random.Random(seed), ends(slots=slots, words=1), [0, 0]
    while min(at) < len(events):
        rank = rng.choice([r for r in (0, 1) if at[r] < len(events)])
        # A rank runs on for a while, as one does whose neighbour is not scheduled.
        for _ in range(rng.choice((1, 1, 3, 10, 100))):
            if at[rank] == len(events) or not step(ranks, rank, *events[at[rank]]):
                break
            at[rank] += 1


def step(ranks, rank, kind, number):
    """Carries out one event; False if it has to wait for the other rank."""
    mailbox, other = ranks[rank], ranks[1 - rank]
    if kind == "post":
        if mailbox._every[1 - rank, rank, number % mailbox.slots].any():
            raise Overwritten(f"message {number} of rank {rank}")
        mailbox.post(np.full(1, number + 1, np.float32))
    elif other.posted <= number:
        return False
    else:
        got = np.zeros(1, np.float32)
        mailbox.take(number, 1 - rank, got)
        assert got[0] == number + 1
    return True


@pytest.mark.parametrize("text", SCHEDULES)
def test_with_the_slots_of_generations_no_order_of_two_ranks_overwrites_a_message(text):
    schedule = Schedule.parse(text, CONFIG)
    events, slots = events_of(schedule), generations(schedule.max_outstanding)
    for seed in range(TRIALS):
        play(events, slots, seed)


@pytest.mark.parametrize("text", ["tensor-parallel", "ladder", "delayed:3", "delayed:4", "delayed:5:early"])
def test_a_ring_below_twice_the_messages_under_way_is_caught_by_this_check(text):
    schedule = Schedule.parse(text, CONFIG.replace(num_hidden_layers=12))
    events, slots = events_of(schedule), 2 * schedule.max_outstanding - 1
    with pytest.raises(Overwritten):
        for seed in range(TRIALS):
            play(events, slots, seed)


@pytest.mark.parametrize("text", SCHEDULES)
def test_max_outstanding_is_what_is_really_under_way(text):
    schedule = Schedule.parse(text, CONFIG)
    under_way = most = 0
    for kind, _ in events_of(schedule):
        under_way += 1 if kind == "post" else -1
        most = max(most, under_way)
    assert most == max(1, schedule.max_outstanding)
    assert under_way == 0
