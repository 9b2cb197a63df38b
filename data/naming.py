"""How shards are named."""

from __future__ import annotations

import hashlib
import re


def shard_stem(source: str, split: str, task: int, index: int) -> str:
    """The name of the `index`-th shard that a task writes for one source and split.

    What a file name cannot hold is replaced, and a hash keeps two such sources apart.
    """
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", source).lstrip(".")
    if plain != source:
        plain += "-" + hashlib.sha256(source.encode()).hexdigest()[:8]
    return f"{plain}-{split}-{task:05d}-{index:04d}"
