"""The `laneformer` command: everything that is neither a training run nor decoding."""

from __future__ import annotations

import typer

from laneformer.terminal import run_command
from laneformer.tools.data_cli import data_app
from laneformer.tools.export_cli import register as register_export
from laneformer.tools.plan_cli import register as register_plan

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Prepare data, plan training runs, export checkpoints.",
)
app.add_typer(data_app, name="data")
register_plan(app)
register_export(app)


def main() -> None:
    """The console script."""
    run_command(app)


if __name__ == "__main__":
    main()
