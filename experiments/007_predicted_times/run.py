"""Predicts the persistent kernel's time for a token of the 2B; writes results.json and timeline.png beside this file.

The documents are those of `infer plan --preset 2b --machine MACHINE --json FILE`, without the timelines. Nothing is
measured: `python experiments/007_predicted_times/run.py` gives the same numbers on any machine, in seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from laneformer import LaneConfig
from laneformer.files import write_text
from laneformer.infer.plan_figure import draw_timeline
from laneformer.infer.plan_report import plan_report

HERE = Path(__file__).parent
MACHINES = ("h200", "8xh200", "mi300x", "8xmi300x")
# Weights of a tile and positions of an attention block; the first are the kernel's own.
SHAPES = ((16384, 32), (16384, 128), (4096, 32), (2048, 32))


def main() -> None:
    """The command."""
    config = LaneConfig.preset("2b")
    found = {machine: plan_report(config, machine) for machine in MACHINES}
    draw_timeline(found["8xh200"], HERE / "timeline.png")
    for report in found.values():
        for row in report["schedules"].values():
            del row["timeline"]
    smaller = [
        {"machine": machine, "tile": tile, "block_positions": block} | totals(config, machine, tile, block)
        for machine in MACHINES
        for tile, block in SHAPES
    ]
    document = {"machines": found, "smaller_tiles": smaller}
    write_text(HERE / "results.json", json.dumps(rounded(document), indent=1) + "\n")
    for row in smaller:
        print(json.dumps(rounded(row)))


def totals(config: LaneConfig, machine: str, tile: int, block: int) -> dict[str, float]:
    """Microseconds of a token by schedule, with tiles and attention blocks of these sizes."""
    report = plan_report(config, machine, tile=tile, block_positions=block)
    return {text: row["total_us"] for text, row in report["schedules"].items()}


def rounded(value: Any) -> Any:
    """The same with numbers of six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main()
