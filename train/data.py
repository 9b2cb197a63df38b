"""Text to training sequences: which files, which are held out, and the one fixed order of samples.

Shape suffixes: N sequences, B batch, S positions (one more where targets are included).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from laneformer.train.settings import DataSettings

# Target of a padded position, which cross_entropy leaves out.
IGNORED = -100
ROUNDS = 6


@dataclass(frozen=True)
class Documents:
    """Texts to learn from, texts held out, and how many files were left out and why."""

    train: list[str]
    valid: list[str]
    duplicates: int = 0
    not_utf8: int = 0

    def summary(self) -> str:
        """One line of counts."""
        left_out = [f"{n} {why}" for n, why in ((self.duplicates, "duplicate"), (self.not_utf8, "not UTF-8")) if n]
        megabytes = sum(len(text) for text in self.train) / 1e6
        return f"{len(self.train)} documents of {megabytes:.1f} M characters to learn, {len(self.valid)} held out" + (
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


def read_documents(corpus: Path, settings: DataSettings) -> Documents:
    """Reads the corpus and holds out a fixed share of its files, or the last lines of a single one.

    Which files are held out depends on their content alone, not on names, order or seed; of equal files one is kept,
    so that no held-out text is learnt. Raises ValueError where nothing is left to learn or to hold out.
    """
    texts: dict[bytes, str] = {}
    not_utf8 = empty = 0
    files = find_files(corpus, settings.suffixes, settings.exclude)
    for path in files:
        content = path.read_bytes()
        empty += not content
        try:
            if content:
                texts.setdefault(hashlib.sha256(content).digest(), content.decode("utf-8"))
        except UnicodeDecodeError:
            not_utf8 += 1
    duplicates = len(files) - empty - not_utf8 - len(texts)
    if not texts:
        raise ValueError(f"corpus {corpus}: none of {len(files)} files holds UTF-8 text")
    if len(texts) == 1:
        return Documents(*split_text(next(iter(texts.values())), settings.valid_fraction), duplicates, not_utf8)
    # At least one document on either side.
    count = min(max(1, round(settings.valid_fraction * len(texts))), len(texts) - 1)
    held_out = dict.fromkeys(sorted(texts)[:count])
    train = [text for digest, text in texts.items() if digest not in held_out]
    return Documents(train, [texts[digest] for digest in held_out], duplicates, not_utf8)


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


def permuted(index_N: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Where indices lie in the permutation of 0..size-1 that belongs to (seed, epoch), uint64 [N].

    A Feistel network over the next power of four, walked until the value is below `size`: each index is computed
    alone, in constant memory, and only from integers, so that it is the same everywhere and in every version.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [_mixed(np.array(seed * 0x9E3779B97F4A7C15 + epoch * ROUNDS + i & 2**64 - 1, np.uint64))
            for i in range(ROUNDS)]  # fmt: skip
    value_N = np.array(index_N, np.uint64)
    walking_N = np.ones(value_N.shape, bool)
    while walking_N.any():
        left, right = value_N[walking_N] >> half, value_N[walking_N] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        value_N[walking_N] = left << half | right
        walking_N = value_N >= np.uint64(size)
    return value_N


def _mixed(value: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every input bit flips about half of the output's."""
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


class Windows:
    """Equal sequences of a token stream in an order that depends on the seed and the sample's position only.

    Neighbouring sequences share one token, so that every token but the first is a target once an epoch. Documents lie
    end to end: a sequence may hold the end of one and the start of the next, and attention sees both.
    """

    def __init__(self, tokens_N: np.ndarray, length: int, seed: int) -> None:
        if len(tokens_N) < length + 1:
            raise ValueError(
                f"the corpus has {len(tokens_N)} tokens to learn, one sequence needs {length + 1}; give more text or "
                "a smaller data.sequence_length"
            )
        self.tokens, self.length, self.seed = tokens_N, length, seed
        self.count = (len(tokens_N) - 1) // length

    def order(self, position: int, count: int) -> np.ndarray:
        """The sequences at sample positions position..position+count-1, int64 [count]."""
        position_N = np.arange(position, position + count)
        epoch_N, index_N = position_N // self.count, position_N % self.count
        order_N = np.empty(count, np.int64)
        for epoch in np.unique(epoch_N):
            now = epoch_N == epoch
            order_N[now] = permuted(index_N[now], self.count, self.seed, int(epoch))
        return order_N

    def batch(self, position: int, count: int) -> Tensor:
        """`count` sequences from sample position `position` on, int64 [B, S + 1]."""
        starts_B = self.order(position, count) * self.length
        return torch.from_numpy(self.tokens[starts_B[:, None] + np.arange(self.length + 1)].astype(np.int64))


@dataclass(frozen=True)
class Validation:
    """Held-out text as padded sequences, int64 [N, S]; its UTF-8 bytes are what bits are counted against."""

    inputs_NS: Tensor
    targets_NS: Tensor
    num_bytes: int


def validation_set(tokens_N: np.ndarray, length: int, num_bytes: int) -> Validation:
    """Cuts a stream that starts with the end token into sequences: every later token is a target exactly once."""
    stream = torch.from_numpy(tokens_N.astype(np.int64))
    rows = -(-(len(stream) - 1) // length)
    inputs = torch.zeros(rows * length, dtype=torch.int64)
    targets = torch.full((rows * length,), IGNORED)
    inputs[: len(stream) - 1], targets[: len(stream) - 1] = stream[:-1], stream[1:]
    return Validation(inputs.view(rows, length), targets.view(rows, length), num_bytes)
