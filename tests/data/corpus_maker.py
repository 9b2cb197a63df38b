"""Small corpora for the tests of collecting and cleaning."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path


def program(seed: int, lines: int = 40) -> str:
    """A Python program like no other: each seed has words of its own."""
    chance = random.Random(seed)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(200)]
    body = (f"    {chance.choice(words)} = {chance.choice(words)}({chance.choice(words)})" for _ in range(lines))
    return f"def {words[0]}({words[1]}):\n" + "\n".join(body) + "\n"


def document(text: str, path: str = "a.py", licence: str = "MIT", source: str = "made") -> dict:
    """A collected document."""
    return {"text": text, "id": f"{source}/{path}", "metadata": {"source": source, "path": path, "license": licence}}


def write_raw(raw: Path, shards: list[list[dict]], source: str = "made") -> None:
    """Collected documents on disk, one file a shard."""
    (raw / source).mkdir(parents=True, exist_ok=True)
    for number, documents in enumerate(shards):
        lines = "".join(json.dumps(entry) + "\n" for entry in documents)
        (raw / source / f"{number:05d}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))


def read_documents(folder: Path) -> list[dict]:
    """All documents of a folder in the order of its files."""
    files = sorted(folder.glob("*.jsonl.gz"))
    return [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]


def write_problems(path: Path, **fields: str) -> Path:
    """A file with one problem."""
    path.write_text(json.dumps({"task_id": "T/0", **fields}) + "\n")
    return path
