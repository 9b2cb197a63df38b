"""What did cleaning do? Counts that datatrove's tasks left behind, as one document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Stats = Sequence[dict[str, Any]]


def merged_stats(logs: Path) -> list[dict[str, Any]]:
    """The statistics of a step's blocks, added up over its tasks; those of killed and resumed runs included.

    datatrove's own sum covers only the tasks of the last run.
    """
    total: list[dict[str, Any]] = []
    for path in sorted((logs / "stats").glob("*.json")):
        for place, block in enumerate(json.loads(path.read_text(encoding="utf-8"))):
            if place == len(total):
                total.append({"name": _name(block["name"]), "seconds": 0.0, "counts": {}})
            total[place]["seconds"] += _total(block["time_stats"])
            for key, value in block["stats"].items():
                counts = total[place]["counts"]
                counts[key] = counts.get(key, 0) + int(_total(value))
    return total


def _name(text: str) -> str:
    return text.partition(": ")[2] or text


def _total(value: Any) -> float:
    return value["total"] if isinstance(value, dict) else value


def counts_of(stats: Stats, name: str | None = None) -> dict[str, int]:
    """The counts of the block of a name (the first block without one); empty where there is none."""
    return next((block["counts"] for block in stats if name in (None, block["name"])), {})


def filters(stats: Stats) -> list[dict[str, Any]]:
    """What each filter of a step received, passed on and removed, by reason."""
    rows = []
    for block in stats:
        counts = block["counts"]
        if "forwarded" not in counts and "dropped" not in counts:
            continue
        reasons = {key.removeprefix("dropped_"): n for key, n in counts.items() if key.startswith("dropped_")}
        dropped = counts.get("dropped", 0)
        row = {"filter": block["name"], "in": counts.get("total", 0), "out": counts.get("forwarded", 0)}
        rows.append({**row, "removed": dict(sorted(reasons.items())) or ({"duplicate": dropped} if dropped else {})})
    return rows


def census(stats: Stats, name: str, key: str) -> dict[str, dict[str, int]]:
    """Documents and bytes by source or by licence, as a census block counted them."""
    found: dict[str, dict[str, int]] = {}
    for label, value in sorted(counts_of(stats, name).items()):
        what, kind, of = label.split(" ", 2) if label.count(" ") >= 2 else (label, "", "")
        if kind == key:
            found.setdefault(of, {"documents": 0, "bytes": 0})[what] = value
    return found


def removed_secrets(stats: Stats) -> dict[str, int]:
    """How many secrets and addresses were replaced, by kind."""
    found = {
        key.removeprefix("removed "): count
        for block in stats
        for key, count in block["counts"].items()
        if key.startswith("removed ")
    }
    return dict(sorted(found.items()))


def problem_sets(index: Stats) -> dict[str, dict[str, int]]:
    """For each problem set: its problems, and those too short to be looked for."""
    counts = counts_of(index)
    names = [key.removeprefix("problems ") for key in counts if key.startswith("problems ")]
    return {n: {"problems": counts[f"problems {n}"], "too short": counts.get(f"too short {n}", 0)} for n in names}


def total(counted: dict[str, dict[str, int]]) -> dict[str, int]:
    """The sum over sources or licences."""
    return {key: sum(entry[key] for entry in counted.values()) for key in ("documents", "bytes")}
