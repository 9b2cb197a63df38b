"""Which steps clean a corpus, and what does each leave for the next?

    index    the n-grams of the evaluation problems
    select   licence and quality filters; signatures of what stays
    exact    finds equal signatures
    unique   removes exact copies; MinHash signatures of what stays
    buckets  pairs of near duplicates, one task a bucket
    cluster  clusters of pairs
    finish   removes near duplicates and problems, scrubs secrets; writes the documents

Task N of select, unique and finish reads what task N of the one before wrote, which is what makes positions in a file
mean the same in each of them.
"""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers import JsonlReader

from laneformer.data import dedup
from laneformer.data.decontaminate import (
    ProblemError,
    ProblemFilter,
    ProblemIndexer,
    bundled_problems,
    decontamination_config,
)
from laneformer.data.executors import Step
from laneformer.data.licences import DEFAULT_ALLOWED
from laneformer.data.quality import CodeFilter, LicenceFilter, ProseQuality, ProseRepetition, QualityLimits, SizeFilter
from laneformer.data.readers import Census, raw_reader
from laneformer.data.records import SettingsError
from laneformer.data.scrub import PersonalData, SecretScrubber
from laneformer.data.writer import AtomicJsonlWriter

# Tasks that look for equal signatures: one for so many tasks that write them.
TASKS_PER_FINDER = 16


@dataclass(frozen=True)
class CleanSettings:
    """What cleaning does; recorded in the output, which no other settings may continue."""

    allow: tuple[str, ...] = DEFAULT_ALLOWED
    limits: QualityLimits = field(default_factory=QualityLimits)
    near_duplicates: bool = True
    problems: tuple[str, ...] = ()
    n_grams: int = 10
    secrets: bool = True
    personal_data: bool = True

    def record(self) -> dict[str, Any]:
        """The settings as a document."""
        return asdict(self)


class Layout:
    """The folders of a cleaning: `documents` is the result, all else is work in progress and its records."""

    def __init__(self, out: Path) -> None:
        self.out = out.absolute()
        self.documents = self.out / "documents"
        self.work = self.out / ".clean"
        self.logs = self.work / "logs"
        self.data = self.work / "data"
        self.inputs = self.work / "inputs.txt"
        self.removed = self.work / "removed"

    def at(self, name: str) -> str:
        """A folder of intermediate files."""
        return str(self.data / name)


def steps(raw: Path, layout: Layout, settings: CleanSettings, tasks: int) -> list[Step]:
    """The steps in their order; `tasks` is in how many parts the documents are."""
    found = [_select(raw, layout, settings, tasks)]
    finders = -(-tasks // TASKS_PER_FINDER)
    found.append(Step("exact", [dedup.exact_finder(layout.at("exact-signatures"), layout.at("exact"))], finders))
    found.append(_unique(layout, settings, tasks))
    if settings.near_duplicates:
        buckets = dedup.near_buckets(layout.at("near-signatures"), layout.at("near-pairs"))
        found.append(Step("buckets", [buckets], dedup.MINHASH.num_buckets))
        found.append(Step("cluster", [dedup.near_clusters(layout.at("near-pairs"), layout.at("near"))], 1))
    if settings.problems:
        config = decontamination_config(settings.n_grams)
        found.insert(0, Step("index", [ProblemIndexer(layout.at("problems"), settings.problems, config)], 1))
    return [*found, _finish(layout, settings, tasks)]


def _select(raw: Path, layout: Layout, settings: CleanSettings, tasks: int) -> Step:
    limits = settings.limits
    blocks: list[PipelineStep] = [
        raw_reader(str(raw.absolute()), str(layout.inputs)),
        Census("input"),
        LicenceFilter(settings.allow),
    ]
    blocks += [SizeFilter(limits), CodeFilter(limits), ProseQuality(limits), ProseRepetition()]
    finders = -(-tasks // TASKS_PER_FINDER)
    blocks += [AtomicJsonlWriter(layout.at("selected")), dedup.ExactSignature(layout.at("exact-signatures"), finders)]
    return Step("select", blocks, tasks)


def _unique(layout: Layout, settings: CleanSettings, tasks: int) -> Step:
    blocks: list[PipelineStep] = [_read(layout.at("selected")), dedup.ExactFilter(layout.at("exact"))]
    blocks.append(AtomicJsonlWriter(layout.at("unique")))
    if settings.near_duplicates:
        blocks.append(dedup.near_signatures(layout.at("near-signatures")))
    return Step("unique", blocks, tasks)


def _finish(layout: Layout, settings: CleanSettings, tasks: int) -> Step:
    blocks: list[PipelineStep] = [_read(layout.at("unique"))]
    if settings.near_duplicates:
        blocks.append(dedup.NearFilter(layout.at("near")))
    if settings.problems:
        config = decontamination_config(settings.n_grams)
        blocks.append(ProblemFilter(layout.at("problems"), config, str(layout.removed)))
    if settings.secrets:
        blocks.append(SecretScrubber())
    if settings.personal_data:
        blocks.append(PersonalData())
    return Step("finish", [*blocks, Census("output"), AtomicJsonlWriter(str(layout.documents))], tasks)


def _read(folder: str) -> JsonlReader:
    return JsonlReader(folder, glob_pattern="*.jsonl.gz", add_file_path=False)


def chosen_problems(paths: list[Path] | None, wanted: bool) -> tuple[str, ...]:
    """The problem files to keep out: those named, else those that come with this package; none where not wanted."""
    if not wanted:
        return ()
    found = tuple(map(str, paths or bundled_problems()))
    if not found:
        raise ProblemError("no problem files come with this installation; name some with --problems FILE")
    return found


def parse_pairs(option: str, texts: list[str]) -> dict[str, str]:
    """`NAME=VALUE` texts as a dictionary; raises SettingsError for another form."""
    for text in texts:
        if "=" not in text:
            raise SettingsError(f"{option} {text!r}: expected NAME=VALUE")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def parse_limits(texts: list[str]) -> QualityLimits:
    """Quality limits from `NAME=VALUE` texts; raises SettingsError naming the nearest limit for an unknown one."""
    kinds = {name: type(getattr(QualityLimits(), name)) for name in QualityLimits.__dataclass_fields__}
    values = {}
    for name, text in parse_pairs("--limit", texts).items():
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, 1, 0.0)[0]
            raise SettingsError(f"there is no limit {name!r}; did you mean {near}? all: {', '.join(kinds)}")
        try:
            values[name] = kinds[name](text)
        except ValueError:
            raise SettingsError(f"limit {name} is {text!r}, expected a number ({kinds[name].__name__})") from None
    return QualityLimits(**values)
