"""The twin gives the golden logits in any order that a plan allows, and names what a broken plan does not order."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from golden_cases import CASES, GOLDEN
from helpers import assert_close, relative_error
from safetensors.torch import load_file

from laneformer.config import LaneConfig
from laneformer.infer.weights import RankWeights
from laneformer.kernels.plan import DeviceShape, Plan
from laneformer.kernels.plan_phases import token_phases
from laneformer.kernels.twin import Twin
from laneformer.kernels.twin_ledger import Actor, Ledger, TwinError
from laneformer.model import Laneformer
from laneformer.random_weights import write_random_checkpoint
from laneformer.schedule import Schedule


@cache
def held(folder, ranks, dtype=torch.float64):
    """Each rank's weights of a checkpoint."""
    lanes = LaneConfig.from_pretrained(folder).num_lanes // ranks
    return tuple(RankWeights.load(folder, range(r * lanes, (r + 1) * lanes), dtype) for r in range(ranks))


def twin_of(folder, text, ranks, programs, phases=token_phases, generations=0, tile=512, context=48):
    weights = held(folder, ranks)
    config = weights[0].config
    shape = DeviceShape(programs, tile=tile, block_positions=3)
    plan = Plan(config, Schedule.parse(text, config), ranks, shape, context)
    return Twin(plan, weights, phases, plan.generations + generations)


@pytest.mark.parametrize(("ranks", "programs", "count"), [(1, 1, 5), (2, 3, 4)])
@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_golden_logits_come_out(name, text, expected, ranks, programs, count):
    wanted = load_file(GOLDEN / name / f"{expected}.safetensors")
    tokens = wanted["input_ids"].tolist()[:count]
    _, logits_TV = twin_of(GOLDEN / name, text, ranks, programs).run(tokens)
    assert_close(logits_TV, wanted["logits"][:count].double(), 160, torch.float64)


def test_a_window_that_has_wrapped_with_a_lane_a_rank():
    # The window is 12 positions, its cache as long, in blocks of 3.
    wanted = load_file(GOLDEN / "dtp-delay2-swa" / "expected.safetensors")
    _, logits_TV = twin_of(GOLDEN / "dtp-delay2-swa", "checkpoint", 4, 2).run(wanted["input_ids"].tolist()[:16])
    assert_close(logits_TV, wanted["logits"][:16].double(), 160, torch.float64)


@pytest.mark.parametrize(("changes", "ranks"), [
    ({}, 3), ({"lm_head_type": "lane"}, 3), ({"pre_norm_lane_agg": True, "vocab_size": 41}, 2),
    ({"head_norms": True, "replicated_rmsn_scale": False}, 6), ({"tie_word_embeddings": True}, 1),
])  # fmt: skip
def test_six_lanes_of_odd_sizes_and_every_head_decode_what_the_model_does(tmp_path, changes, ranks):
    config = LaneConfig(20, 2, 6, 42, 36, num_lanes=6, head_dim=6, broadcast_delay=1, torch_dtype="float64")
    config = config.replace(**changes)
    write_random_checkpoint(config, tmp_path)
    drawn, logits_TV = twin_of(tmp_path, "checkpoint", ranks, 4, tile=64, context=9).run([7, 3], 6, seed=2)
    model = Laneformer.from_pretrained(tmp_path)
    # What was drawn goes in again.
    with torch.no_grad():
        expected_TV = model(torch.tensor([[7, 3, *drawn[1:-1]]]))[0]
    assert_close(logits_TV, expected_TV, 120, torch.float64)
    assert drawn == logits_TV.argmax(1).tolist()


def test_any_order_gives_the_same_bits_and_any_split_the_same_logits():
    runs = [
        twin_of(GOLDEN / "dtp-delay1", "delayed:3", ranks, programs).run([5, 9, 2], seed=seed)[1]
        for ranks, programs, seed in ((1, 1, 0), (2, 3, 1), (2, 3, 2), (4, 1, 3))
    ]
    for other in runs[1:]:
        assert relative_error(other, runs[0]) < 1e-14
    assert torch.equal(runs[1], runs[2])


# What is done to every phase, by name; each must be found out whatever the order.
def each(name, **changes):
    return lambda phase: replace(phase, **changes) if phase.name == name else phase


def too_few(name):
    return lambda phase: replace(phase, target=phase.target - 1) if phase.name == name else phase


def lands(n, **changes):
    """A change to what module n lands."""

    def change(phase):
        if phase.module != n or not phase.lands:
            return phase
        return replace(phase, lands=tuple(replace(land, **changes) for land in phase.lands))

    return change


def rearmed_at_once(phase):
    return replace(phase, lands=tuple(replace(land, rearms=True) for land in phase.lands))


WAITS = ("qkv", "attention", "output", "gate/up", "down", "final", "head", "agree")
READS = {"qkv": "STREAM", "attention": "QKV", "output": "WEIGHTED", "gate/up": "STREAM", "down": "UNITS",
         "final": "STREAM", "head": "FINAL", "agree": "BEST"}  # fmt: skip


def caught(name, text, change, seed=0, generations=0, count=3):
    """What the twin says of a plan whose phases are changed."""

    def phases(plan, position):
        return tuple(change(phase) for phase in token_phases(plan, position))

    with pytest.raises(TwinError) as found:
        twin_of(GOLDEN / name, text, 2, 3, phases, generations).run([5, 9, 2][:count], seed=seed)
    return str(found.value)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", WAITS)
def test_a_wait_for_one_arrival_too_few_is_found(name, seed):
    said = caught("dtp-delay1", "delayed:3", too_few(name), seed)
    assert said.startswith(f"{name}") and f"reads {READS[name]} of rank" in said
    assert "without having waited for the signal" in said or "it waits for " in said


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", WAITS)
def test_a_wait_that_is_left_out_is_found(name, seed):
    said = caught("dtp-delay1", "delayed:3", each(name, waits_for=None), seed)
    assert said.startswith(f"{name}") and f"reads {READS[name]} of rank" in said
    assert "without having waited for the signal" in said or "it waits for no signal" in said


def test_the_message_names_phase_program_rank_buffer_and_signal():
    # Found by a program that is ahead of one whose share is done but was not waited for.
    said = {caught("dtp-delay1", "delayed:3", too_few("agree"), seed) for seed in range(8)}
    signal = "without having waited for the signal scores of draw, program "
    assert any(text.startswith("agree, program ") and signal in text for text in said)


@pytest.mark.parametrize("text", ["delayed:1", "delayed:3", "delayed:4", "ladder"])
def test_a_ring_one_generation_too_short_is_found(text):
    said = caught("dtp-delay1", text, lambda phase: phase, generations=-1)
    assert "posts into box of rank" in said
    assert "without having heard that it was re-armed" in said or "not re-armed: it still holds" in said


def test_a_module_that_is_landed_early_is_found():
    # Module 4 lands what module 5 should; nobody then lands module 3, and module 4 is waited for twice.
    said = caught("dtp-delay1", "delayed:1", lands(4, module=4, number=4))
    assert "down of layer 2" in said and "which nobody fills" in said


def test_a_module_that_is_landed_before_it_is_sent_is_found():
    said = caught("dtp-delay1", "delayed:1", lands(4, module=6, number=6))
    assert said.startswith("output of layer 2") and "reads RING" in said


def test_a_mailbox_that_is_rearmed_before_its_last_use_is_found():
    said = caught("dtp-delay2-early-comm", "checkpoint", rearmed_at_once)
    assert "output of layer 2" in said and "for box of rank" in said and "which nobody fills" in said


def test_a_mailbox_that_is_never_rearmed_is_found():
    said = caught("dtp-delay1", "delayed:1", lands(3, rearms=False))
    assert "posts into box of rank" in said and "not re-armed: it still holds (0, 2)" in said


def test_a_count_that_never_comes_is_found():
    said = caught("dtp-delay1", "delayed:1", each("embed", arrivals=2))
    assert "all 6 programs wait for one another" in said and "3 arrivals at stream, which has 2" in said


def test_programs_without_work_must_wait_for_the_token_too(tmp_path):
    # 8 programs of 20 have nothing to do but to draw, where they read which tokens were seen.
    config = LaneConfig(8, 1, 4, 32, 40, num_lanes=4, head_dim=4)
    write_random_checkpoint(config, tmp_path)

    def phases(plan, position):
        return tuple(
            replace(phase, waiters=phase.arrivals) if phase.name == "qkv" else phase
            for phase in token_phases(plan, position)
        )

    twin_of(tmp_path, "delayed:1", 4, 20, tile=16384).run([1, 2])
    with pytest.raises(TwinError, match=r"reads SEEN .* without having waited for any signal after agree, program 0"):
        twin_of(tmp_path, "delayed:1", 4, 20, phases, tile=16384).run([1, 2])


def actors(count=3):
    """A ledger, and programs of one rank in a phase that signals `stream`."""
    phase = next(p for p in token_phases(Plan(LaneConfig(8, 1, 2, 8, 10), Schedule.silent(1), 1, DeviceShape(3), 4), 0))
    return Ledger(count), [Actor(q, 0, q, 0, phase) for q in range(count)]


def test_what_somebody_may_still_read_is_not_overwritten():
    ledger, (a, b, c) = actors()
    ledger.write(a, ("X", 0), (1,))
    ledger.signal(a, "s")
    for actor in (b, c):
        ledger.wait(actor, "s", 1)
    ledger.read(b, ("X", 0), (1,))
    with pytest.raises(TwinError, match=r"program 2 .* overwrites X of rank 0 .* signal stream of .* program 1"):
        ledger.write(c, ("X", 0), (2,))
    ledger.signal(b, "t")
    ledger.wait(c, "t", 1)
    ledger.write(c, ("X", 0), (2,))


def test_a_message_orders_what_was_read_before_it_but_passes_on_no_writes():
    ledger, (a, b, _) = actors()
    ledger.write(a, ("X", 0), (1,))
    ledger.post(a, ("box", 0, 0), (1,))
    ledger.read(a, ("X", 0), (1,))
    ledger.land(b, ("box", 0, 0), (1,), False)
    with pytest.raises(TwinError, match=r"program 1 .* reads X of rank 0 without having waited for the signal stream"):
        ledger.read(b, ("X", 0), (1,))
    # a has read once more since it sent.
    with pytest.raises(TwinError, match=r"program 1 .* overwrites X"):
        ledger.write(b, ("X", 0), (2,))
    ledger.post(a, ("box", 0, 1), (2,))
    ledger.land(b, ("box", 0, 1), (2,), False)
    ledger.write(b, ("X", 0), (2,))


def test_a_word_is_filled_again_only_by_who_landed_something_sent_after_the_signal_that_followed_its_rearming():
    ledger, (a, b, _) = actors()
    word, back = ("box", 0, 0), ("box", 1, 0)
    ledger.post(a, word, (1,))
    ledger.land(b, word, (1,), True)
    ledger.post(b, back, (1,))
    ledger.land(a, back, (1,), True)
    # What b sent was sent after it had re-armed the word, but before it released that.
    with pytest.raises(TwinError, match=r"program 0 .* posts into box of rank 0 .* without having heard"):
        ledger.post(a, word, (2,))
    ledger.signal(b, "s")
    with pytest.raises(TwinError, match="without having heard that it was re-armed"):
        ledger.post(a, word, (2,))
    ledger.post(b, ("box", 1, 1), (2,))
    ledger.land(a, ("box", 1, 1), (2,), True)
    ledger.post(a, word, (2,))
    with pytest.raises(TwinError, match=r"lands box of rank 0 at 0 with \(2,\) .* not \(3,\)"):
        ledger.land(b, word, (3,), True)
    with pytest.raises(TwinError, match=r"not re-armed: it still holds \(2,\)"):
        ledger.post(a, word, (3,))
