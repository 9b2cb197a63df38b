"""`infer plan`: predictions by phase add up to what `infer cost` says, and the picture shows them; no triton needed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from laneformer.config import LaneConfig
from laneformer.cost import MACHINES, Assumptions, Machine, parse_machine, schedule_latency
from laneformer.infer import cli
from laneformer.infer.plan_figure import COLORS, draw_timeline, messages_of
from laneformer.infer.plan_report import make_plan, plan_report, predict, predict_as_cost, programs_of
from laneformer.kernels.plan import DeviceShape
from laneformer.phase_cost import Load, phase_times

TWO_B = LaneConfig.preset("2b")
BARE = Assumptions(efficiency=1.0, sync_us=0.0, head_us=0.0)
# A byte a microsecond, and messages that take 100.
SLOW = Machine(2, replace(MACHINES["h200"], bandwidth=1e6, link_bandwidth=None, link_latency_us=100.0))


@pytest.fixture
def infer(monkeypatch):
    """Runs `infer` in this process; its result has exit_code, stdout and stderr."""
    monkeypatch.setattr(cli.messages, "_file", None)
    return lambda *words: CliRunner().invoke(cli.app, [str(word) for word in words])


@pytest.mark.parametrize("text", ["tensor-parallel", "delayed:1", "delayed:4", "delayed:4:early", "ladder", "silent"])
@pytest.mark.parametrize(("machine", "ranks"), [("8xh200", 8), ("h200", 1), ("8xmi300x", 8), ("2xa100", 4)])
def test_phases_add_up_to_what_infer_cost_says(text, machine, ranks):
    device, shape = parse_machine(machine), DeviceShape(132)
    for assumed in (Assumptions(), Assumptions(efficiency=0.5, sync_us=2.5, head_us=3.0, link_latency_us=17.0)):
        plan = make_plan(TWO_B, text, ranks, shape)
        found = predict_as_cost(plan, device, "float16", 3000, assumed)
        expected = schedule_latency(TWO_B, plan.schedule, device, ranks, "float16", 3000, assumed)
        assert found.total_us == pytest.approx(expected.total_us, rel=1e-12)
        assert found.part_us("stream_us") == pytest.approx(expected.stream_us)
        assert found.part_us("sync_us") == pytest.approx(expected.sync_us)
        assert found.part_us("wait_us") == pytest.approx(expected.wait_us)
        modules = [phase.wait_us for phase in found.phases if phase.name in ("output", "down")]
        assert modules == pytest.approx(list(expected.waits_us))


@pytest.mark.parametrize("head", ["lane", "vocab_parallel"])
def test_a_head_without_a_final_phase_has_one_sync_less(head):
    config, device = TWO_B.replace(lm_head_type=head), parse_machine("8xh200")
    plan = make_plan(config, "delayed:4", 8, DeviceShape(132))
    expected = schedule_latency(config, plan.schedule, device, 8, context=1024, assumptions=Assumptions(final_syncs=3))
    assert predict_as_cost(plan, device, "float16", 1024, Assumptions()).total_us == pytest.approx(expected.total_us)


def test_what_the_kernel_adds_to_that_is_uneven_work_wide_messages_and_logits():
    plan = make_plan(TWO_B, "tensor-parallel", 8, DeviceShape(132))
    device = parse_machine("8xh200")
    cost, found = (p(plan, device, "float16", 1024, Assumptions()) for p in (predict_as_cost, predict))
    # A word has 4 bytes instead of 2, to each of 7 peers, 31 times; then 4000 logits of every rank.
    wide, logits = 31 * 7 * 2 * 3072 / 450e3, 2.3 + 7 * 4 * 4000 / 450e3
    added = found.total_us - cost.total_us
    assert added == pytest.approx(found.part_us("uneven_us") + wide + logits)
    assert found.part_us("wait_us", "draw") == pytest.approx(logits)
    # Of every layer's matrices but the head's 96 of 132 programs have a tile, all of one size.
    matrices = found.part_us("uneven_us", "gate/up")
    assert matrices == pytest.approx(36 / 96 * 15 * 2 * 1536 * 3072 * 2 / (4.8e12 * 0.8) * 1e6)
    # 64 of 132 programs have a block of 32 positions of keys and values; the other 68 could stream one each.
    attention = found.part_us("uneven_us", "attention")
    assert attention == pytest.approx(68 * 15 * 32 * 2 * 96 * 2 / (4.8e12 * 0.8) * 1e6)


def test_a_phase_syncs_streams_waits_for_its_busiest_program_and_then_for_messages():
    loads = [
        Load("a", 0, 40, idle_bytes=10, syncs=2, sends=(0, 5)),
        Load("b", 1, 30, lands=(0,)),
        Load("c", None, 20, fixed_us=7.0, lands=(0,)),
    ]
    a, b, c = phase_times(loads, SLOW, 2, replace(BARE, sync_us=3.0)).phases
    assert (a.start_us, a.sync_us, a.stream_us, a.uneven_us, a.wait_us) == (0, 6, 40, 10, 0)
    assert (a.sent_us, a.arrives_us) == (56, 156)
    # 30 of the message's 100 pass while b streams.
    assert (b.start_us, b.wait_us, b.total_us) == (56, 70, 100)
    assert (c.start_us, c.wait_us, c.fixed_us, c.total_us) == (156, 0, 7, 27)
    even = phase_times(loads, SLOW, 2, BARE, uneven=False)
    assert (even.phases[1].start_us, even.total_us) == (40, 167)
    alone = phase_times(loads, SLOW, 1, BARE)
    assert alone.part_us("wait_us") == 0 and alone.total_us == 107


def test_predictions_for_the_published_2b_stand_beside_the_published_times():
    h200, mi300x = (plan_report(TWO_B, machine) for machine in ("8xh200", "8xmi300x"))
    assert (h200["published"]["us"], mi300x["published"]["us"]) == (476.0, 333.0)
    assert (h200["programs"]["count"], mi300x["programs"]["count"]) == (132, 304)
    rows = h200["schedules"]
    assert {text: round(row["total_us"]) for text, row in rows.items()} == {
        "tensor-parallel": 372, "delayed:4": 297, "silent": 297,
    }  # fmt: skip
    assert {round(row["even_us"]) for row in rows.values()} == {317, 242}
    assert round(mi300x["schedules"]["delayed:4"]["total_us"]) == 315
    for row in rows.values():
        assert row["syncs_per_layer"] == 5 and row["syncs_per_token"] == 79
        assert row["total_us"] == pytest.approx(sum(row["parts_us"].values()))
        assert row["total_us"] == pytest.approx(sum(phase["total_us"] for phase in row["phases"]))
        assert row["sensitivity_us"]["3"] - row["sensitivity_us"]["1"] == pytest.approx(2 * 79, abs=3)
    delayed = rows["delayed:4"]
    assert (delayed["messages"], delayed["message_bytes"], delayed["ring_generations"]) == (27, 12288, 10)
    # 10 messages of 8 slots, 2 of logits, 32 words of control, 4 bytes each.
    assert delayed["mailbox_bytes"] == 4 * (10 * 8 * 3072 + 2 * 32000 + 64 + 64)
    small = plan_report(LaneConfig.preset("small"), "2xh200", ranks=2)
    assert small["published"] is None and plan_report(TWO_B, "4xh200")["published"] is None
    assert plan_report(TWO_B, "4xh200", ranks=8)["published"] is None
    alone = plan_report(TWO_B, "h200")["schedules"]["delayed:4"]
    assert (alone["messages"], alone["message_bytes"], alone["parts_us"]["wait_us"]) == (0, 0, 0.0)


def test_smaller_tiles_are_shared_out_more_evenly():
    found = plan_report(TWO_B, "8xh200", tile=2048, block_positions=16)
    even = {phase["name"]: phase["even_share"] for phase in found["schedules"]["delayed:4"]["phases"]}
    # 768 tiles of 4 rows on 132 programs are 6 rounds, of which 768 / 792 hold work; 128 blocks of 132 programs.
    assert even["down"] == pytest.approx(768 / 792) and even["attention"] == pytest.approx(128 / 132)
    assert found["schedules"]["delayed:4"]["total_us"] < 247


def test_programs_of_an_unknown_machine_must_be_given():
    this = parse_machine("this", 1e10)
    assert programs_of(this, 7) == (7, "given")
    with pytest.raises(ValueError, match=r"this machine .* not known .*; give --programs"):
        programs_of(this, None)
    assert programs_of(parse_machine("a100"), None)[0] == 108


def test_the_command_prints_phases_times_and_assumptions_and_writes_what_it_prints(infer, tmp_path):
    asked = infer("plan", "--preset", "2b", "--machine", "8xh200", "--figure", tmp_path / "t.png", "--json", "-")
    assert asked.exit_code == 0, asked.stderr
    for words in ("gate/up", "8 rows of a lane's [768, 3072]", "hidden_units +96", "283.21 MB", "297", "372", "476",
                  "5 / 79", "not measured", "132 SMs", "80% of 4,800 GB/s", "7.6 us: 819"):  # fmt: skip
        assert words in asked.stdout, words
    document = json.loads(asked.stdout.strip().splitlines()[-1])
    assert document["measured"] is False and document["schedules"]["delayed:4"]["total_us"] == pytest.approx(297, abs=1)
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    folder = Path(__file__).parents[1] / "golden" / "dtp-delay1"
    small = infer("plan", "--folder", folder, "--ranks", 2, "--programs", 3, "--context", 20, "--schedules",
                  "checkpoint,ladder", "--sync-us", 0, "--tile", 512, "--json", tmp_path / "plan.json")  # fmt: skip
    assert small.exit_code == 0, small.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["schedules"]["checkpoint"]["schedule"] == "delayed:2" and found["context"] == 20
    assert found["schedules"]["ladder"]["parts_us"]["sync_us"] == 0 and found["shape"]["tile"] == 512


@pytest.mark.parametrize(("words", "said"), [
    ((), "give one of --preset and --folder"),
    (("--preset", "2b", "--ranks", "3"), "8 lanes cannot be shared equally by 3 ranks"),
    (("--preset", "2b", "--schedules", "late"), "no schedule 'late'; the forms are"),
    (("--preset", "2b", "--machine", "9xb200"), "no machine 'b200'"),
    (("--preset", "2b", "--machine", "this"), "needs its measured bandwidth"),
    (("--preset", "2b", "--context", "5000"), "position is 4999, the cache holds 0..4095"),
    (("--preset", "2b", "--dtype", "int8"), "no dtype 'int8'"),
    (("--preset", "2b", "--figure", "t.gif"), "a figure is written as .png"),
])  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_two(infer, words, said):
    asked = infer("plan", *words)
    assert asked.exit_code == 2
    assert said in asked.stderr and len(asked.stderr.strip().splitlines()) == 1


def test_the_picture_has_a_row_a_schedule_with_bars_as_long_as_the_phases(monkeypatch, tmp_path):
    kept = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (kept.append(self), save(self, *a, **k))[1])
    report = plan_report(TWO_B, "8xh200")
    draw_timeline(report, tmp_path / "t.svg")
    axes = kept[0].axes[0]
    assert [label.get_text().split("\n")[0] for label in axes.get_yticklabels()] == list(report["schedules"])
    places = axes.get_yticks()
    assert places[0] > places[1] > places[2]
    for place, row in zip(places, report["schedules"].values(), strict=True):
        bars = [bar for bar in axes.patches if abs(bar.get_y() + bar.get_height() / 2 - place) < 1e-9]
        assert len(bars) == 15 * len(COLORS)
        first, left = row["timeline"][0]["start_us"], 0.0
        for bar, (phase, part) in zip(bars, ((p, k) for p in row["timeline"] for k in COLORS), strict=True):
            assert (bar.get_x(), bar.get_width()) == pytest.approx((left, phase[part]))
            left += phase[part]
            assert bar.get_x() >= phase["start_us"] - first - 1e-9
    assert "µs" in axes.get_xlabel() and "Prediction" in axes.get_title()


def test_messages_in_the_picture_land_a_delay_later_and_share_no_line():
    rows = plan_report(TWO_B, "8xh200")["schedules"]
    assert messages_of(rows["silent"]["timeline"]) == []
    for message in messages_of(rows["tensor-parallel"]["timeline"]):
        # Whoever needs a message at once waits for it from when it is sent.
        assert message.landed == pytest.approx(message.sent) and message.line == 0
        assert message.arrives - message.sent == pytest.approx(2.3 + 7 * 12288 / 450e3)
    delayed = messages_of(rows["delayed:4"]["timeline"])
    assert [message.landed is None for message in delayed] == [False, False, True, True, True, True]
    assert delayed[0].landed == pytest.approx(delayed[4].sent)
    for i, one in enumerate(delayed):
        for other in delayed[i + 1 :]:
            assert other.line != one.line or (one.landed is not None and other.sent >= one.landed)


def test_the_plan_needs_no_triton():
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from laneformer.infer.cli import app\n"
        "app(['plan', '--preset', 'demo', '--machine', '2xh200', '--schedules', 'delayed:4'])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "hidden_units" in result.stdout
