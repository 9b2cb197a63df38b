"""Cleaned documents to shards: the stages of the job, run on this machine or a cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from datatrove.executor.base import PipelineExecutor

from laneformer.data.executors import Execution, Step, StepFailed, chain
from laneformer.data.shards import Manifest, ShardInfo, read_manifest
from laneformer.data.tokenize_plan import (
    UNFINISHED,
    Plan,
    TokenizeError,
    find_documents,
    noted_shards,
    read_survey,
    start,
)
from laneformer.data.tokenize_steps import ReadDocuments, SurveyDocuments, WriteManifest, WriteShards, clean
from laneformer.data.tokenizer import read_tokenizer, save_tokenizer, tokenizer_sha256
from laneformer.terminal import progress_bar

SHARD_TOKENS = 2**26
# So many shards at least, and so many processes at most, for large inputs.
MOST_TASKS = 64
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Tokenized:
    """The manifest, and what this call did of it: bytes of text and tokens, 0 where all was there, and seconds."""

    manifest: Manifest
    num_bytes: int
    num_tokens: int
    seconds: float


def begin(
    documents: Path,
    out: Path,
    tokenizer: Path,
    *,
    valid_fraction: float = 0.05,
    shard_tokens: int = SHARD_TOKENS,
    tasks: int | None = None,
) -> Plan | None:
    """Plans a job in `out`, or finds the same one there; None where it is finished.

    Tasks share the files of documents; as many as there are files, at most 64, unless `tasks` says otherwise. Raises
    ValueError for an input that cannot serve, and where `out` was made with other settings or documents.
    """
    loaded, names = read_tokenizer(tokenizer)
    # A cleaned corpus has its documents in a folder of that name, beside its report.
    inside = documents / "documents"
    documents = inside if inside.is_dir() else documents
    found = find_documents(documents)
    plan = Plan(
        folder=str(documents.absolute()),
        documents=found,
        tasks=min(len(found), tasks or MOST_TASKS),
        valid_fraction=valid_fraction,
        shard_tokens=shard_tokens,
        tokenizer=tokenizer_sha256(loaded),
        special_tokens=asdict(names),
    )
    if start(out, plan):
        clean(out)
        return None
    save_tokenizer(out, loaded, names)
    return plan


def steps(out: Path, tasks: int) -> list[Step]:
    """The pipelines of a job that was begun: survey, shards, manifest."""
    where = str(out.absolute())
    return [
        Step("survey", [ReadDocuments(where), SurveyDocuments(where)], tasks),
        Step("shards", [ReadDocuments(where), WriteShards(where)], tasks),
        Step("manifest", [WriteManifest(where)], 1),
    ]


def tokenize_documents(
    documents: Path,
    out: Path,
    tokenizer: Path,
    *,
    valid_fraction: float = 0.05,
    shard_tokens: int = SHARD_TOKENS,
    tasks: int | None = None,
    execution: Execution | None = None,
) -> Tokenized | None:
    """Tokenises a folder of JSON lines; a job that was stopped goes on, and ends up the same.

    On Slurm it submits the job and returns None. A worker holds the open shards in memory: two bytes a token, for each
    source and split at most `shard_tokens`, and twice that while it writes one.
    """
    began = time.monotonic()
    where = execution or Execution(workers=1)
    options = {"valid_fraction": valid_fraction, "shard_tokens": shard_tokens, "tasks": tasks}
    plan = begin(documents, out, tokenizer, **options)
    if plan is None:
        return Tokenized(read_manifest(out), 0, 0, time.monotonic() - began)
    before = noted_shards(out)
    executors = chain(steps(out, plan.tasks), out.absolute() / UNFINISHED / "logs", where)
    if where.kind == "slurm":
        executors[-1].run()
        return None
    with _progress(out, plan.tasks):
        for executor in executors:
            _run(executor)
    clean(out)
    return _tokenized(read_manifest(out), before, time.monotonic() - began)


def _run(executor: PipelineExecutor) -> None:
    """Runs one step; raises the TokenizeError for documents that cannot be read, not only that the step failed."""
    try:
        executor.run()
    except StepFailed as error:
        if isinstance(error.__cause__, TokenizeError):
            raise TokenizeError(str(error.__cause__)) from None
        raise


def _tokenized(manifest: Manifest, before: Sequence[ShardInfo], seconds: float) -> Tokenized:
    """The result of a call that found some shards finished."""
    num_bytes = sum(shard.num_bytes for shard in manifest.shards) - sum(shard.num_bytes for shard in before)
    num_tokens = sum(shard.num_tokens for shard in manifest.shards) - sum(shard.num_tokens for shard in before)
    return Tokenized(manifest, num_bytes, num_tokens, seconds)


@contextmanager
def _progress(out: Path, tasks: int) -> Iterator[None]:
    """A bar of the megabytes that the tasks have behind them, wherever they run."""
    stopped = threading.Event()
    surveyed, done = out / UNFINISHED / "survey", out / UNFINISHED / "progress"

    def watch() -> None:
        total = 0
        while not stopped.wait(POLL_SECONDS):
            if not total and len(list(surveyed.glob("[0-9]*"))) == tasks:
                total = max(1, sum(one.num_bytes for one in read_survey(out, tasks).values()) // 10**6)
                bar.update(line, description="tokenising (MB)", total=total)
            behind = (path.read_text() for path in done.glob("[0-9]*"))
            bar.update(line, completed=sum(int(text or 0) for text in behind) // 10**6)

    with progress_bar() as bar:
        line = bar.add_task("reading", total=None)
        thread = threading.Thread(target=watch, daemon=True)
        if not bar.disable:
            thread.start()
        try:
            yield
        finally:
            stopped.set()
            if thread.is_alive():
                thread.join()
