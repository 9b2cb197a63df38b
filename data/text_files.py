"""Files to texts: which files of a folder are read, which are left out, and which texts are held out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Documents:
    """Texts to learn from, texts held out, and how many files were left out and why."""

    train: list[str]
    valid: list[str]
    duplicates: int = 0
    not_utf8: int = 0
    empty: int = 0

    def sha256(self) -> str:
        """A hash over every text, its side and its place."""
        digest = hashlib.sha256()
        for texts in (self.train, self.valid):
            digest.update(len(texts).to_bytes(8, "big"))
            for text in texts:
                digest.update(hashlib.sha256(text.encode()).digest())
        return digest.hexdigest()

    def summary(self) -> str:
        """One line of counts."""
        reasons = ((self.duplicates, "duplicate"), (self.not_utf8, "not UTF-8"), (self.empty, "empty"))
        left_out = [f"{count} {why}" for count, why in reasons if count]
        megabytes = sum(len(text.encode()) for text in self.train) / 1e6
        return f"{len(self.train)} documents of {megabytes:.1f} MB to learn, {len(self.valid)} held out" + (
            f" (left out: {', '.join(left_out)})" if left_out else ""
        )


def find_files(corpus: Path, suffixes: Sequence[str], exclude: Sequence[str]) -> list[Path]:
    """The files of a folder in sorted order, or the one file; raises ValueError where there are none."""
    if corpus.is_file():
        return [corpus]
    if not corpus.is_dir():
        raise ValueError(f"corpus {corpus} does not exist; give a folder of text files or one file")
    found = []
    for folder, names, files in os.walk(corpus):
        names[:] = [name for name in names if name not in exclude]
        found += [Path(folder, file) for file in files if file.endswith(tuple(suffixes))]
    if not found:
        raise ValueError(f"corpus {corpus} holds no file ending with {', '.join(suffixes)}; see data.suffixes")
    return sorted(found, key=lambda path: path.relative_to(corpus).parts)


def read_documents(corpus: Path, suffixes: Sequence[str], exclude: Sequence[str], valid_fraction: float) -> Documents:
    """Reads the corpus and holds out a fixed share of its files, or the last lines of a single one.

    Which files are held out depends on their content alone, not on names, order or seed; of equal files one is kept,
    so that no held-out text is learnt. Raises ValueError where nothing is left to learn or to hold out.
    """
    texts: dict[bytes, str] = {}
    not_utf8 = empty = 0
    files = find_files(corpus, suffixes, exclude)
    for path in files:
        content = path.read_bytes()
        empty += not content
        try:
            if content:
                texts.setdefault(hashlib.sha256(content).digest(), content.decode("utf-8"))
        except UnicodeDecodeError:
            not_utf8 += 1
    left_out = {"duplicates": len(files) - empty - not_utf8 - len(texts), "not_utf8": not_utf8, "empty": empty}
    if not texts:
        raise ValueError(f"corpus {corpus}: none of {len(files)} files holds UTF-8 text")
    if len(texts) == 1:
        return Documents(*split_text(next(iter(texts.values())), valid_fraction), **left_out)
    # At least one document on either side.
    count = min(max(1, round(valid_fraction * len(texts))), len(texts) - 1)
    held_out = dict.fromkeys(sorted(texts)[:count])
    train = [text for digest, text in texts.items() if digest not in held_out]
    return Documents(train, [texts[digest] for digest in held_out], **left_out)


def split_text(text: str, fraction: float) -> tuple[list[str], list[str]]:
    """One text as what is learnt and its last `fraction`, cut at a line's end."""
    cut = text.rfind("\n", 0, int(len(text) * (1 - fraction))) + 1
    if cut == 0:
        raise ValueError(f"a single file of {len(text)} characters has no line to cut it at; give more text")
    return [text[:cut]], [text[cut:]]


def first_bytes(texts: Iterable[str], limit: int) -> list[str]:
    """The first texts of at most `limit` UTF-8 bytes together, the last one cut short."""
    kept = []
    for text in texts:
        content = text.encode()[:limit]
        limit -= len(content)
        # A character that the cut goes through is dropped.
        kept.append(content.decode(errors="ignore"))
        if limit <= 0:
            break
    return kept
