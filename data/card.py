"""What does a reader of a corpus need to know? Its data card, from the report of its cleaning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Removed documents that the card names; the report names more.
NAMED = 20


def card_text(report: dict[str, Any]) -> str:
    """The data card as Markdown."""
    parts = [_head(report), _sources(report), _licences(report), _steps(report), _copies(report)]
    return "\n\n".join([*parts, _problems(report), _secrets(report), _made(report)]) + "\n"


def _head(report: dict[str, Any]) -> str:
    before, after = report["totals"]["input"], report["totals"]["output"]
    return (
        f"# Data card\n\n{after['documents']:,} documents, {_size(after['bytes'])}, in `documents/*.jsonl.gz` "
        f"(one JSON object a line: `text`, `id`, `metadata` with `source`, `path`, `license`, `origin`); "
        f"collected were {before['documents']:,} documents, {_size(before['bytes'])}."
    )


def _sources(report: dict[str, Any]) -> str:
    return "## Sources\n\n" + _ends(report["sources"], "source")


def _licences(report: dict[str, Any]) -> str:
    allowed = ", ".join(report["settings"]["allow"])
    return f"## Licences\n\nKept are documents under {allowed}.\n\n" + _ends(report["licences"], "licence")


def _ends(counted: dict[str, dict[str, dict[str, int]]], title: str) -> str:
    """A table of documents and bytes before and after, by source or licence."""
    before, after, none = counted["input"], counted["output"], {"documents": 0, "bytes": 0}
    rows = [
        (name, f"{before[name]['documents']:,}", f"{kept['documents']:,}", _size(kept["bytes"]))
        for name in sorted(before, key=lambda name: -before[name]["documents"])
        for kept in [after.get(name, none)]
    ]
    return _table((title, "collected", "kept", "kept bytes"), rows)


def _steps(report: dict[str, Any]) -> str:
    rows = [
        (step["step"], f["filter"], f"{f['in']:,}", f"{f['out']:,}", _counts(f["removed"]))
        for step in report["steps"]
        for f in step["filters"]
    ]
    return "## What each filter removed\n\n" + _table(("step", "filter", "in", "out", "removed, by reason"), rows)


def _copies(report: dict[str, Any]) -> str:
    removed = {f["filter"]: sum(f["removed"].values()) for step in report["steps"] for f in step["filters"]}
    exact, near = removed.get("exact duplicates", 0), removed.get("near duplicates")
    how = "SHA-256 of the text without trailing blanks and blank lines"
    text = f"## Duplicates\n\nExact copies removed: {exact:,} ({how})."
    if near is None:
        return text + " Near duplicates were not looked for."
    return text + f" Near duplicates removed: {near:,} (MinHash over word 5-grams, 14 buckets of 8 hashes)."


def _problems(report: dict[str, Any]) -> str:
    sets = report["problems"]
    if not sets:
        return "## Evaluation problems\n\nNot looked for: do not evaluate on public problems what is trained on this."
    names = ", ".join(
        f"{name} ({c['problems']} problems, {c['too short']} too short to be found)" for name, c in sets.items()
    )
    n, hits = report["settings"]["n_grams"], report["contaminated"]
    text = (
        f"## Evaluation problems\n\nRemoved are documents that share {n} words in a row with a problem, its solution "
        f"or its tests: {names}. Documents removed: {len(hits)}."
    )
    rows = [(hit["id"], hit["problems"], hit["words"]) for hit in hits[:NAMED]]
    more = f"\n\nand {len(hits) - NAMED} more in report.json." if len(hits) > NAMED else ""
    return text + ("\n\n" + _table(("document", "problems", "words in common"), rows) + more if rows else "")


def _secrets(report: dict[str, Any]) -> str:
    text = "## Secrets and personal data\n\n"
    chosen = report["settings"]
    if not (chosen["secrets"] or chosen["personal_data"]):
        return text + "Not looked for."
    if not report["secrets"]:
        return text + "Looked for, none found."
    return text + "Replaced by a mark or an example address.\n\n" + _table(
        ("kind", "replaced"), [(kind, f"{count:,}") for kind, count in report["secrets"].items()]
    )  # fmt: skip


def _made(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    commands = "\n".join(command for command in report["commands"] if command)
    return f"## How it was made\n\n```\n{commands}\n```\n\nWith {versions}. All settings and counts: `report.json`."


def _counts(removed: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in removed.items()) or "none"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _size(count: int) -> str:
    """Bytes as people read them, in powers of 1,000."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
