"""How is a corpus cleaned? Step by step, each resumed where it was killed, and a report at the end."""

from __future__ import annotations

import gzip
import json
import platform
import shutil
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from laneformer import __version__
from laneformer.data import report as counting
from laneformer.data.card import card_text
from laneformer.data.collect import collect_commands, incomplete
from laneformer.data.decontaminate import read_problems
from laneformer.data.executors import Execution, Step, chain, executor, finished
from laneformer.data.pipeline import CleanSettings, Layout, steps
from laneformer.data.quiet import watched
from laneformer.data.records import SETTINGS, claim, locked
from laneformer.data.shards import file_sha256
from laneformer.data.writer import sweep
from laneformer.files import replace_files, text_writer, write_text
from laneformer.terminal import say

REPORT, CARD, COMMANDS = "report.json", "README.md", "commands.json"
# More removed documents than these are counted but not named.
MAX_NAMED = 200


class CleanError(ValueError):
    """A corpus that cannot be cleaned as asked."""


def raw_files(raw: Path) -> list[Path]:
    """The files of collected documents; raises CleanError where there are none or a collection is not complete."""
    if unfinished := incomplete(raw):
        raise CleanError(f"{raw}: {', '.join(unfinished)} is not collected fully; run the same collect command again")
    files = sorted(path for path in raw.rglob("*.jsonl*") if path.name.endswith((".jsonl", ".jsonl.gz")))
    files = [path for path in files if not any(part.startswith(".") for part in path.relative_to(raw).parts)]
    if not files:
        raise CleanError(f"{raw} holds no documents (.jsonl or .jsonl.gz); make some with laneformer data collect")
    return files


def clean(
    raw: Path, out: Path, settings: CleanSettings, execution: Execution, redo: bool = False, command: str = ""
) -> dict[str, Any] | None:
    """Cleans RAW into OUT/documents and returns the report; None where the steps were only submitted to a cluster.

    Raises CleanError, SettingsError (OUT holds a corpus cleaned in another way) or StepFailed.
    """
    if out.resolve() == raw.resolve() or raw.resolve() in out.resolve().parents:
        raise CleanError(f"{out} lies in {raw}: choose an output folder outside the one that is read")
    files, layout = raw_files(raw), Layout(out)
    for path in settings.problems:
        read_problems(Path(path))
    plan = steps(raw, layout, settings, len(files))
    with locked(layout.out):
        claim(layout.work, _record(raw, files, settings), (layout.work, layout.documents), redo)
        write_text(layout.inputs, "".join(f"{path.relative_to(raw)}\n" for path in files))
        write_text(layout.work / COMMANDS, json.dumps([*collect_commands(raw), command]))
        if execution.kind == "slurm":
            chain(plan, layout.logs, execution)[-1].run()
            say(f"submitted; when the jobs have finished, run: laneformer data card {out}")
            return None
        sweep(layout.out)
        try:
            for number, step in enumerate(plan, 1):
                _run(step, layout, execution, f"{number}/{len(plan)} {step.name}")
        finally:
            # When one task fails, the others are ended where they are.
            sweep(layout.out)
        return finish(out)


def _record(raw: Path, files: list[Path], settings: CleanSettings) -> dict[str, Any]:
    """What a cleaning depends on: its settings, the problems by their hashes, the documents by size and time."""
    problems = [[Path(path).name, file_sha256(Path(path))] for path in settings.problems]
    inputs = {str(path.relative_to(raw)): [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
    versions = {"laneformer": __version__, "datatrove": version("datatrove"), "python": platform.python_version()}
    chosen = settings.record() | {"problems": problems}
    return {"settings": chosen, "raw": str(raw.resolve()), "inputs": inputs, "versions": versions}


def _run(step: Step, layout: Layout, execution: Execution, title: str) -> None:
    """Runs the tasks of a step that are not complete and adds its seconds to the record."""
    if finished(step, layout.logs) == step.tasks:
        return
    started = time.monotonic()
    with watched(title, step.tasks, lambda: finished(step, layout.logs)):
        executor(step, layout.logs, execution).run()
    path = layout.work / "seconds.json"
    seconds = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    seconds[step.name] = round(seconds.get(step.name, 0.0) + time.monotonic() - started, 3)
    write_text(path, json.dumps(seconds) + "\n")


def finish(out: Path) -> dict[str, Any]:
    """Writes the report and the card of a cleaned corpus and removes the intermediate files; returns the report.

    Raises CleanError where OUT holds no cleaned corpus, or one whose steps have not all finished.
    """
    layout = Layout(out)
    path = layout.work / SETTINGS
    if not path.is_file():
        raise CleanError(f"{out} holds no cleaned corpus; make one with laneformer data clean RAW {out}")
    record = json.loads(path.read_text(encoding="utf-8"))
    document = _report(layout, record)
    text = json.dumps(document, indent=1) + "\n"
    replace_files({layout.out / REPORT: text_writer(text), layout.out / CARD: text_writer(card_text(document))})
    shutil.rmtree(layout.data, ignore_errors=True)
    return document


def summary(report: dict[str, Any], out: Path) -> str:
    """A few lines for a person: what each filter removed, the result, the speed."""
    before, after = report["totals"]["input"], report["totals"]["output"]
    rows = [(f["filter"], sum(f["removed"].values())) for step in report["steps"] for f in step["filters"]]
    seconds = max(sum(step["seconds"] or 0.0 for step in report["steps"]), 1e-9)
    speed = f"{before['documents'] / seconds:,.0f} documents/s, {before['bytes'] / 1e6 / seconds:.1f} MB/s"
    lines = [f"  {name:<22} removed {count:>8,}" for name, count in rows]
    lines += [f"  {kind:<22} replaced {count:>7,}" for kind, count in report["secrets"].items()]
    return "\n".join(
        [f"{before['documents']:,} documents, {before['bytes'] / 1e6:.1f} MB", *lines]
        + [f"{after['documents']:,} documents, {after['bytes'] / 1e6:.1f} MB in {out / 'documents'}"]
        + [f"{seconds:.1f} s, {speed}"]
    )  # fmt: skip


def _plan(record: dict[str, Any]) -> dict[str, int]:
    """The number of tasks of each step of a recorded cleaning."""
    keys, limits = dict(record["settings"]), record["settings"]["limits"]
    keys |= {"limits": type(CleanSettings().limits)(**limits), "allow": tuple(keys["allow"])}
    settings = CleanSettings(**{**keys, "problems": tuple(keys["problems"])})
    return {step.name: step.tasks for step in steps(Path(), Layout(Path()), settings, len(record["inputs"]))}


def _report(layout: Layout, record: dict[str, Any]) -> dict[str, Any]:
    plan = _plan(record)
    for name, tasks in plan.items():
        if (done := finished(Step(name, [], tasks), layout.logs)) < tasks:
            raise CleanError(f"{layout.out}: {done} of {tasks} tasks of step {name} have finished; run clean again")
    stats = {name: counting.merged_stats(layout.logs / name) for name in plan}
    path = layout.work / "seconds.json"
    seconds = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    rows = [
        {"step": n, "tasks": plan[n], "seconds": seconds.get(n), "filters": counting.filters(stats[n])} for n in plan
    ]
    ends = {"input": stats["select"], "output": stats["finish"]}
    return {
        "totals": {n: counting.total(counting.census(stat, n, "source")) for n, stat in ends.items()},
        "sources": {n: counting.census(stat, n, "source") for n, stat in ends.items()},
        "licences": {n: counting.census(stat, n, "license") for n, stat in ends.items()},
        "steps": rows,
        "secrets": counting.removed_secrets(stats["finish"]),
        "problems": counting.problem_sets(stats.get("index", [])),
        "contaminated": _contaminated(layout.removed),
        "commands": json.loads((layout.work / COMMANDS).read_text(encoding="utf-8")),
        **{key: record[key] for key in ("settings", "versions")},
    }


def _contaminated(folder: Path) -> list[dict[str, str]]:
    """The documents that were removed because they hold a problem: which, and the words that gave it away."""
    found = []
    for path in sorted(folder.glob("*.jsonl.gz")):
        for line in gzip.decompress(path.read_bytes()).splitlines():
            row = json.loads(line)
            keys = {"problems": row["metadata"]["contaminated_task"], "words": row["metadata"]["contaminated_ngram"]}
            found.append({"id": row["id"], **keys})
    return found[:MAX_NAMED]
