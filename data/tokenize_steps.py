"""Tokenising as datatrove blocks: read documents, survey them, write them as shards, write the manifest.

Each block is given the folder of shards and finds the plan there, so that any executor can run it anywhere.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers.base import BaseDiskReader

from laneformer.data.held_out import content_hash
from laneformer.data.made import manifest_of
from laneformer.data.naming import shard_stem
from laneformer.data.shards import ShardWriter, write_manifest
from laneformer.data.specials import Specials
from laneformer.data.tokenize_plan import (
    PATHS,
    UNFINISHED,
    Survey,
    TokenizeError,
    note_shard,
    noted_shards,
    read_plan,
    read_survey,
    thresholds,
    write_survey,
)
from laneformer.data.tokenizer import document_encoder, encode_texts, read_tokenizer, vocab_size
from laneformer.files import write_text

NO_SOURCE = "documents"
BATCH_DOCUMENTS, BATCH_CHARACTERS = 512, 4_000_000


def source_of(document: Document) -> str:
    """The mixture component that a document belongs to."""
    return str(document.metadata.get("source") or NO_SOURCE)


class ReadDocuments(BaseDiskReader):
    """Reads a task's files of JSON lines. Datatrove's own reader passes over a line that it cannot read with a
    warning in a log; here it is an error, as what is missing from the shards would not be noticed."""

    name = "Documents"

    def __init__(self, out: str) -> None:
        super().__init__(read_plan(Path(out)).folder, paths_file=str(Path(out) / UNFINISHED / PATHS))

    def read_file(self, filepath: str) -> Iterator[Document]:
        """The documents of one file; raises TokenizeError with file and line."""
        number = 0
        try:
            with self.data_folder.open(filepath, "rb", compression="infer") as handle:
                for number, line in enumerate(handle, 1):
                    document = self.get_document_from_dict(_parsed(line), filepath, number - 1)
                    if document:
                        yield document
        except (EOFError, zlib.error) as error:
            raise TokenizeError(f"{filepath} is damaged after line {number}: {error}") from None
        except ValueError as error:
            raise TokenizeError(f"{filepath}, line {number}: {error}") from None


def _parsed(line: bytes) -> dict[str, Any]:
    """One JSON line with a text."""
    document = json.loads(line)
    if not isinstance(document, dict) or not isinstance(document.get("text"), str):
        raise ValueError('expected {"text": ..., "id": ..., "metadata": {"source": ...}}')
    try:
        document["text"].encode()
    except UnicodeEncodeError:
        raise ValueError("the text holds half a surrogate pair, which is no character") from None
    return document


class SurveyDocuments(PipelineStep):
    """Counts the documents of each source and finds their extreme hashes, which decide what is held out."""

    type, name = "🔢 - TOKENIZER", "Survey"

    def __init__(self, out: str) -> None:
        super().__init__()
        self.out = Path(out)

    def run(self, data: Iterable[Document] | None, rank: int = 0, world_size: int = 1) -> None:
        """Surveys what a task reads and records it."""
        found: dict[str, Survey] = {}
        for document in data or ():
            size, number, source = len(document.text.encode()), content_hash(document.text), source_of(document)
            found[source] = found[source].with_one(size, number) if source in found else Survey(1, size, number, number)
        write_survey(self.out, rank, found)


class WriteShards(PipelineStep):
    """Tokenises what a task reads and writes it as shards of limited size, one after another by source and split.

    A task that was stopped goes on behind the shards that it had finished, and writes what it would have written.
    """

    type, name = "🔢 - TOKENIZER", "Shards"

    def __init__(self, out: str) -> None:
        super().__init__()
        self.out = Path(out)

    def run(self, data: Iterable[Document] | None, rank: int = 0, world_size: int = 1) -> None:
        """Writes the task's shards and records that it is done."""
        plan = read_plan(self.out)
        if world_size != plan.tasks:
            raise TokenizeError(f"the executor runs {world_size} tasks, the plan has {plan.tasks}; give it as many")
        shards = TaskShards(self.out, rank)
        behind = 0
        for batch in batches(data):
            shards.add(batch)
            behind += sum(len(document.text.encode()) for document in batch)
            (self.out / UNFINISHED / "progress" / f"{rank:05d}").write_text(str(behind))
        shards.close()
        write_text(self.out / UNFINISHED / "done" / f"{rank:05d}", "")


def batches(data: Iterable[Document] | None) -> Iterator[list[Document]]:
    """Documents in groups that are worth the threads of one call, and fit into memory."""
    batch: list[Document] = []
    characters = 0
    for document in data or ():
        batch.append(document)
        characters += len(document.text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class TaskShards:
    """The shards of one task, of each source and split one that is open."""

    def __init__(self, out: Path, task: int) -> None:
        self.out, self.task, self.plan = out, task, read_plan(out)
        tokenizer, names = read_tokenizer(out)
        self.encoder, self.vocab_size = document_encoder(tokenizer), vocab_size(tokenizer)
        self.end_id = Specials.of(tokenizer, names).end
        self.below = thresholds(read_survey(out, self.plan.tasks), self.plan.valid_fraction)
        self.open: dict[tuple[str, str], ShardWriter] = {}
        # What earlier attempts finished: shards, and documents in them, by source and split.
        self.index: dict[tuple[str, str], int] = {}
        self.behind: dict[tuple[str, str], int] = {}
        for shard in noted_shards(out):
            key = shard.source, shard.split
            if shard.name == shard_stem(*key, task, self.index.get(key, 0)):
                self.index[key] = self.index.get(key, 0) + 1
                self.behind[key] = self.behind.get(key, 0) + shard.num_documents

    def add(self, batch: list[Document]) -> None:
        """Tokenises those documents of a batch that are in no finished shard."""
        ahead: list[tuple[tuple[str, str], str]] = []
        for document in batch:
            source = source_of(document)
            key = source, "valid" if content_hash(document.text) < self.below[source] else "train"
            if self.behind.get(key, 0):
                self.behind[key] -= 1
            else:
                ahead.append((key, document.text))
        for (key, text), ids in zip(ahead, encode_texts(self.encoder, [text for _, text in ahead]), strict=True):
            self._writer(key, len(ids) + 1).add(ids, len(text.encode()))

    def _writer(self, key: tuple[str, str], more: int) -> ShardWriter:
        """The open shard of a source and split, or the next one where `more` tokens would make it too large."""
        writer = self.open.get(key)
        if writer and writer.num_tokens > 1 and writer.num_tokens + more > self.plan.shard_tokens:
            self._close(key)
            writer = None
        if writer is None:
            name = shard_stem(*key, self.task, self.index.get(key, 0))
            writer = self.open[key] = ShardWriter(self.out, name, *key, self.vocab_size, self.end_id)
        return writer

    def _close(self, key: tuple[str, str]) -> None:
        note_shard(self.out, self.open.pop(key).close())
        self.index[key] = self.index.get(key, 0) + 1

    def close(self) -> None:
        """Writes the shards that are still open."""
        for key in sorted(self.open):
            self._close(key)


class WriteManifest(PipelineStep):
    """Writes the manifest; one task, after all others."""

    type, name = "🔢 - TOKENIZER", "Manifest"

    def __init__(self, out: str) -> None:
        super().__init__()
        self.out = Path(out)

    def run(self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1) -> None:
        """Raises TokenizeError where a task is not done or a document is missing."""
        plan, unfinished = read_plan(self.out), self.out / UNFINISHED
        if left := [task for task in range(plan.tasks) if not (unfinished / "done" / f"{task:05d}").is_file()]:
            raise TokenizeError(f"{len(left)} of {plan.tasks} tasks are not done (the first: {left[0]}); run them")
        shards = noted_shards(self.out)
        expected = sum(one.documents for one in read_survey(self.out, plan.tasks).values())
        if (found := sum(shard.num_documents for shard in shards)) != expected:
            raise TokenizeError(f"the shards hold {found} documents, the survey counted {expected}; the input changed")
        tokenizer, names = read_tokenizer(self.out)
        write_manifest(self.out, manifest_of(tokenizer, names, shards))


def clean(out: Path) -> None:
    """Removes what only an unfinished job needs, and what a killed writer left."""
    shutil.rmtree(out / UNFINISHED, ignore_errors=True)
    for partial in out.glob(".*.partial"):
        partial.unlink(missing_ok=True)
