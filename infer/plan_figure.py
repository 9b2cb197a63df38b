"""Some layers of a predicted token as a picture: who streams, who syncs, who waits for peers; a row a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laneformer.files import replace_files

# Colour-blind safe (Okabe and Ito); in the order in which they pass within a phase.
COLORS = {"sync_us": "#999999", "stream_us": "#0072b2", "uneven_us": "#a6d5f0", "wait_us": "#d55e00"}
NAMES = {
    "sync_us": "sync inside the rank",
    "stream_us": "streaming weights and cache",
    "uneven_us": "uneven work: some programs are done",
    "wait_us": "waiting for peers",
}
# So that names fit above short bars.
SHORT = {"attention": "attn", "output": "out"}
HEIGHT, ARROWS, MESSAGE = 0.34, 0.11, "#000000"
# Between the end of a message and the next on its line.
GAP_US = 0.5


@dataclass(frozen=True)
class Message:
    """An arrow: when it leaves, is there, and is landed (None beyond the picture), and its line below the bars."""

    sent: float
    arrives: float
    landed: float | None
    line: int


def draw_timeline(report: dict[str, Any], path: Path) -> None:
    """Writes the timelines of a `plan_report`, its first schedule on top."""
    from matplotlib.figure import Figure

    rows = [schedule["timeline"] for schedule in report["schedules"].values()]
    messages = [messages_of(phases) for phases in rows]
    below = [ARROWS * (1 + max((m.line for m in found), default=-1)) for found in messages]
    places, y = [], 0.0
    for depth in below:
        places.append(y)
        y -= depth + 2.6 * HEIGHT
    figure = Figure(figsize=(14, 1.6 - 1.5 * y), layout="constrained", dpi=150)
    axes = figure.subplots()
    for place, phases, found in zip(places, rows, messages, strict=True):
        draw_row(axes, place, phases, found)
    finish(axes, report, places, places[-1] - below[-1] - HEIGHT)
    replace_files({path: lambda beside: figure.savefig(beside, format=path.suffix[1:])})


def messages_of(phases: list[dict[str, Any]]) -> list[Message]:
    """The messages that phases of a picture send, each on the highest line where nothing else is under way."""
    origin, end = phases[0]["start_us"], end_of(phases[-1])
    found: list[Message] = []
    free: list[float] = []
    for phase in phases:
        if phase["sends"] is None:
            continue
        sent, arrives = phase["sent_us"] - origin, phase["arrives_us"] - origin
        landing = [other for other in phases if phase["sends"] in other["lands"]]
        landed = landing[-1]["start_us"] - origin + before_wait(landing[-1]) if landing else None
        line = next((line for line, busy in enumerate(free) if busy + GAP_US < sent), len(free))
        free[line : line + 1] = [max(arrives, end - origin if landed is None else landed)]
        found.append(Message(sent, arrives, landed, line))
    return found


def draw_row(axes: Any, y: float, phases: list[dict[str, Any]], messages: list[Message]) -> None:
    """One schedule: a bar a phase, its name above, and messages below."""
    origin, end = phases[0]["start_us"], end_of(phases[-1]) - phases[0]["start_us"]
    for i, phase in enumerate(phases):
        left = start = phase["start_us"] - origin
        for part, color in COLORS.items():
            axes.barh(y, phase[part], HEIGHT, left, color=color, edgecolor="white", linewidth=0.4)
            left += phase[part]
        new = i == 0 or phases[i - 1]["module"] // 2 != phase["module"] // 2
        axes.plot([start, start], [y - HEIGHT / 2, y + HEIGHT * (1.25 if new else 0.6)], color="black", lw=0.8)
        name = SHORT.get(phase["name"], phase["name"])
        axes.text((start + left) / 2, y + HEIGHT * 0.56, name, ha="center", va="bottom", fontsize=7.5)
        if new:
            layer = f"layer {phase['module'] // 2}"
            axes.text(start + 0.1, y + HEIGHT * 1.02, layer, va="bottom", fontsize=8, fontweight="bold")
    for message in messages:
        draw_message(axes, y - HEIGHT / 2 - ARROWS * (1 + message.line), message, end)


def draw_message(axes: Any, y: float, message: Message, end: float) -> None:
    """An arrow while a message is in flight, then a dotted line until it is landed, or until the picture ends."""
    style = {"arrowstyle": "-|>", "color": MESSAGE, "lw": 1.3, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (message.arrives, y), (message.sent, y), arrowprops=style)
    axes.plot([message.sent], [y], marker="o", ms=3, color=MESSAGE)
    until = end if message.landed is None else message.landed
    if until > message.arrives:
        axes.plot([message.arrives, until], [y, y], ls=":", lw=1.1, color=MESSAGE)
        if message.landed is not None:
            axes.plot([until], [y], marker="|", ms=7, mew=1.5, color=MESSAGE)


def end_of(phase: dict[str, Any]) -> float:
    """When a phase of the middle of a token is over."""
    return phase["start_us"] + sum(phase[part] for part in COLORS)


def before_wait(phase: dict[str, Any]) -> float:
    """Microseconds of a phase before it waits for peers."""
    return sum(phase[part] for part in ("sync_us", "stream_us", "uneven_us"))


def finish(axes: Any, report: dict[str, Any], places: list[float], bottom: float) -> None:
    """Labels, legend, title."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    found, machine = report["schedules"], report["machine"]
    axes.set_yticks(
        places,
        [f"{text}\n{row['total_us']:,.0f} µs a token" for text, row in found.items()],
        fontsize=9,
    )
    axes.set_ylim(bottom, 1.8 * HEIGHT)
    axes.set_xlim(left=0)
    axes.set_xlabel("time since the first of these layers began, µs")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    title = f"{machine['count']} x {machine['name']}, {report['ranks']} ranks, {report['dtype']}"
    axes.set_title(
        f"Prediction, not a measurement: layers in the middle of a token on one rank ({title}, context "
        f"{report['context']})",
        fontsize=10,
    )
    handles: list[Any] = [Patch(color=color, label=NAMES[part]) for part, color in COLORS.items()]
    handles.append(Line2D([0], [0], color=MESSAGE, lw=1.3, marker=">", label="message in flight"))
    handles.append(Line2D([0], [0], color=MESSAGE, lw=1.1, ls=":", label="there, not needed yet; | when it is"))
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
