"""What a tokenising job is: its input, its settings, what of it is finished, and whether a folder is of the same job.

Inside the folder of shards, while they are being made:

    tokenize.json              the plan; it stays, so that a finished folder can say what it was made from
    unfinished/paths.txt       the files of documents in order
    unfinished/survey/TASK     what each task's files hold, by source
    unfinished/shards/NAME     what the manifest will say of a shard that is finished
    unfinished/done/TASK       a task whose shards are all finished
    unfinished/progress/TASK   bytes that a task has behind it
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from laneformer.data.held_out import held_out_below
from laneformer.data.shards import MANIFEST, ShardInfo, file_sha256
from laneformer.differences import differences
from laneformer.files import write_text
from laneformer.terminal import progress_bar

PLAN, UNFINISHED, PATHS = "tokenize.json", "unfinished", "paths.txt"
SUFFIXES = (".jsonl.gz", ".jsonl")
# Raised whenever the same plan gives other shards.
RECIPE = 1


class TokenizeError(ValueError):
    """Documents, settings or a folder with which tokenising cannot go on."""


@dataclass(frozen=True)
class Plan:
    """One tokenising job; `documents` has the hash of each file by its path inside `folder`."""

    folder: str
    documents: dict[str, str]
    tasks: int
    valid_fraction: float
    shard_tokens: int
    tokenizer: str
    special_tokens: dict[str, str]
    recipe: int = RECIPE

    def __post_init__(self) -> None:
        if not 0 <= self.valid_fraction < 1:
            raise TokenizeError(f"the share held out must be at least 0 and below 1, got {self.valid_fraction}")
        if self.tasks < 1 or self.shard_tokens < 1:
            raise TokenizeError(f"tasks {self.tasks} and shard tokens {self.shard_tokens} must both be at least 1")

    def differences(self, other: Plan) -> list[str]:
        """What another plan has otherwise, a line each; the same documents elsewhere are no difference."""
        its, mine = (asdict(replace(plan, folder="", documents={})) for plan in (other, self))
        lines = differences(its, mine)
        added = sorted(set(self.documents) - set(other.documents))
        removed = sorted(set(other.documents) - set(self.documents))
        both = set(self.documents) & set(other.documents)
        changed = sorted(name for name in both if self.documents[name] != other.documents[name])
        for what, names in (("added", added), ("removed", removed), ("changed", changed)):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                lines.append(f"documents {what}: {', '.join(names[:3])}{more}")
        return lines


def find_documents(folder: Path) -> dict[str, str]:
    """The files of documents in a folder, in sorted order with their hashes; raises TokenizeError for none."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name.endswith(SUFFIXES))
    if not files:
        raise TokenizeError(f"{folder} holds no file of documents ({' or '.join(SUFFIXES)}); collect some first")
    found: dict[str, str] = {}
    with progress_bar() as bar:
        for path in bar.track(files, description="checking the documents"):
            found[path.relative_to(folder).as_posix()] = file_sha256(path)
    return found


def start(out: Path, plan: Plan) -> bool:
    """Begins a job in `out` or finds it there; returns whether it is finished already.

    Raises TokenizeError where `out` belongs to another job, saying what differs, or holds anything else.
    """
    if (out / PLAN).is_file():
        if different := plan.differences(read_plan(out)):
            raise TokenizeError(
                f"{out} was made otherwise: {'; '.join(different)}. Give another folder, or remove this one first"
            )
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TokenizeError(f"{out} is there and was not made by tokenising; give an empty folder or a new one")
    if (out / MANIFEST).is_file():
        return True
    out.mkdir(parents=True, exist_ok=True)
    # First of all, so that a job that is stopped at any moment is known for what it is.
    write_text(out / PLAN, json.dumps(asdict(plan), indent=1) + "\n")
    unfinished = out / UNFINISHED
    for part in ("survey", "shards", "done", "progress"):
        (unfinished / part).mkdir(parents=True, exist_ok=True)
    write_text(unfinished / PATHS, "".join(f"{name}\n" for name in plan.documents))
    return False


def read_plan(out: Path) -> Plan:
    """The plan of a folder."""
    try:
        return Plan(**json.loads((out / PLAN).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise TokenizeError(f"{out / PLAN} is not the plan of a tokenising job: {error}") from None


@dataclass(frozen=True)
class Survey:
    """What the documents of one source are: how many, their UTF-8 bytes, the smallest and the largest hash."""

    documents: int
    num_bytes: int
    smallest: int
    largest: int

    def with_one(self, num_bytes: int, number: int) -> Survey:
        """The survey with one document more."""
        return self.joined(Survey(1, num_bytes, number, number))

    def joined(self, other: Survey) -> Survey:
        """Both together."""
        return Survey(
            self.documents + other.documents,
            self.num_bytes + other.num_bytes,
            min(self.smallest, other.smallest),
            max(self.largest, other.largest),
        )


def write_survey(out: Path, task: int, found: Mapping[str, Survey]) -> None:
    """Records what one task's files hold."""
    document = {source: asdict(survey) for source, survey in sorted(found.items())}
    write_text(out / UNFINISHED / "survey" / f"{task:05d}", json.dumps(document))


def read_survey(out: Path, tasks: int) -> dict[str, Survey]:
    """What all files hold, by source; raises TokenizeError where a task has not surveyed its own yet."""
    found: dict[str, Survey] = {}
    for task in range(tasks):
        path = out / UNFINISHED / "survey" / f"{task:05d}"
        if not path.is_file():
            raise TokenizeError(f"task {task} has not surveyed its documents yet; run the survey of all tasks first")
        for source, survey in json.loads(path.read_text(encoding="utf-8")).items():
            one = Survey(**survey)
            found[source] = found[source].joined(one) if source in found else one
    return found


def thresholds(found: Mapping[str, Survey], fraction: float) -> dict[str, int]:
    """For each source the hash below which a document is held out."""
    return {source: held_out_below(fraction, one.smallest, one.largest) for source, one in found.items()}


def note_shard(out: Path, info: ShardInfo) -> None:
    """Records a finished shard; written after its files, so that what is recorded is there."""
    write_text(out / UNFINISHED / "shards" / info.name, json.dumps(asdict(info)))


def noted_shards(out: Path) -> list[ShardInfo]:
    """The finished shards in order of source, split and name."""
    texts = (
        path.read_text(encoding="utf-8")
        for path in (out / UNFINISHED / "shards").glob("*")
        if not path.name.startswith(".")
    )
    return sorted(
        (ShardInfo(**json.loads(text)) for text in texts), key=lambda shard: (shard.source, shard.split, shard.name)
    )
