"""How does each kind of source become documents? One block of ours for plain files, datatrove's for the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers import HuggingFaceDatasetReader, JsonlReader, ParquetReader
from datatrove.pipeline.readers.base import BaseDiskReader, BaseReader

from laneformer.data.licences import UNKNOWN, spdx_id
from laneformer.data.sources import MAX_FILE_BYTES

Adapter = Callable[[Any, dict, str, int | str], dict]
# Columns that say where a row came from, in the order in which they are looked for.
PATH_COLUMNS = ("path", "max_stars_repo_path", "file_path", "filename", "url")
LICENCE_COLUMNS = ("license", "licence", "licenses", "max_stars_repo_licenses", "license_type")


class SourceFileReader(BaseReader):
    """Reads whole files, listed one JSON object a line; task r of n takes the lines r, r + n, ..."""

    name = "files"

    def __init__(self, listing: str, source: str) -> None:
        super().__init__()
        self.listing, self.source = listing, source

    def run(self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """A document for each file that is text."""
        lines = Path(self.listing).read_text(encoding="utf-8").splitlines()
        for entry in map(json.loads, lines[rank::world_size]):
            with self.track_time():
                text = self.read(entry["file"], entry["size"])
            if text:
                keys = {key: entry[key] for key in ("path", "license", "origin")}
                row = {"text": text, "id": f"{self.source}/{entry['origin']}/{entry['path']}"}
                document = self.get_document_from_dict({**row, "source": self.source, **keys}, self.listing, 0)
                if document:
                    self.update_doc_stats(document)
                    yield document

    def read(self, file: str, size: int) -> str:
        """The text of a file; nothing, and a count of why, where it is none."""
        if size > MAX_FILE_BYTES:
            self.stat_update("skipped too large")
            return ""
        try:
            text = Path(file).read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            self.stat_update("skipped not UTF-8")
            return ""
        if "\0" in text or not text.strip():
            self.stat_update("skipped empty" if "\0" not in text else "skipped not text")
            return ""
        return text.replace("\r\n", "\n").replace("\r", "\n")


def row_adapter(source: str, licence: str | None, text_column: str, origin: str, kind: str) -> Adapter:
    """Makes rows documents with our metadata; a row's own path and licence are kept unless a licence is given."""

    def adapt(_: Any, row: dict, path: str, number: int | str) -> dict:
        inner = row.get("metadata")
        columns = {**row, **inner} if isinstance(inner, dict) else row
        where = next((str(columns[key]) for key in PATH_COLUMNS if columns.get(key)), "")
        metadata = {"source": source, "path": where, "origin": origin}
        metadata["license"] = licence or _row_licence(columns)
        if kind != "auto":
            metadata["kind"] = kind
        text = row.get(text_column)
        text = text.replace("\r\n", "\n") if isinstance(text, str) else ""
        return {"text": text, "id": f"{source}/{PurePosixPath(path).name}/{number}", "metadata": metadata}

    return adapt


def _row_licence(columns: dict) -> str:
    value = next((columns[key] for key in LICENCE_COLUMNS if columns.get(key)), "")
    values = [spdx_id(str(item)) for item in (value if isinstance(value, list | tuple) else [value])]
    # A list says which licences were found in a repository: all of them apply.
    return " AND ".join(sorted(set(values))) if values else UNKNOWN


def disk_reader(root: Path, listing: Path, adapter: Adapter, text_column: str, limit: int) -> BaseDiskReader:
    """datatrove's reader for .jsonl, .jsonl.gz or .parquet files; `listing` has their paths below root, one a line."""
    parquet = listing.read_text(encoding="utf-8").split("\n")[0].endswith(".parquet")
    kind = ParquetReader if parquet else JsonlReader
    return kind(str(root.absolute()), str(listing.absolute()), limit=limit, adapter=adapter, text_key=text_column)


def hub_reader(name: str, config: str | None, split: str, adapter: Adapter, limit: int) -> HuggingFaceDatasetReader:
    """datatrove's reader for a dataset of the Hugging Face Hub, streamed: nothing is stored but what is kept."""
    options = {"split": split, **({"name": config} if config else {})}
    return HuggingFaceDatasetReader(name, options, streaming=True, limit=limit, adapter=adapter)


def raw_reader(folder: str, listing: str) -> JsonlReader:
    """Reads what was collected; documents made elsewhere get the name of their folder as their source."""

    def adapt(_: Any, row: dict, path: str, number: int | str) -> dict:
        metadata = dict(row.get("metadata") or {})
        metadata.setdefault("source", PurePosixPath(path).parts[0] if "/" in path else "data")
        metadata.setdefault("path", "")
        metadata["license"] = spdx_id(str(metadata.get("license") or ""))
        return {"text": row.get("text") or "", "id": row.get("id") or f"{path}/{number}", "metadata": metadata}

    return JsonlReader(folder, listing, adapter=adapt, add_file_path=False)


class Census(PipelineStep):
    """Counts the documents and bytes that pass, by source and by licence."""

    type = "COUNT"

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__()

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Passes everything on."""
        for document in data:
            size = len(document.text.encode())
            for key in ("source", "license"):
                label = f"{key} {document.metadata.get(key, UNKNOWN)}"
                self.stat_update(f"documents {label}")
                self.stat_update(f"bytes {label}", value=size)
            yield document
