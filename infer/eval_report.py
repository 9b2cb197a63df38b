"""The table that `infer eval` shows people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_results(document: dict[str, Any], console: Console) -> None:
    """One row for each score."""
    table = Table(title=f"{document['model']}", title_justify="left")
    for name in ("suite", "score", "value", "95 % interval", "of", "statuses"):
        table.add_column(name, justify="right" if name in ("value", "of") else "left")
    for suite, result in document["suites"].items():
        for row in rows_of(suite, result):
            table.add_row(*row)
    console.print(table)
    methods = sorted({method for result in document["suites"].values() for method in methods_of(result)})
    for method in methods:
        console.print(f"interval: {method}", style="dim", highlight=False)


def rows_of(suite: str, result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The rows of one suite."""
    if "not_available" in result:
        return [(suite, "n/a", "", "", "", result["not_available"])]
    if "sources" in result:
        sources = {**result["sources"], "all": result["all"]}
        return [(suite, name, f"{row['bits_per_byte']:.4f}", "", f"{row['bytes']} bytes", "")
                for name, row in sources.items()]  # fmt: skip
    if "kinds" in result:
        return [scored(suite, f"exact match, {kind}", row["score"], f"{row['problems']} spans", "")
                for kind, row in result["kinds"].items()]  # fmt: skip
    if "statuses" not in result:
        return [scored(suite, "parses as Python", result["score"], f"{result['samples']} samples", "")]
    told = ", ".join(f"{count} {status}" for status, count in result["statuses"].items() if count)
    size = f"{result['correct']}/{result['samples']}"
    return [scored(suite, name, score, size, told) for name, score in result["scores"].items()]


def scored(suite: str, name: str, score: dict[str, Any], size: str, told: str) -> tuple[str, ...]:
    """One row with an interval."""
    value, interval = f"{100 * score['mean']:.1f} %", f"{100 * score['low']:.1f} to {100 * score['high']:.1f} %"
    return suite, name, value, interval, size, told


def methods_of(result: dict[str, Any]) -> list[str]:
    """How the intervals of one suite were found."""
    scores = [result.get("score"), *result.get("scores", {}).values()]
    scores += [row["score"] for row in result.get("kinds", {}).values()]
    return [score["method"] for score in scores if score]
