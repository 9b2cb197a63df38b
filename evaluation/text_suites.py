"""Suites that run no code: bits per byte, the share of completions that are Python, infilling by exact match."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from laneformer.evaluation.completers import Completer, Decoding
from laneformer.evaluation.problems import Span, read_rows
from laneformer.evaluation.samples import Sample
from laneformer.evaluation.scores import score_share

Progress = Callable[[int, int], None]


class TextsError(ValueError):
    """Texts that cannot be read."""


def read_texts(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Texts by source: of a folder's files by sub-folder (by suffix at its top), of JSON lines by their `source`."""
    found: dict[str, list[str]] = {}
    for path in paths:
        if not path.exists():
            raise TextsError(f"{path} does not exist; give text files, JSON lines with `text`, or a folder of them")
        if (path / "manifest.json").exists():
            raise TextsError(f"{path} holds token shards; give the documents they were made from, as documents/")
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        for file in files:
            for source, text in texts_of(file, path):
                found.setdefault(source, []).append(text)
    found = {source: kept for source, texts in sorted(found.items()) if (kept := [text for text in texts if text])}
    if not found:
        raise TextsError(f"no text in {', '.join(map(str, paths))}")
    return found


def texts_of(file: Path, root: Path) -> Iterable[tuple[str, str]]:
    """(source, text) of each text in a file."""
    if file.name.endswith((".jsonl", ".jsonl.gz")):
        for row in read_rows(file):
            if not isinstance(row.get("text"), str):
                raise TextsError(f"{file} has a line without `text`")
            yield (
                (row.get("metadata") or {}).get("source") or row.get("source") or file.name.partition(".")[0],
                row["text"],
            )
        return
    inside = file.relative_to(root).parts if file != root else ()
    source = inside[0] if len(inside) > 1 else file.suffix.lstrip(".") or file.name
    try:
        yield source, file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextsError(f"{file} is not a text in UTF-8: {error}") from None


def bits_per_byte(model: Completer, sources: dict[str, list[str]], progress: Progress) -> dict[str, Any]:
    """Bits that the model needs for each UTF-8 byte, by source and over all.

    Each text is coded whole: its first token is predicted from the end token, later ones from what precedes them.
    """
    rows, done = {}, 0
    total = sum(map(len, sources.values()))
    for source, texts in sources.items():
        nats, tokens = 0.0, 0
        for text in texts:
            more = model.nats(text)
            nats, tokens, done = nats + more[0], tokens + more[1], done + 1
            progress(done, total)
        rows[source] = bits_row(nats, tokens, texts)
    every = [text for texts in sources.values() for text in texts]
    nats = sum(row["nats"] for row in rows.values())
    return {"sources": rows, "all": bits_row(nats, sum(row["tokens"] for row in rows.values()), every)}


def bits_row(nats: float, tokens: int, texts: Sequence[str]) -> dict[str, Any]:
    """The numbers of one source."""
    size = sum(len(text.encode()) for text in texts)
    return {
        "bits_per_byte": nats / math.log(2) / size, "bytes": size, "tokens": tokens, "texts": len(texts), "nats": nats,
    }  # fmt: skip


def is_python(code: str) -> bool:
    """Whether a text parses as Python; nothing of it runs."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def syntax_valid(programs: Sequence[tuple[Sample, str]]) -> dict[str, Any]:
    """The share of samples whose whole program parses."""
    valid = [is_python(program) for _, program in programs]
    per_problem = [
        {"task_id": sample.task_id, "valid": right} for (sample, _), right in zip(programs, valid, strict=True)
    ]
    return {"score": asdict(score_share(sum(valid), len(valid))), "samples": len(valid), "per_problem": per_problem}


def infilling(
    model: Completer, spans: Sequence[Span], one_line: bool, max_tokens: int, seed: int, progress: Progress
) -> dict[str, Any]:
    """The share of spans that greedy decoding restores, white space at the ends aside; `one_line`: of one line.

    Raises NotOffered for a model without infilling tokens.
    """
    rows = []
    for done, span in enumerate(spans, 1):
        prompt = model.infilling_prompt(span.prefix, span.suffix)
        stop = ("\n",) if one_line else ()
        answer = model.complete([prompt], Decoding(max_tokens, stop=stop, seed=seed))[0][0]
        written = answer.partition("\n")[0] if one_line else answer
        rows.append({"task_id": span.task_id, "exact": written.strip() == span.middle.strip()})
        progress(done, len(spans))
    right = sum(row["exact"] for row in rows)
    return {"score": asdict(score_share(right, len(rows))), "problems": len(rows), "per_problem": rows}
