"""The picture shows the numbers of the document: a line a schedule, bars from lowest to highest, peers across."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from laneformer.infer.figure import STYLES, check_figure_path, draw


def row(schedule, latency, speed, ranks=2, runner="compiled"):
    return {
        "schedule": schedule, "runner": runner, "ranks": ranks, "link_latency_us": latency, "tokens_per_s": speed,
        "tokens_per_s_spread": {"low": speed - 3, "high": speed + 5}, "dtype": "float16",
    }  # fmt: skip


RESULT = {
    "model": {"num_lanes": 4, "hidden_size": 44, "num_hidden_layers": 3},
    "environment": {"machine": "a machine"},
    "results": [
        row("tensor-parallel", 0.0, 90.0, 1), row("tensor-parallel", 0.0, 100.0), row("delayed:4", 0.0, 110.0),
        row("tensor-parallel", 200.0, 40.0), row("delayed:4", 200.0, 108.0), row("dense", 0.0, 55.0, 1, "hf-generate"),
    ],
}  # fmt: skip


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """The axes of the figure of RESULT."""
    kept = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (kept.append(self), save(self, *a, **k))[1])
    draw(RESULT, tmp_path / "speed.png")
    return kept[0].axes[0]


def lines_of(axes):
    """Label to points of every line of a schedule, and label to height of every line across."""
    handles, labels = axes.get_legend_handles_labels()
    lines = {label: handle[0] for handle, label in zip(handles, labels, strict=True) if isinstance(handle, tuple)}
    across = {label: h.get_ydata()[0] for h, label in zip(handles, labels, strict=True) if not isinstance(h, tuple)}
    points = {label: list(zip(*line.get_data(), strict=True)) for label, line in lines.items()}
    return lines, points, across


def test_every_schedule_is_a_line_of_speed_over_latency_for_the_most_measured_ranks(drawn):
    _, points, _ = lines_of(drawn)
    assert points == {
        "tensor-parallel": [(0.0, 100.0), (200.0, 40.0)],
        "delayed:4": [(0.0, 110.0), (200.0, 108.0)],
    }


def test_bars_reach_from_the_slowest_round_to_the_fastest(drawn):
    handles, labels = drawn.get_legend_handles_labels()
    bars = handles[labels.index("tensor-parallel")][2][0]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[97.0, 105.0], [37.0, 45.0]]


def test_peers_are_lines_across_and_schedules_keep_their_colour(drawn):
    lines, _, across = lines_of(drawn)
    assert across == {"hf-generate (one process)": 55.0}
    assert lines["tensor-parallel"].get_color() == STYLES["tensor-parallel"][0] != lines["delayed:4"].get_color()


def test_the_axes_say_what_they_show_and_speed_starts_at_zero(drawn):
    assert "latency" in drawn.get_xlabel() and "tokens/s" in drawn.get_ylabel()
    assert drawn.get_ylim()[0] == 0
    assert "2 ranks, 4 lanes" in drawn.get_title() and "a machine" in drawn.get_title()


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_figure_is_written_in_the_format_of_its_name_and_nothing_else_is(suffix, start, tmp_path):
    draw(RESULT, tmp_path / f"speed{suffix}")
    assert (tmp_path / f"speed{suffix}").read_bytes().startswith(start)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_name_of_another_format_is_refused():
    with pytest.raises(ValueError, match=r"a figure is written as \.png, \.svg, \.pdf, got 'speed\.gif'"):
        check_figure_path("speed.gif")
