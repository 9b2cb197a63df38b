"""Tokenised shards: the memory-mapped files that training reads, and the manifest that says what they are.

A folder holds manifest.json, the tokenizer's files and, for every shard,

    NAME.tokens.bin     uint16 (uint32 from 65,537 entries on) [N]: the end token, then each document and the end token
    NAME.documents.bin  int64 [documents, 2]: one past each document's last token (its end token), its UTF-8 bytes
    NAME.learn.bin      uint8 [N], only where some tokens are no targets: 1 for a token that is learnt

The end token before a document is what its first token is predicted from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from laneformer.files import replace_files, write_text

MANIFEST, FORMAT, VERSION = "manifest.json", "laneformer-tokens", 1
SPLITS = ("train", "valid")


class ShardError(ValueError):
    """A folder of shards that is not what its manifest says."""


@dataclass(frozen=True)
class ShardInfo:
    """One shard as the manifest lists it; `sha256` has a hash for each of its files by suffix."""

    name: str
    source: str
    split: str
    num_tokens: int
    num_documents: int
    num_bytes: int
    sha256: dict[str, str]


@dataclass(frozen=True)
class Manifest:
    """What a folder of shards holds, and which tokenizer made it."""

    dtype: str
    vocab_size: int
    end_token: str
    end_id: int
    tokenizer_sha256: str
    special_tokens: dict[str, int]
    shards: tuple[ShardInfo, ...]

    def text(self) -> str:
        """The text of manifest.json."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def file_sha256(path: Path) -> str:
    """The hash of a file, read in pieces."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


class ShardWriter:
    """Collects documents and writes one shard; nothing is on disk before `close`, and then all of it is."""

    def __init__(self, folder: Path, name: str, source: str, split: str, vocab_size: int, end_id: int) -> None:
        if split not in SPLITS:
            raise ShardError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
        self.folder, self.name, self.source, self.split, self.end_id = folder, name, source, split, end_id
        self.dtype = token_dtype(vocab_size)
        self._tokens = [np.array([end_id], self.dtype)]
        self._learn = [np.zeros(1, np.uint8)]
        self._documents: list[tuple[int, int]] = []
        self.num_tokens, self._all_learnt = 1, True

    def add(self, ids: Sequence[int], num_bytes: int, learn: Sequence[int] | None = None) -> None:
        """One document without its end token; `learn` has 1 for each token, and for the end token, that is learnt."""
        count = len(ids) + 1
        if learn is not None and len(learn) != count:
            raise ShardError(f"learn has {len(learn)} entries for {len(ids)} tokens and the end token")
        self._tokens.append(np.array([*ids, self.end_id], self.dtype))
        self._learn.append(np.ones(count, np.uint8) if learn is None else np.array(learn, np.uint8))
        self._all_learnt &= learn is None or all(learn)
        self.num_tokens += count
        self._documents.append((self.num_tokens, num_bytes))

    def close(self) -> ShardInfo:
        """Writes the files, each whole or not there, and returns what the manifest says of them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        documents = np.array(self._documents, np.int64).reshape(-1, 2)
        arrays = {"tokens": np.concatenate(self._tokens), "documents": documents}
        if not self._all_learnt:
            arrays["learn"] = np.concatenate(self._learn)
        paths = {kind: self.folder / f"{self.name}.{kind}.bin" for kind in arrays}
        replace_files({paths[kind]: array.tofile for kind, array in arrays.items()})
        hashes = {kind: file_sha256(path) for kind, path in paths.items()}
        num_bytes = int(documents[:, 1].sum())
        return ShardInfo(self.name, self.source, self.split, self.num_tokens, len(documents), num_bytes, hashes)


@dataclass(frozen=True)
class Shard:
    """An opened shard: token ids [N], documents [documents, 2] and, where there is one, the learn mask [N]."""

    info: ShardInfo
    tokens: np.ndarray
    documents: np.ndarray
    learn: np.ndarray | None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes manifest.json, which makes the folder one that training reads; the last thing to be written."""
    write_text(folder / MANIFEST, manifest.text())


def read_manifest(folder: str | os.PathLike) -> Manifest:
    """The manifest of a folder; raises ShardError where there is none that can be read."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ShardError(f"{folder} holds no {MANIFEST}; make one with laneformer data tokenize")
    try:
        keys: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if keys.pop("format") != FORMAT or keys.pop("version") != VERSION:
            raise ValueError(f"expected format {FORMAT}, version {VERSION}")
        return Manifest(**{**keys, "shards": tuple(ShardInfo(**shard) for shard in keys["shards"])})
    except (KeyError, TypeError, ValueError) as error:
        raise ShardError(f"{path} is not a manifest of shards: {error}") from None


def open_shard(folder: str | os.PathLike, info: ShardInfo, manifest: Manifest, verify: bool = True) -> Shard:
    """Maps a shard's files; raises ShardError for one whose size, or with `verify` whose hash, is another."""
    arrays: dict[str, np.ndarray] = {}
    shapes: dict[str, tuple[np.dtype, tuple[int, ...]]] = {
        "tokens": (np.dtype(manifest.dtype), (info.num_tokens,)),
        "documents": (np.dtype(np.int64), (info.num_documents, 2)),
        "learn": (np.dtype(np.uint8), (info.num_tokens,)),
    }
    for kind, expected in info.sha256.items():
        path = Path(folder) / f"{info.name}.{kind}.bin"
        dtype, shape = shapes[kind]
        size = int(np.prod(shape)) * dtype.itemsize
        if not path.is_file():
            raise ShardError(f"{path} is missing, but {MANIFEST} lists it; tokenise again")
        if path.stat().st_size != size:
            raise ShardError(f"{path} has {path.stat().st_size} bytes, {MANIFEST} says {size}; tokenise again")
        if verify and file_sha256(path) != expected:
            raise ShardError(f"{path} was changed after {MANIFEST} was written (its hash differs); tokenise again")
        arrays[kind] = np.memmap(path, dtype, "r", shape=shape) if size else np.empty(shape, dtype)
    return Shard(info, arrays["tokens"], arrays["documents"], arrays.get("learn"))
