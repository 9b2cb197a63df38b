"""The comparison as a picture: tokens per second against link latency, a line a schedule."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from laneformer.files import replace_files
from laneformer.infer.peers import PEERS
from laneformer.infer.request import RequestError

# Colour-blind safe, and the same for a schedule in every figure.
STYLES = {"tensor-parallel": ("#d55e00", "o"), "silent": ("#777777", "s"), "ladder": ("#cc79a7", "^")}
OTHERS = (("#0072b2", "D"), ("#009e73", "v"), ("#56b4e9", "P"), ("#e69f00", "X"))
FORMATS = (".png", ".svg", ".pdf")


def check_figure_path(path: str | os.PathLike) -> Path:
    """The path, if a figure can be written there; raises RequestError otherwise, before anything is measured."""
    path = Path(path)
    if path.suffix not in FORMATS:
        raise RequestError(f"a figure is written as {', '.join(FORMATS)}, got {path.name!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RequestError("a figure needs matplotlib: pip install 'laneformer[figure]'") from None
    return path


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the figure of a bench document; the number of ranks with the most rows is shown."""
    from matplotlib.figure import Figure

    rows = [row for row in result["results"] if row["runner"] not in PEERS]
    ranks = max((row["ranks"] for row in rows), key=lambda r: (sum(row["ranks"] == r for row in rows), r))
    rows = [row for row in rows if row["ranks"] == ranks]
    figure = Figure(figsize=(7.5, 4.6), layout="constrained", dpi=150)
    axes = figure.subplots()
    others = iter(OTHERS * len(rows))
    for schedule in dict.fromkeys(row["schedule"] for row in rows):
        line = sorted((row for row in rows if row["schedule"] == schedule), key=lambda row: row["link_latency_us"])
        color, marker = STYLES.get(schedule) or next(others)
        x = [row["link_latency_us"] for row in line]
        y = [row["tokens_per_s"] for row in line]
        low = [value - row["tokens_per_s_spread"]["low"] for value, row in zip(y, line, strict=True)]
        high = [row["tokens_per_s_spread"]["high"] - value for value, row in zip(y, line, strict=True)]
        axes.errorbar(x, y, yerr=(low, high), color=color, marker=marker, capsize=3, lw=1.8, label=schedule)
    for row, style in zip((r for r in result["results"] if r["runner"] in PEERS), (":", "--"), strict=False):
        axes.axhline(row["tokens_per_s"], color="black", lw=1, ls=style, label=f"{row['runner']} (one process)")
    finish(axes, result, ranks)
    # The file beside has another suffix, so the format is named.
    replace_files({path: lambda beside: figure.savefig(beside, format=path.suffix[1:])})


def finish(axes: Any, result: dict[str, Any], ranks: int) -> None:
    """Labels, limits and legend."""
    model, environment = result["model"], result["environment"]
    axes.set_xlabel("emulated link latency, µs")
    axes.set_ylabel("decode speed of one request, tokens/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.set_title(
        f"{ranks} rank{'s' if ranks > 1 else ''}, {model['num_lanes']} lanes, hidden {model['hidden_size']}, "
        f"{model['num_hidden_layers']} layers, {result['results'][0]['dtype']}, {environment['machine']}",
        fontsize=9,
    )
    axes.legend(fontsize=8, loc="lower left", title="median of rounds; bars: lowest and highest", title_fontsize=7)
