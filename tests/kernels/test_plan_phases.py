"""The plan's phases are what the kernel does, wait by wait; bytes and messages are counted; bad plans are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from simulated_ranks import Ranks

from laneformer.config import LaneConfig
from laneformer.cost import decode_bytes
from laneformer.infer.weights import RankWeights
from laneformer.kernels import phases as kernel_phases
from laneformer.kernels import sampling
from laneformer.kernels.aborts import PHASES
from laneformer.kernels.plan import COUNTERS, DeviceShape, Plan, PlanError
from laneformer.kernels.plan_phases import (
    Land,
    check_plan,
    generation,
    logit_bytes,
    message_bytes,
    sampling_syncs,
    syncs_per_layer,
    token_phases,
)
from laneformer.random_weights import write_random_checkpoint
from laneformer.schedule import Schedule

TWO_B = LaneConfig.preset("2b")
TINY = LaneConfig(8, 2, 4, 32, 40, num_lanes=4, head_dim=4)
SCHEDULES = ["tensor-parallel", "delayed:1", "delayed:4", "delayed:4:early", "ladder", "silent"]


def plan_of(config=TWO_B, text="delayed:4", ranks=8, programs=132, context=4096, **shape):
    return Plan(config, Schedule.parse(text, config), ranks, DeviceShape(programs, **shape), context)


def number(value):
    """A whole number out of the interpreter's wrapping."""
    return int(value.handle.data.item()) if hasattr(value, "handle") else int(value)


@pytest.mark.parametrize(
    ("text", "changes"),
    [("delayed:1", {}), ("ladder", {"lm_head_type": "lane", "sliding_window": 2, "swa_layers": (1,)})],
)
def test_the_kernel_waits_where_and_for_what_the_plan_says(monkeypatch, tmp_path, text, changes):
    write_random_checkpoint(TINY.replace(**changes), tmp_path)
    ranks = Ranks([RankWeights.load(tmp_path, lanes, torch.float32) for lanes in ((0, 1), (2, 3))], text, 8, 5, block=1)
    true_wait, seen = kernel_phases.wait, set()

    def wait(counter, target, p_abort, aborts, rank, program, place, *rest):
        place_ = number(place)
        phase = PHASES[place_ & 15]
        # The head's phases bear the number of a module after the last.
        module = place_ >> 4 & 0xFFF if phase in PHASES[:5] else None
        seen.add((number(rank), number(program), place_ >> 16, phase, module, number(target)))
        return true_wait(counter, target, p_abort, aborts, rank, program, place, *rest)

    monkeypatch.setattr(kernel_phases, "wait", wait)
    ranks.run(5, 0, 2)
    planned, before = set(), dict.fromkeys(COUNTERS, 0)
    for token in range(2):
        found = token_phases(ranks.plan, token)
        for phase in found:
            if phase.waits_for:
                name = "draw" if phase.name == "agree" else phase.name
                target = before[phase.waits_for] + phase.target
                planned |= {(r, p, token, name, phase.module, target) for r in range(2) for p in range(phase.waiters)}
        for phase in found:
            if phase.signals:
                before[phase.signals] += phase.arrivals
    assert seen == planned
    for memory in ranks.memories:
        assert dict(zip(COUNTERS, memory.tensors["TARGETS"].tolist(), strict=True)) == before


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("context", [1, 1000, 3000])
def test_phases_stream_the_bytes_that_a_token_costs(ranks, context):
    for config in (TWO_B, TWO_B.replace(lm_head_type="lane"), TWO_B.replace(lm_head_type="vocab_parallel"),
                   TWO_B.replace(head_norms=True, replicated_rmsn_scale=False)):  # fmt: skip
        cost = decode_bytes(config, "float16", context, ranks)
        found = token_phases(plan_of(config, ranks=ranks), context - 1)
        assert sum(phase.cache_bytes for phase in found) == sum(cost.cache)
        assert sum(phase.weight_bytes + phase.cache_bytes for phase in found) == cost.total
        in_layers = {phase.module: 0 for phase in found if phase.module is not None}
        for phase in found:
            if phase.module is not None:
                in_layers[phase.module] += phase.weight_bytes
        assert list(in_layers.values()) == list(cost.weights)


@pytest.mark.parametrize("text", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_layer_has_five_syncs_whatever_the_schedule(text, ranks):
    plan = plan_of(text=text, ranks=ranks)
    check_plan(plan, resident=132)
    assert syncs_per_layer(plan) == 5


def test_work_is_split_as_the_kernel_splits_it():
    found = {phase.name: phase for phase in token_phases(plan_of(), 1023) if phase.layer in (7, None)}
    # 768 rows of 132 programs are 6 each; 8 is the next power of two, so 96 programs have a tile and 36 none.
    qkv = found["qkv"]
    assert (qkv.items, qkv.waiters, qkv.arrivals, qkv.target) == (96, 132, 96, 132 + 7 * 96)
    assert qkv.idle_bytes == 36 * 8 * 3072 * 2
    assert qkv.weight_bytes == (768 + 1) * 3072 * 2
    assert list(qkv.items_of(95, 132)) == [95] and list(qkv.items_of(96, 132)) == []
    # 2 key-value heads, 32 blocks of 32 positions of 2 x 96 elements: 64 programs have a block and 68 none.
    attention = found["attention"]
    assert (attention.items, attention.cache_bytes) == (64, 2 * 1024 * 2 * 96 * 2)
    assert attention.idle_bytes == (132 - 64) * 32 * 2 * 96 * 2
    # 250 tiles of 16 rows: the busiest programs have 2, program 118 the 119th and no 251st.
    head = found["head"]
    assert (list(head.items_of(117, 132)), list(head.items_of(118, 132))) == ([117, 249], [118])
    assert head.idle_bytes == (2 * 132 - 250) * 16 * 3072 * 2
    assert (found["final"].target, found["draw"].arrivals, found["agree"].waiters) == (132 + 15 * 96, 125, 132)
    assert (found["final"].waits_for, head.waits_for) == ("stream", "final")


def test_a_rank_with_several_lanes_takes_all_of_them_in_one_item_of_an_output_matrix():
    found = {phase.name: phase for phase in token_phases(plan_of(ranks=1), 200) if phase.layer in (0, None)}
    assert found["output"].items == 96 and found["qkv"].items == 8 * 96
    # Every program of the first 96 has 32 rows of 8 lanes.
    assert found["output"].idle_bytes == 36 * 32 * 384 * 8 * 2
    # The last block of the 201 positions holds 9.
    assert found["attention"].cache_bytes == 16 * 201 * 2 * 96 * 2


def test_messages_are_numbered_sent_landed_and_rearmed_as_the_schedule_says():
    plan = plan_of(TINY.replace(num_hidden_layers=3), "delayed:2:early", 2, 5, 16)
    rows = {phase.module: phase for phase in token_phases(plan, 0) if phase.name in ("output", "down")}
    # The first two modules are landed at once, and once more two modules later; the last two send nothing.
    assert [phase.sends for phase in rows.values()] == [0, 1, 2, 3, None, None]
    assert rows[1].lands == (Land(1, 1, True, False),)
    assert rows[3].lands == (Land(1, 1, False, True),)
    assert rows[5].lands == (Land(3, 3, False, True),)
    final = next(phase for phase in token_phases(plan, 0) if phase.name == "final")
    assert (final.sends, final.lands) == (4, (Land(6, 4, True, True),))
    assert "box" in rows[4].reads and "box" in rows[0].writes
    alone = token_phases(plan_of(TINY, "delayed:2:early", 1, 5, 16), 0)
    assert not any("box" in (*phase.reads, *phase.writes) for phase in alone)
    # 5 messages a token in a ring.
    length = plan.generations
    assert [generation(plan, token, 3) for token in range(3)] == [3 % length, 8 % length, 13 % length]


def test_bytes_of_messages():
    assert message_bytes(plan_of()) == 4 * 3072 and logit_bytes(plan_of()) == 4 * 4000
    # Three lanes are no subtree of a balanced tree over six, so each is sent.
    odd = TINY.replace(num_attention_heads=6, num_lanes=6, intermediate_size=36, num_key_value_heads=6)
    assert message_bytes(plan_of(odd, "delayed:1", 2, 5, 16)) == 3 * 4 * 8
    assert logit_bytes(plan_of(TINY.replace(lm_head_type="lane"), "delayed:1", 2, 5, 16)) == 4 * 40
    # Rows that fill the last lane's slice of the head are sent too, though no one takes them.
    assert logit_bytes(plan_of(TINY.replace(vocab_size=41), "delayed:1", 2, 5, 16)) == 4 * 2 * 11


def test_top_k_and_top_p_count_eight_bits_at_a_time():
    digits = sampling.DIGITS.value
    assert [sampling_syncs(k, p) for k, p in ((False, False), (True, False), (False, True), (True, True))] == [
        1, 2 + digits, 2 + digits, 2 + 2 * digits,
    ]  # fmt: skip


def changed(plan, name, module=None, **changes):
    """The plan's phases with fields of one replaced."""
    return [
        replace(phase, **changes) if (phase.name, phase.module) == (name, module) else phase
        for phase in token_phases(plan, plan.context - 1)
    ]


def landing(plan, n, **changes):
    """The plan's phases with the first landing of module n's changed."""
    name = "down" if n % 2 else "output"
    phase = next(p for p in token_phases(plan, plan.context - 1) if (p.name, p.module) == (name, n))
    return changed(plan, name, n, lands=(replace(phase.lands[0], **changes),))


TWO_RANKS = plan_of(TINY.replace(num_hidden_layers=3), "delayed:2", 2, 5, 16)
EARLY = plan_of(TINY.replace(num_hidden_layers=3), "delayed:2:early", 2, 5, 16)


@pytest.mark.parametrize(("check", "words"), [
    (lambda: check_plan(TWO_RANKS, resident=4), "5 programs, the device holds 4 at once"),
    (lambda: check_plan(TWO_RANKS, generations=TWO_RANKS.generations - 1), "hold 3 messages, .* needs 4"),
    (lambda: check_plan(TWO_RANKS, changed(TWO_RANKS, "qkv", 2, target=8)),
     "qkv of layer 1 waits for 8 arrivals at stream, 9 come before"),
    (lambda: check_plan(TWO_RANKS, changed(TWO_RANKS, "down", 3, target=11)), "waits for 11 .* hidden_units, 10 come"),
    (lambda: check_plan(TWO_RANKS, changed(TWO_RANKS, "output", 2, waits_for=None)),
     r"output of layer 1 waits for no counter \(0 arrivals\), but reads WEIGHTED"),
    (lambda: check_plan(TWO_RANKS, changed(TWO_RANKS, "qkv", 2, waiters=6)), "qkv of layer 1 has 6 programs of 5"),
    (lambda: check_plan(TWO_RANKS, landing(TWO_RANKS, 2, module=4, number=4)),
     "output of layer 1 lands message 4 of module 4, which is none of 3 sent"),
    (lambda: check_plan(TWO_RANKS, landing(TWO_RANKS, 2, module=1, number=1)),
     r"output of layer 1 lands modules \[1\], the schedule has modules \[0\]"),
    (lambda: check_plan(TWO_RANKS, landing(TWO_RANKS, 2, number=1)), "message 1 of module 0, which is message 0"),
    (lambda: check_plan(EARLY, landing(EARLY, 1, rearms=True)),
     "down of layer 0 re-arms message 1, which down of layer 1 lands once more"),
    (lambda: check_plan(TWO_RANKS, landing(TWO_RANKS, 3, rearms=False)), "message 1 of module 1 .* re-armed in 0"),
    (lambda: check_plan(TWO_RANKS, changed(TWO_RANKS, "down", 3, sends=2)), "sends message 2, the next is 3"),
    (lambda: check_plan(TWO_RANKS, changed(TWO_RANKS, "qkv", 0, writes=())), "attention of layer 0 reads QKV, written"),
    (lambda: check_plan(TWO_RANKS, [token_phases(TWO_RANKS, 1)[0], *token_phases(TWO_RANKS, 1)]), "waits for 5 .* 10"),
    (lambda: token_phases(TWO_RANKS, 16), r"position is 16, the cache holds 0\.\.15"),
])  # fmt: skip
def test_a_plan_that_cannot_be_carried_out_is_refused_with_both_numbers(check, words):
    with pytest.raises(PlanError, match=words):
        check()


def test_a_sixth_sync_in_a_layer_is_refused():
    found = token_phases(TWO_RANKS, 3)
    extra = replace(found[2], signals=None, arrivals=0)
    with pytest.raises(PlanError, match="layer 0 has 6 syncs, at most 5"):
        check_plan(TWO_RANKS, [*found[:3], extra, *found[3:]])
