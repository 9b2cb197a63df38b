"""What every command shows a person: messages, a progress bar, tables, and documents for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .files import write_text

TABLE_WIDTH = 150
messages = Console(stderr=True)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on standard error, silent where that is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=messages, disable=not messages.is_terminal, transient=True) as bar:
        yield bar


def table_console() -> Console:
    """Where tables go: as wide as the terminal, or wide enough for any table where there is none."""
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)


def say(text: str, style: str = "") -> None:
    """One line on standard error, as it is."""
    messages.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def fail(error: BaseException | str) -> None:
    """One line on standard error that says what went wrong."""
    say(f"error: {error}", "red")


def write_json(document: dict[str, Any], path: Path) -> None:
    """One JSON document in a file, or as the last line of standard output for `-`."""
    if str(path) == "-":
        print(json.dumps(document), flush=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(document, indent=1) + "\n")
