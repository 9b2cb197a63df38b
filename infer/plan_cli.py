"""The command `infer plan`: its options, and how they become a report and a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from laneformer.infer.cli_support import check_dtype, friendly_errors, table_console, write_json


def plan(
    preset: Annotated[str | None, typer.Option(help="A named size: 2b, small, demo.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Or a checkpoint folder.")] = None,
    machine: Annotated[str, typer.Option(help="Such as 8xh200, mi300x, a100, h100.")] = "8xh200",
    ranks: Annotated[int | None, typer.Option(help="Ranks; one a device by default.", min=1)] = None,
    schedules: Annotated[str, typer.Option(help="Sync schedules.")] = "tensor-parallel,delayed:4,silent",
    programs: Annotated[
        int | None, typer.Option(help="Programs of a rank; the device's multiprocessors by default.", min=1)
    ] = None,
    context: Annotated[int | None, typer.Option(help="Positions attended to; 1024 by default.", min=1)] = None,
    dtype: Annotated[str, typer.Option(help="Type of weights and cache.")] = "float16",
    tile: Annotated[int | None, typer.Option(help="Weights of a tile, at most.", min=1)] = None,
    block_positions: Annotated[int | None, typer.Option(help="Positions of an attention block.", min=1)] = None,
    sync_us: Annotated[float, typer.Option(help="What a wait for a counter costs, microseconds.", min=0.0)] = 1.0,
    figure: Annotated[Path | None, typer.Option(help="Draw who streams and who waits: .png, .svg or .pdf.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers here; - for the last line.")
    ] = None,
) -> None:
    """What the persistent kernel does for a token, phase by phase, and how long that may take: a prediction.

    Example: `infer plan --preset 2b --machine 8xh200 --figure timeline.png`
    """
    from laneformer.config import LaneConfig
    from laneformer.cost import Assumptions
    from laneformer.infer.bench import parse_list
    from laneformer.infer.figure import check_figure_path
    from laneformer.infer.plan_report import plan_report
    from laneformer.infer.plan_tables import print_plan

    with friendly_errors():
        if (preset is None) == (folder is None):
            raise ValueError("give one of --preset and --folder")
        check_dtype(dtype)
        figure_path = None if figure is None else check_figure_path(figure)
        config = LaneConfig.preset(preset) if preset else LaneConfig.from_pretrained(folder or "")
        report = plan_report(
            config, machine, ranks, parse_list(schedules, str, "--schedules"), programs, context, dtype,
            Assumptions(sync_us=sync_us), tile, block_positions,
        )  # fmt: skip
        print_plan(report, table_console())
        if figure_path is not None:
            from laneformer.infer.plan_figure import draw_timeline

            draw_timeline(report, figure_path)
        if json_file is not None:
            write_json(report, json_file)
