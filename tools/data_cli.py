"""`laneformer data`: from source files to tokenised shards."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from laneformer.terminal import friendly_errors, say
from laneformer.tools.tokens_cli import register as register_tokens

EXAMPLES = """From source files to tokenised shards, step by step; every step goes on where it was killed.

    laneformer data collect raw --stdlib

    laneformer data collect raw --folder my_project --license MIT

    HF_HUB_OFFLINE=0 laneformer data collect raw --hf ORG/NAME:en:train --limit 100000 --license MIT

    laneformer data clean raw corpus

    laneformer data card corpus
"""
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help=EXAMPLES)

Raw = Annotated[Path, typer.Argument(help="Folder of collected documents: RAW/SOURCE/*.jsonl.gz.")]
Workers = Annotated[int, typer.Option(help="Tasks at once.")]
Redo = Annotated[bool, typer.Option("--redo", help="Remove what is there and start again.")]
KindOfRow = Annotated[str, typer.Option(help="What rows are: code, prose, or auto (by the suffix of their path).")]


@data_app.command()
def collect(
    raw: Raw = Path("raw"),
    stdlib: Annotated[bool, typer.Option("--stdlib", help="The standard library of this Python (PSF).")] = False,
    installed: Annotated[bool, typer.Option("--installed", help="The installed distributions.")] = False,
    folder: Annotated[Path | None, typer.Option(help="The files of a folder.")] = None,
    jsonl: Annotated[Path | None, typer.Option(help="A .jsonl or .jsonl.gz file, or a folder of them.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="A .parquet file, or a folder of them.")] = None,
    hf: Annotated[str, typer.Option(help="A dataset of the Hugging Face Hub: NAME[:config][:split].")] = "",
    source: Annotated[str, typer.Option(help="Name of the source, for mixture weights.")] = "",
    licence: Annotated[str | None, typer.Option("--license", help="SPDX id of all documents' licence.")] = None,
    suffix: Annotated[list[str] | None, typer.Option(help="With --folder: suffixes to collect [.py].")] = None,
    text_column: Annotated[str, typer.Option(help="Column of rows that holds the text.")] = "text",
    kind: KindOfRow = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many documents.")] = None,
    workers: Workers = 2,
    redo: Redo = False,
) -> None:
    """Collect documents, with their licences, from one kind of place."""
    with friendly_errors():
        needs_data_packages()
        from laneformer.data.choose import choose_source
        from laneformer.data.collect import collect as run
        from laneformer.data.executors import Execution

        chosen = choose_source(
            {"stdlib": stdlib, "installed": installed, "folder": folder, "jsonl": jsonl, "parquet": parquet, "hf": hf},
            {"name": source, "licence": licence, "column": text_column, "kind": kind, "limit": limit},
            tuple(suffix or (".py",)),
        )
        say(run(raw, chosen, Execution(workers=workers), redo, command_line()).text(chosen.name))


@data_app.command()
def clean(
    raw: Raw,
    out: Annotated[Path, typer.Argument(help="Folder for documents/, report.json and README.md.")],
    allow: Annotated[list[str] | None, typer.Option(help="Licences to keep [MIT, BSD, Apache-2.0, ISC, PSF].")] = None,
    near_duplicates: Annotated[bool, typer.Option(help="Look for near duplicates.")] = True,
    problems: Annotated[list[Path] | None, typer.Option(help="Problem files to keep out [HumanEval, MBPP].")] = None,
    decontaminate: Annotated[bool, typer.Option(help="Remove documents that hold evaluation problems.")] = True,
    n_grams: Annotated[int, typer.Option(min=3, help="Words in a row that give a problem away.")] = 10,
    scrub: Annotated[bool, typer.Option(help="Replace secrets, e-mail and IP addresses.")] = True,
    limits: Annotated[list[str] | None, typer.Option("--limit", help="A quality limit as NAME=VALUE.")] = None,
    workers: Workers = 2,
    executor: Annotated[str, typer.Option(help="local, slurm or ray.")] = "local",
    partition: Annotated[str, typer.Option(help="Slurm partition.")] = "",
    time: Annotated[str, typer.Option(help="Slurm time limit of a task.")] = "04:00:00",
    sbatch: Annotated[list[str] | None, typer.Option(help="More arguments for sbatch as KEY=VALUE.")] = None,
    memory_gb: Annotated[int, typer.Option(min=1, help="Memory of a task on a cluster.")] = 4,
    redo: Redo = False,
) -> None:
    """Filter, deduplicate, decontaminate and scrub collected documents; write a report and a data card."""
    with friendly_errors():
        needs_data_packages()
        from laneformer.data.clean import clean as run
        from laneformer.data.clean import summary
        from laneformer.data.executors import Execution
        from laneformer.data.pipeline import CleanSettings, chosen_problems, parse_limits, parse_pairs

        settings = CleanSettings(
            *(tuple(allow) if allow else CleanSettings.allow, parse_limits(limits or []), near_duplicates),
            *(chosen_problems(problems, decontaminate), n_grams, scrub, scrub),
        )
        execution = Execution(executor, workers, partition, time, memory_gb, parse_pairs("--sbatch", sbatch or []))
        report = run(raw, out, settings, execution, redo, command_line())
        if report is not None:
            say(summary(report, out))


@data_app.command()
def card(out: Annotated[Path, typer.Argument(help="Folder that `clean` filled.")]) -> None:
    """Print the data card of a cleaned corpus, written again from what its steps recorded."""
    with friendly_errors():
        needs_data_packages()
        from laneformer.data.clean import CARD, finish

        finish(out)
        print((out / CARD).read_text(encoding="utf-8"), end="")


def command_line() -> str:
    """The command as it was typed."""
    return f"laneformer {shlex.join(sys.argv[1:])}"


def needs_data_packages() -> None:
    """Raises ValueError where the packages of the `data` extra are missing, and keeps documents out of their logs."""
    # The log of an error would show the values of variables, and so a document with its secrets.
    os.environ.setdefault("LOGURU_DIAGNOSE", "NO")
    if importlib.util.find_spec("datatrove") is None:
        raise ValueError("laneformer data needs the package datatrove: pip install 'laneformer[data]'")


register_tokens(data_app)
