"""What the commands of `infer` share: errors as people want them, a progress bar, JSON out."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

DTYPES = ("float32", "float16", "bfloat16")
TABLE_WIDTH = 150
messages = Console(stderr=True)


def check_dtype(dtype: str | None) -> None:
    """Raises ValueError for a type that decoding does not know."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"no dtype {dtype!r}; there are {', '.join(DTYPES)}")


@contextmanager
def checkpoint_of(folder: Path | None, preset: str | None, lanes: int | None = None) -> Iterator[Path]:
    """The folder given, or a temporary one with random weights of a preset."""
    if (folder is None) == (preset is None):
        raise ValueError("give a checkpoint folder or --preset, one of them")
    if folder is not None:
        if lanes is not None:
            raise ValueError("--lanes goes with --preset; a checkpoint has its own number of lanes")
        yield folder
        return
    from laneformer.config import LaneConfig
    from laneformer.random_weights import write_random_checkpoint

    with tempfile.TemporaryDirectory(prefix="laneformer-") as scratch:
        config = LaneConfig.preset(preset or "")
        write_random_checkpoint(config if lanes is None else config.replace(num_lanes=lanes), scratch)
        yield Path(scratch)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on standard error, silent where that is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=messages, disable=not messages.is_terminal, transient=True) as bar:
        yield bar


def table_console() -> Console:
    """Where tables go: as wide as the terminal, or wide enough for any table where there is none."""
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)


def write_json(document: dict[str, Any], path: Path) -> None:
    """One JSON document in a file, or as the last line of standard output for `-`."""
    from laneformer.files import write_text

    if str(path) == "-":
        print(json.dumps(document), flush=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(document, indent=1) + "\n")


@contextmanager
def friendly_errors() -> Iterator[None]:
    """A user's mistake is one line and exit code 2; a failed run is one line and exit code 1."""
    from laneformer.infer.bench import GateError
    from laneformer.infer.peers import PeerError
    from laneformer.infer.ranks import RankError

    try:
        yield
    except ValueError as error:
        messages.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except (RankError, GateError, PeerError, OSError) as error:
        messages.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        messages.print("stopped")
        raise typer.Exit(130) from None
