"""How does a source become documents on disk? RAW/SOURCE/00000.jsonl.gz and on, each whole or not there."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.pipeline.base import PipelineStep

from laneformer.data.executors import Execution, Step, executor, finished
from laneformer.data.quiet import watched
from laneformer.data.readers import Census, SourceFileReader, disk_reader, hub_reader, row_adapter
from laneformer.data.records import SETTINGS, claim, locked
from laneformer.data.report import counts_of, merged_stats
from laneformer.data.sources import CollectError, SourceFile, check_licence, file_list
from laneformer.data.writer import AtomicJsonlWriter, sweep
from laneformer.files import write_text

WORK, LISTING, COMMAND = ".collect", "files.list", "command"
SHARD_BYTES = 16_000_000
# Enough for a few workers even where there is little to read.
MIN_SHARDS = 4


@dataclass(frozen=True)
class Source:
    """What to collect: the component's name, its settings as they are recorded, and the block that reads it."""

    name: str
    settings: dict[str, Any]
    reader: Callable[[Path], PipelineStep]
    shards: int
    listing: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise CollectError(f"source name {self.name!r}: expected letters, digits, '.', '_' and '-'")


@dataclass(frozen=True)
class Collected:
    """What a collection gave: documents, their bytes, seconds of this call, and what was skipped by reason."""

    documents: int
    bytes: int
    seconds: float
    skipped: dict[str, int]

    def text(self, name: str) -> str:
        """One line for a person."""
        speed = max(self.seconds, 1e-9)
        line = (
            f"{name}: {self.documents:,} documents, {self.bytes / 1e6:.1f} MB, {self.seconds:.1f} s "
            f"({self.documents / speed:,.0f} documents/s, {self.bytes / 1e6 / speed:.1f} MB/s)"
        )
        left = ", ".join(f"{reason} {count:,}" for reason, count in self.skipped.items())
        return f"{line}; skipped: {left}" if left else line


def files_source(name: str, kind: str, files: list[SourceFile], limit: int | None = None) -> Source:
    """A source of plain files: the standard library, installed distributions, a folder."""
    files = files[:limit] if limit else files
    if not files:
        raise CollectError(f"{kind}: no files found to collect")
    listing = file_list(files)
    shards = min(len(files), max(MIN_SHARDS, math.ceil(sum(file.size for file in files) / SHARD_BYTES)))
    settings = {"kind": kind, "limit": limit, "files": len(files), "sha256": _sha256(listing), "shards": shards}
    return Source(name, settings, lambda work: SourceFileReader(str(work / LISTING), name), shards, listing)


def rows_source(name: str, place: Path, column: str, licence: str | None, kind: str, limit: int | None) -> Source:
    """A source of rows in .jsonl, .jsonl.gz or .parquet files: one file, or all of a folder."""
    found = sorted(p for p in place.rglob("*") if _rows(p)) if place.is_dir() else [place] if _rows(place) else []
    if not found:
        raise CollectError(f"{place} is no .jsonl, .jsonl.gz or .parquet file, and no folder that holds any")
    if len({path.suffix == ".parquet" for path in found}) > 1:
        raise CollectError(f"{place} holds both parquet and JSON lines files; collect each by itself")
    root = place if place.is_dir() else place.parent
    states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in found]
    settings = {"kind": "rows", "place": str(place.absolute()), "column": column, "license": check_licence(licence)}
    # A limit counts for each task, so one task has all of it.
    shards = 1 if limit else len(found)
    settings |= {"documents": kind, "limit": limit, "sha256": _sha256(json.dumps(states)), "shards": shards}
    adapter = row_adapter(name, check_licence(licence), column, place.name, kind)
    listing = "".join(f"{path.relative_to(root)}\n" for path in found)
    return Source(
        name, settings, lambda work: disk_reader(root, work / LISTING, adapter, column, limit or -1), shards, listing
    )


def _rows(path: Path) -> bool:
    return path.is_file() and path.name.endswith((".jsonl", ".jsonl.gz", ".parquet"))


def hub_source(name: str, dataset: str, column: str, licence: str | None, kind: str, limit: int | None) -> Source:
    """A source from the Hugging Face Hub, `NAME[:config][:split]`, streamed; raises CollectError where it cannot be."""
    parts = dataset.split(":")
    repository, config = parts[0], parts[1] if len(parts) == 3 else None
    split = parts[-1] if len(parts) > 1 else "train"
    shards = hub_shards(repository, config, split)
    settings = {"kind": "hub", "dataset": repository, "config": config, "split": split, "column": column}
    shards = 1 if limit else shards
    settings |= {"license": check_licence(licence), "documents": kind, "limit": limit, "shards": shards}
    adapter = row_adapter(name, check_licence(licence), column, repository, kind)
    reader = hub_reader(repository, config, split, adapter, limit or -1)
    return Source(name, settings, lambda work: reader, shards)


def hub_shards(repository: str, config: str | None, split: str) -> int:
    """How many files a streamed dataset has; raises CollectError, in one line, where it cannot be reached."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true")
    if offline and not Path(repository).exists():
        raise CollectError(
            f"{repository} is on the Hugging Face Hub and HF_HUB_OFFLINE is set (the default here); "
            "put HF_HUB_OFFLINE=0 before the command to allow the download"
        )
    from datasets import load_dataset

    try:
        dataset = load_dataset(repository, config, split=split, streaming=True)
    except Exception as error:
        # Whatever the hub, the network or a loader raises means the same to a user.
        text = " ".join(str(error).split())[:200]
        raise CollectError(f"dataset {repository} ({config or 'default'}, {split}) cannot be opened: {text}") from None
    return max(1, getattr(dataset, "n_shards", 1))


def collect(raw: Path, source: Source, execution: Execution, redo: bool = False, command: str = "") -> Collected:
    """Collects a source into RAW/SOURCE; finished tasks are skipped, so a killed collection goes on where it was.

    Raises SettingsError for a folder begun with other settings, StepFailed where documents cannot be read.
    """
    folder = raw / source.name
    work = folder / WORK
    with locked(folder):
        if redo:
            for path in folder.glob("*.jsonl.gz"):
                path.unlink()
        claim(work, source.settings, (work,), redo)
        sweep(folder)
        write_text(work / LISTING, source.listing)
        write_text(work / COMMAND, command)
        blocks = [source.reader(work.absolute()), Census("collected"), AtomicJsonlWriter(str(folder.absolute()))]
        step, started = Step("collect", blocks, source.shards), time.monotonic()
        try:
            with watched(f"collect {source.name}", step.tasks, lambda: finished(step, work)):
                executor(step, work, execution).run()
        finally:
            sweep(folder)
        return _collected(work, time.monotonic() - started)


def _collected(work: Path, seconds: float) -> Collected:
    stats = merged_stats(work / "collect")
    counted = counts_of(stats, "collected")
    skipped = {
        key.removeprefix("skipped "): count
        for block in stats
        for key, count in counts_of([block]).items()
        if key.startswith("skipped ")
    }
    by_source = {key: count for key, count in counted.items() if " source " in key}
    documents = sum(count for key, count in by_source.items() if key.startswith("documents"))
    size = sum(count for key, count in by_source.items() if key.startswith("bytes"))
    return Collected(documents, size, seconds, skipped)


def incomplete(raw: Path) -> list[str]:
    """The sources in a folder whose collection has not finished."""
    found = []
    for path in sorted(raw.glob(f"*/{WORK}/{SETTINGS}")):
        shards = json.loads(path.read_text(encoding="utf-8"))["shards"]
        if finished(Step("collect", [], shards), path.parent) < shards:
            found.append(path.parent.parent.name)
    return found


def collect_commands(raw: Path) -> list[str]:
    """The commands that collected the sources of a folder."""
    return [path.read_text(encoding="utf-8") for path in sorted(raw.glob(f"*/{WORK}/{COMMAND}"))]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
