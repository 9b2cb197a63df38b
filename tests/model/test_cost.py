"""The cost model against the model itself, the published figures and schedules played by hand."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from laneformer import LaneConfig, Laneformer, Schedule
from laneformer.cost import (
    MACHINES,
    Assumptions,
    Device,
    Machine,
    count_parameters,
    decode_bytes,
    decode_flops,
    dtype_bytes,
    floor_ms,
    kv_bytes,
    kv_bytes_per_token,
    lanes_per_rank,
    parse_machine,
    partial_bytes,
    schedule_latency,
    training_flops,
)
from laneformer.infer.cost_report import cost_report, print_cost

TWO_B = LaneConfig.preset("2b")
KINDS = [
    {}, {"pre_norm_lane_agg": True, "replicated_rmsn_scale": False}, {"lm_head_type": "lane"},
    {"lm_head_type": "vocab_parallel"}, {"tie_word_embeddings": True}, {"replicated_rmsn_scale": False},
    {"lm_head_type": "vocab_parallel", "tie_word_embeddings": True}, {"head_norms": True},
]  # fmt: skip
BARE = Assumptions(efficiency=1.0, sync_us=0.0, head_us=0.0)


def config(**changes):
    keys = {
        "hidden_size": 26, "num_hidden_layers": 3, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 10,
        "intermediate_size": 54, "vocab_size": 102, "num_lanes": 6, "broadcast_delay": 1,
    }  # fmt: skip
    return LaneConfig(**{**keys, **changes})


def machine(count, latency, bandwidth=1e9):
    """Devices that move a gigabyte a second over links of a given latency in microseconds."""
    return Machine(count, Device("toy", bandwidth, None, None, None, latency, "made up"))


@pytest.mark.parametrize("changes", KINDS, ids=lambda c: "-".join(c) or "plain")
def test_parameters_of_each_part_are_those_of_the_model(changes):
    parts = {"embedding": 0, "attention": 0, "feed_forward": 0, "norms": 0, "head": 0}
    for key, parameter in Laneformer(config(**changes), device="meta").named_parameters():
        part = next(
            part for part, word in (("norms", "norm"), ("embedding", "tok_emb"), ("head", "lm_head"),
                                    ("attention", "attention"), ("feed_forward", "feed_forward")) if word in key
        )  # fmt: skip
        parts[part] += parameter.numel()
    counted = count_parameters(config(**changes))
    assert vars(counted) == parts
    assert counted.total == sum(parts.values())


@pytest.mark.parametrize("preset", ["2b", "small", "demo"])
def test_a_preset_has_as_many_parameters_as_its_model(preset):
    c = LaneConfig.preset(preset)
    assert count_parameters(c).total == sum(p.numel() for p in Laneformer(c, device="meta").parameters())


@pytest.mark.parametrize("changes", KINDS, ids=lambda c: "-".join(c) or "plain")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_token_reads_every_weight_but_the_embedding_of_which_it_reads_a_row(changes, dtype):
    c, width = config(**changes), dtype_bytes(dtype)
    parameters = count_parameters(c)
    read = parameters.total - (0 if c.tie_word_embeddings else parameters.embedding) + c.hidden_size
    assert decode_bytes(c, dtype).total == read * width


@pytest.mark.parametrize("changes", KINDS, ids=lambda c: "-".join(c) or "plain")
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_ranks_share_everything_but_the_common_norms_and_the_row(changes, ranks):
    c = config(**changes)
    whole, rank = decode_bytes(c, context=9), decode_bytes(c, context=9, ranks=ranks)
    norms = [p.numel() for key, p in Laneformer(c, device="meta").named_parameters() if "norm.weight" in key]
    assert ranks * rank.total - whole.total == (ranks - 1) * 2 * (sum(norms) + c.hidden_size)


def test_the_fullest_rank_counts_when_lanes_do_not_divide():
    assert [lanes_per_rank(config(), ranks) for ranks in (1, 2, 4, 5, 6)] == [6, 3, 2, 2, 1]
    assert decode_bytes(config(), ranks=4).weights == decode_bytes(config(), ranks=3).weights
    for ranks in (0, 7):
        with pytest.raises(ValueError, match=f"ranks must be 1..6, one lane each at most, got {ranks}"):
            lanes_per_rank(config(), ranks)


def test_the_published_2b_moves_its_published_bytes():
    assert decode_bytes(TWO_B).total == pytest.approx(4.44e9, rel=1e-3)
    assert decode_bytes(TWO_B, ranks=8).total == pytest.approx(555e6, rel=2e-3)
    assert kv_bytes_per_token(TWO_B) == 92_160
    assert partial_bytes(TWO_B) == 6144
    assert kv_bytes(TWO_B, 4000) == 92_160 // 15 * (10 * 2048 + 5 * 4000)
    assert sum(decode_bytes(TWO_B, context=4000).cache) == kv_bytes(TWO_B, 4000)


@pytest.mark.parametrize(("name", "floors"), [("h200", (926, 463, 231, 116)), ("mi300x", (838, 419, 210, 105))])
def test_the_published_2b_has_its_published_floors(name, floors):
    got = [round(1e3 * floor_ms(TWO_B, parse_machine(f"{n}x{name}"), n)) for n in (1, 2, 4, 8)]
    assert tuple(got) == floors


def test_the_floor_is_the_compute_where_that_takes_longer():
    slow = Machine(2, Device("slow", 1e15, 1e9, None, None, 1.0, "made up"))
    assert floor_ms(config(), slow, 2) == pytest.approx(1e3 * decode_flops(config()) / 2e9)
    assert floor_ms(config(), slow, 6, context=50) == pytest.approx(1e3 * decode_flops(config(), 50) / 2e9)


def test_a_token_takes_two_flops_a_weight_and_four_a_head_size_and_position():
    c = config(sliding_window=5, swa_layers=(1,), lm_head_type="lane")
    parts = count_parameters(c)
    matrices = parts.attention + parts.feed_forward + parts.head
    assert decode_flops(c) == 2 * matrices
    assert decode_flops(c, 9) == 2 * matrices + 4 * 12 * 10 * (9 + 5 + 9)
    spans = [sum(min(i + 1, w) for i in range(9)) / 9 for w in (9, 5, 9)]
    assert training_flops(c, 9, with_attention=False) == 6 * matrices
    assert training_flops(c, 9) == pytest.approx(3 * (2 * matrices + 4 * 12 * 10 * sum(spans)))
    tied, untied = config(tie_word_embeddings=True), config()
    assert decode_flops(tied) == decode_flops(untied)


@pytest.mark.parametrize(("sync_us", "total"), [(1, 234), (2, 313), (3, 392), (5, 550)])
def test_barriers_decide_the_2b_on_eight_h200(sync_us, total):
    assumed = Assumptions(efficiency=0.8, sync_us=sync_us, head_us=10.0, link_latency_us=0.0)
    latency = schedule_latency(TWO_B, Schedule.from_config(TWO_B), parse_machine("8xh200"), 8, assumptions=assumed)
    assert round(latency.total_us) == total
    assert latency.sync_us == 79 * sync_us


@pytest.mark.parametrize("latency", [0.5, 7.0, 300.0])
def test_tensor_parallelism_pays_every_latency_and_silence_only_the_heads(latency):
    token = schedule_latency(config(), Schedule.tensor_parallel(3), machine(6, latency), 6, assumptions=BARE)
    assert token.waits_us == pytest.approx([latency] * 6)
    assert token.wait_us == pytest.approx(7 * latency)
    quiet = schedule_latency(config(), Schedule.silent(3), machine(6, latency), 6, assumptions=BARE)
    assert (sum(quiet.waits_us), quiet.wait_us) == (0.0, latency)
    assert token.total_us - quiet.total_us == pytest.approx(6 * latency)


@pytest.mark.parametrize("delay", [1, 2, 3, 5])
def test_a_delay_pays_nothing_until_the_latency_passes_that_many_modules(delay):
    c = config(intermediate_size=1200)
    weights = decode_bytes(c, ranks=6).weights
    # The shortest stretch that a message has: `delay` modules, streamed at a gigabyte a second, in microseconds.
    stretch = min(sum(weights[m + 1 : m + 1 + delay]) for m in range(6 - delay)) / 1e3
    plan = Schedule.delayed(3, delay)
    assert sum(schedule_latency(c, plan, machine(6, 0.999 * stretch), 6, assumptions=BARE).waits_us) == 0.0
    assert sum(schedule_latency(c, plan, machine(6, 1.01 * stretch), 6, assumptions=BARE).waits_us) > 0.0


def test_waits_are_what_a_hand_played_token_has():
    c = config()
    a, f = (size / 1e3 for size in decode_bytes(c, ranks=6).weights[:2])
    slow = machine(6, 100.0)
    assert max(a, f) < 50
    # Delay 2: module 0's partial lands 100 us after it was posted, and two modules of that have passed. Waiting gives
    # module 1's partial the same time to arrive; module 3 was posted after the wait, so module 5 waits again.
    waits = schedule_latency(c, Schedule.delayed(3, 2), slow, 6, assumptions=BARE).waits_us
    assert waits == pytest.approx([0, 0, 100 - a - f, 0, 0, 100 - a - f], abs=1e-9)
    # Ladder: two messages are under way during each wait, and the last module waits for its own.
    waits = schedule_latency(c, Schedule.ladder(3), slow, 6, assumptions=BARE).waits_us
    assert waits == pytest.approx([0, 100 - f, 0, 100 - f, 0, 100], abs=1e-9)
    # Early communication waits at once for the first modules.
    waits = schedule_latency(c, Schedule.delayed(3, 2, early=True), slow, 6, assumptions=BARE).waits_us
    assert waits[:3] == pytest.approx([100, 100, 0])


def test_all_lanes_on_one_rank_wait_for_nobody():
    token = schedule_latency(config(), Schedule.tensor_parallel(3), machine(8, 1000.0), 1, assumptions=BARE)
    assert (token.wait_us, token.message_us) == (0.0, 0.0)
    assert token.total_us == pytest.approx(decode_bytes(config()).total / 1e3)


def test_a_message_takes_its_transfer_time_on_top_and_assumptions_override_the_link():
    device = Device("linked", 1e9, None, None, 2e6, 4.0, "made up")
    token = schedule_latency(config(), Schedule.tensor_parallel(3), Machine(3, device), 3, assumptions=BARE)
    assert token.message_us == pytest.approx(4 + 2 * 26 * 2 / 2)
    zero = Assumptions(link_latency_us=0.0)
    assert schedule_latency(config(), Schedule.silent(3), machine(3, 9.0), 3, assumptions=zero).wait_us == 0.0


def test_more_ranks_than_devices_share_the_bandwidth():
    assert machine(1, 1.0).rank_bandwidth(4) == 0.25e9
    assert machine(8, 1.0).rank_bandwidth(4) == 1e9
    alone, shared = (floor_ms(config(), machine(1, 1.0), ranks) for ranks in (1, 6))
    assert shared == pytest.approx(alone, rel=0.05)


@pytest.mark.parametrize(("text", "count", "key"), [
    ("8xh200", 8, "h200"), ("h100", 1, "h100"), (" 4 X MI300X ", 4, "mi300x"), ("2*a100", 2, "a100"),
])  # fmt: skip
def test_a_machine_is_a_count_and_a_device(text, count, key):
    assert parse_machine(text) == (count, MACHINES[key])


def test_named_machines_have_their_nominal_figures_and_say_where_from():
    figures = {key: (d.bandwidth / 1e12, (d.peak_flops or 0) / 1e12) for key, d in MACHINES.items()}
    assert figures == {"h100": (3.35, 989), "h200": (4.8, 989), "mi300x": (5.3, 1307), "a100": (2.039, 312)}
    assert all("data sheet" in device.source for device in MACHINES.values())


def test_this_machine_takes_the_bandwidth_that_was_measured():
    count, device = parse_machine("this", measured_bandwidth=3e10)
    assert (count, device.bandwidth, device.peak_flops) == (1, 3e10, None)
    for measured in (None, 0.0):
        with pytest.raises(ValueError, match="needs its measured bandwidth in bytes a second, got"):
            parse_machine("this", measured)


@pytest.mark.parametrize(("text", "words"), [
    ("8xh20", "no machine 'h20', did you mean h200.*known are h100, h200, mi300x, a100 and this"),
    ("8xqqq", "no machine 'qqq'; known are h100"), ("0xh200", "has 0 devices, expected at least 1"),
    ("", "known are"), ("8x", "known are"), ("-1xh200", "known are"),
])  # fmt: skip
def test_an_unknown_machine_is_refused_with_the_known_and_the_nearest(text, words):
    with pytest.raises(ValueError, match=words):
        parse_machine(text)


@pytest.mark.parametrize(("build", "words"), [
    (lambda: Assumptions(efficiency=1.5), "share of bandwidth in .*, got 1.5"),
    (lambda: Assumptions(sync_us=-1.0), "sync_us must not be negative, got -1.0"),
    (lambda: Assumptions(link_latency_us=-2.0), "link_latency_us must not be negative, got -2.0"),
    (lambda: dtype_bytes("float17"), "dtype is 'float17', expected a floating-point type"),
    (lambda: dtype_bytes(torch.int8), "expected a floating-point type"),
    (lambda: cost_report(TWO_B, "8xh200", context=5000), r"context is 5000, expected 0\.\.4096"),
    (lambda: cost_report(TWO_B, "8xh200", ranks=9), r"ranks must be 1\.\.8"),
    (lambda: cost_report(TWO_B, "8xh200", schedules=["late"]), "no schedule 'late'; the forms are"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_what_was_given(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_a_report_is_json_and_prints_what_it_holds():
    report = json.loads(json.dumps(cost_report(TWO_B, "8xh200", context=1000)))
    assert report["parameters"]["total"] == 2_320_069_632
    assert round(report["floor_us"]["weights_only"]) == 116
    assert report["floor_us"]["at_context"] > report["floor_us"]["weights_only"]
    assert report["bytes"]["cache_at_context"] == 92_160_000
    assert report["bytes"]["fits"] is True
    assert (report["ranks"], report["lanes_per_rank"], report["context"]) == (8, 1, 1000)
    rows = report["schedules"]
    assert list(rows) == ["tensor-parallel", "ladder", "checkpoint", "silent"]
    assert rows["checkpoint"]["schedule"] == "delayed:4"
    for row in rows.values():
        parts = sum(row[key] for key in ("stream_us", "sync_us", "head_us", "wait_us"))
        assert row["total_us"] == pytest.approx(parts)
        assert row["wait_us"] == pytest.approx(sum(row["module_waits_us"]) + row["head_wait_us"])
    console = Console(width=200, record=True, file=io.StringIO())
    print_cost(report, console)
    text = console.export_text()
    for word in ("2,320,069,632", "4.44 GB", "116 us", "92,160 bytes", "delayed:4", "efficiency 0.8", "NVIDIA H200"):
        assert word in text


def test_a_report_on_this_machine_assumes_free_barriers_and_the_measured_bandwidth():
    report = cost_report(LaneConfig.preset("demo"), "this", ranks=2, measured_bandwidth=1e10, dtype="float32")
    row = report["schedules"]["silent"]
    assert (row["sync_us"], row["head_us"], report["bytes"]["fits"]) == (0.0, 0.0, None)
    assert row["stream_us"] == pytest.approx(report["floor_us"]["at_context"])
    assert row["share_of_floor"] == pytest.approx(row["stream_us"] / (row["stream_us"] + row["head_wait_us"]))
    assert report["context"] == 512
