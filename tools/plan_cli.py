"""`laneformer plan`: what a training run costs on named hardware."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from laneformer.terminal import fail, friendly_errors, say, table_console, write_json

HELP = """\
What a training run costs on named hardware, before anything is spent.

Parameters, FLOPs, memory of a device by term, tokens/s, days and cost at a stated MFU, what is sent and how much of it
the schedule hides, data sets and their epochs. Nothing is run: sizes come from the meta device, the rest is arithmetic
whose assumptions are printed below it. Exit code 1 where the run does not fit into a device's memory.

Experiments: {experiments}.

Examples:

    laneformer plan 2b-pretrain --machine 192xh100

    laneformer plan 2b-code --machine 64xh200 --mfu 0.35 --gpu-hour 3.1 --json plan.json

    laneformer plan 2b-pretrain --machine 192xh100 --lanes-per-rank 8 recompute=true data.micro_batch=1
"""


def register(app: typer.Typer) -> None:
    """Adds `plan` to the command."""
    app.command("plan", help=HELP.format(experiments=", ".join(experiments())))(plan_command)


def experiments() -> list[str]:
    """The packaged experiments, found without importing what composes them."""
    names = (entry.name for entry in files("laneformer.conf").joinpath("experiment").iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def plan_command(
    experiment: Annotated[str, typer.Argument(help="Packaged experiment, such as 2b-pretrain.")],
    changes: Annotated[
        list[str] | None, typer.Argument(help="Changes as `train` takes them.", metavar="KEY=VALUE")
    ] = None,
    machine: Annotated[str, typer.Option(help="Devices, as in 192xh100 or 8xmi300x.")] = "192xh100",
    mfu: Annotated[float, typer.Option(help="Share of the peak that the model's FLOPs reach.")] = 0.4,
    gpu_hour: Annotated[float, typer.Option(help="Price of one device for an hour.")] = 2.5,
    lanes_per_rank: Annotated[
        int | None, typer.Option(help="Lanes on each device; the experiment's parallel.lanes decides if not given.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the plan here; - for stdout.")] = None,
) -> None:
    """Plans one experiment."""
    with friendly_errors():
        from laneformer.tools.plan import plan, read_run
        from laneformer.tools.plan_report import print_plan

        document = plan(read_run(experiment, machine, lanes_per_rank, changes or []), machine, mfu, gpu_hour)
        if json_file is None or str(json_file) != "-":
            print_plan(document, table_console())
        if json_file is not None:
            write_json(document, json_file)
    for warning in document["warnings"]:
        say(f"warning: {warning}", "yellow")
    if not document["memory"]["fits"]:
        fail("the run does not fit into the memory of a device")
        raise typer.Exit(1)
