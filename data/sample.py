"""Which texts a tokenizer is trained on: all of a corpus, or a share that is spread over it."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from laneformer.data.build import EXCLUDE, SUFFIXES
from laneformer.data.held_out import HASHES, content_hash
from laneformer.data.text_files import find_files

DOCUMENTS = (".jsonl", ".jsonl.gz")


def spread_texts(corpus: Path, num_bytes: int, valid_fraction: float) -> list[str]:
    """The texts of a corpus that tokenising will not hold out, or about `num_bytes` of them, chosen by their hash.

    `corpus` is a folder of documents (JSON lines), of text files, or one file. Raises ValueError where there is none.
    """
    size = sum(len(text.encode()) for text in texts(corpus))
    if not size:
        raise ValueError(f"{corpus} holds no text")
    # What is held out lies at the bottom of the hashes, and the share that is read at their top.
    lowest = HASHES - HASHES * min(num_bytes, size) // size
    chosen = [text for text in texts(corpus) if content_hash(text) >= max(lowest, int(valid_fraction * HASHES))]
    # A few documents may all lie below.
    return chosen or list(texts(corpus))


def texts(corpus: Path) -> Iterator[str]:
    """Every text of a corpus in the order of its files."""
    documents = corpus / "documents" if (corpus / "documents").is_dir() else corpus
    files = [documents] if documents.is_file() else sorted(documents.rglob("*"))
    lines = [path for path in files if path.name.endswith(DOCUMENTS)]
    for path in lines:
        yield from _texts_of_lines(path)
    for path in [] if lines else find_files(corpus, SUFFIXES, EXCLUDE):
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def _texts_of_lines(path: Path) -> Iterator[str]:
    """The texts of a file of JSON lines; raises ValueError with file and line."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as handle:
            for line in handle:
                number += 1
                text = json.loads(line)["text"]
                if not isinstance(text, str):
                    raise TypeError(f"text {text!r}")
                yield text
    except (EOFError, zlib.error, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}, line {number}: expected JSON lines with a text, got {error!r}") from None
