"""How are documents written so that a file is there whole or not at all, and the same bytes every time?"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable, Iterator
from typing import Any

from datatrove.data import Document
from datatrove.io import DataFolder, OutputFileManager
from datatrove.pipeline.writers.jsonl import JsonlWriter


class WholeFiles(OutputFileManager):
    """Files that are written beside their names and renamed when they are complete."""

    def __init__(self, folder: DataFolder) -> None:
        super().__init__(folder, mode="wb", compression=None)
        self._raw: dict[str, Any] = {}

    def _beside(self, name: str) -> str:
        head, _, tail = name.rpartition("/")
        return f"{head}/.{tail}.{os.getpid()}.partial".lstrip("/")

    def get_file(self, filename: str) -> Any:
        """The open file of this name; the gzip header holds no time, so equal documents are equal bytes."""
        if filename not in self._output_files:
            self._raw[filename] = self.fs.open(self._beside(filename), mode="wb")
            self._output_files[filename] = gzip.GzipFile("", "wb", 6, self._raw[filename], mtime=0)
        return self._output_files[filename]

    def close(self) -> None:
        """Completes every open file: bytes to disk first, then the name."""
        for name, file in self._output_files.items():
            file.close()
            raw = self._raw.pop(name)
            if self.fs.is_local():
                raw.flush()
                os.fsync(raw.fileno())
                raw.close()
                os.replace(self.fs.resolve_paths(self._beside(name)), self.fs.resolve_paths(name))
            else:
                raw.close()
                self.fs.mv(self._beside(name), name)
        self._output_files.clear()

    def discard(self) -> None:
        """Drops every open file, for a task that failed."""
        for name in self._output_files:
            self._raw.pop(name).close()
            self.fs.rm(self._beside(name))
        self._output_files.clear()


class AtomicJsonlWriter(JsonlWriter):
    """datatrove's JSON lines writer, except that a task's file appears when the task has succeeded.

    datatrove writes in place, so a killed task leaves a part of a file under the final name. A task without
    documents leaves an empty file: the next step's task N must read what this step's task N wrote.
    """

    name = "documents"

    def __init__(self, folder: str) -> None:
        super().__init__(folder, "${rank}.jsonl.gz", compression=None)
        self.output_mg: WholeFiles = WholeFiles(self.output_folder)

    def _get_output_filename(self, document: Document, rank: int | str = 0, **kwargs: Any) -> str:
        # The template would let a document's own metadata name the file.
        return task_file(rank)

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if exc_type is None:
            self.output_mg.close()
        else:
            self.output_mg.discard()

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Writes what passes."""
        with self:
            self.output_mg.get_file(task_file(rank))
            for document in data:
                with self.track_time():
                    self.write(document, rank)
                yield document


def task_file(rank: int | str) -> str:
    """The name of the file of one task."""
    return f"{str(rank).zfill(5)}.jsonl.gz"


def sweep(folder: str | os.PathLike) -> None:
    """Removes what killed tasks left beside the names of a local folder; nobody may be writing there."""
    for root, _, names in os.walk(folder):
        for name in names:
            if name.startswith(".") and name.endswith(".partial"):
                os.unlink(os.path.join(root, name))
