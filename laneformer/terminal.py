"""What every command shows a person: messages, a progress bar, tables, and documents for machines."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .files import write_text

TABLE_WIDTH = 150
messages = Console(stderr=True)


@contextmanager
def progress_bar(console: Console = messages) -> Iterator[Progress]:
    """A bar on a console (standard error), silent where that is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        yield bar


def table_console() -> Console:
    """Where tables go: as wide as the terminal, or wide enough for any table where there is none."""
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)


def say(text: str, style: str = "", console: Console = messages) -> None:
    """One line on a console (standard error), as it is."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def fail(error: BaseException | str, console: Console = messages) -> None:
    """One line that says what went wrong."""
    say(f"error: {error}", "red", console)


@contextmanager
def friendly_errors(*failures: type[Exception]) -> Iterator[None]:
    """A user's mistake is one line and exit code 2; a failed run (OSError, `failures`) is one line and exit code 1."""
    try:
        yield
    except ValueError as error:
        fail(error)
        raise typer.Exit(2) from None
    except (OSError, *failures) as error:
        fail(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        say("stopped")
        raise typer.Exit(130) from None


def run_command(app: typer.Typer) -> None:
    """Runs a console script: offline unless the user says otherwise, and a plain kill unwinds as Ctrl-C does."""
    # What was started is stopped, and nothing half-written is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    app()


def write_json(document: dict[str, Any], path: Path) -> None:
    """One JSON document in a file, or as the last line of standard output for `-`."""
    if str(path) == "-":
        print(json.dumps(document), flush=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(document, indent=1) + "\n")
