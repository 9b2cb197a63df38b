"""What a folder of shards holds: counts by source and split, and documents decoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laneformer.data.shards import Manifest, Shard, ShardError, ShardInfo, open_shard
from laneformer.data.tokenizer import read_tokenizer, tokenizer_sha256

# Characters of a document that a sample shows.
SHOWN = 400


@dataclass(frozen=True)
class Row:
    """One source and split; `learnt` counts the tokens that are targets, the end tokens of plain text among them."""

    source: str
    split: str
    shards: int
    documents: int
    tokens: int
    learnt: int
    num_bytes: int


def rows(folder: Path, manifest: Manifest) -> list[Row]:
    """The counts by source and split, in sorted order."""
    found: dict[tuple[str, str], list[ShardInfo]] = {}
    for info in manifest.shards:
        found.setdefault((info.source, info.split), []).append(info)
    return [
        Row(
            *key,
            shards=len(infos),
            documents=sum(info.num_documents for info in infos),
            tokens=sum(info.num_tokens for info in infos),
            learnt=sum(_learnt(folder, info, manifest) for info in infos),
            num_bytes=sum(info.num_bytes for info in infos),
        )
        for key, infos in sorted(found.items())
    ]


def _learnt(folder: Path, info: ShardInfo, manifest: Manifest) -> int:
    """The targets of a shard: all but its first token, or those that its mask names."""
    if "learn" not in info.sha256:
        return info.num_tokens - 1
    shard = open_shard(folder, info, manifest, verify=False)
    return int(np.count_nonzero(shard.learn)) if shard.learn is not None else 0


def sample_documents(folder: Path, manifest: Manifest, count: int) -> Iterator[tuple[str, str]]:
    """A title and the decoded start of the first `count` documents of each source and split.

    Raises ShardError where the tokenizer in the folder is not the one that made the shards.
    """
    if count == 0:
        return
    tokenizer, _ = read_tokenizer(folder)
    if tokenizer_sha256(tokenizer) != manifest.tokenizer_sha256:
        raise ShardError(f"the tokenizer in {folder} is not the one that made its shards; tokenise again")
    left: dict[tuple[str, str], int] = {}
    for info in manifest.shards:
        key = info.source, info.split
        some = min(left.setdefault(key, count), info.num_documents)
        left[key] -= some
        shard = open_shard(folder, info, manifest, verify=False)
        for number in range(some):
            yield f"{info.name}, document {number + 1}", tokenizer.decode(_ids(shard, number), False)[:SHOWN]


def _ids(shard: Shard, number: int) -> list[int]:
    """The tokens of a document without its end token; what its sample does not show may be left out."""
    start = int(shard.documents[number - 1, 0]) if number else 1
    return shard.tokens[start : int(shard.documents[number, 0]) - 1][: 4 * SHOWN].tolist()
