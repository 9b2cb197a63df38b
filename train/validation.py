"""Which held-out text is measured, as which rows, and how many bytes does it stand for?

Shape suffixes: N rows, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from laneformer.data.shards import Shard, ShardInfo
from laneformer.train.folders import Folders, ShardPlace, read_folders
from laneformer.train.infilling import BROKEN
from laneformer.train.packing import Stream, num_windows


@dataclass(frozen=True)
class Rows:
    """Held-out text of one source as rows, int64 [N, S] each; `num_bytes` is what bits are counted against."""

    inputs_NS: Tensor
    targets_NS: Tensor
    documents_NS: Tensor | None
    num_bytes: int


@dataclass(frozen=True)
class HeldOut:
    """The first documents of a shard: the end token and their tokens, where each ends, what is learnt, their bytes."""

    tokens: np.ndarray
    ends: np.ndarray
    learn: np.ndarray | None
    num_bytes: int


def validation_rows(
    folders: Sequence[Path], sequence_length: int, limit_bytes: int, document_mask: bool = True, verify: bool = True
) -> dict[str, Rows]:
    """The valid split of each source as rows in which every token after a shard's first is a target exactly once.

    Of each source the first whole documents of at most `limit_bytes` UTF-8 bytes together, but at least one; a first
    document that is longer is cut behind the last token at which its decoded text has at most that many bytes and ends
    with a whole character, and has no end token. In shards with a learn mask only what is learnt is a target, and the
    bytes are those of its decoded text, special tokens left out; a source without a byte to measure is left out. Raises
    ShardError as the loader does.
    """
    found = read_folders(folders)
    return {
        source: _as_rows(parts, sequence_length, found.manifest.end_id, document_mask)
        for source, parts in held_out(found, limit_bytes, verify).items()
    }


def held_out(found: Folders, limit_bytes: int, verify: bool = True) -> dict[str, list[HeldOut]]:
    """The text that `validation_rows` cuts into rows, by source and shard, so that other models meet the same."""
    parts = {
        source: _first_documents(found, places, limit_bytes, verify) for source, places in found.places("valid").items()
    }
    return {source: some for source, some in parts.items() if any(part.num_bytes for part in some)}


def _first_documents(found: Folders, places: Sequence[ShardPlace], limit: int, verify: bool) -> list[HeldOut]:
    """The documents of a source that the limit leaves, by shard."""
    parts: list[HeldOut] = []
    for place in places:
        shard = place.open(verify)
        count = int(np.searchsorted(np.cumsum(shard.documents[:, 1]), limit, side="right"))
        if count:
            parts.append(_whole(found, shard, count))
        elif not parts:
            parts.append(_cut(found, shard, limit))
        limit -= int(shard.documents[:count, 1].sum())
        if count < place.info.num_documents:
            break
    return parts


def _whole(found: Folders, shard: Shard, count: int) -> HeldOut:
    """The first `count` documents of a shard."""
    ends = shard.documents[:count, 0]
    tokens = np.asarray(shard.tokens[: ends[-1]])
    if shard.learn is None:
        return HeldOut(tokens, ends, None, int(shard.documents[:count, 1].sum()))
    learn = np.asarray(shard.learn[: ends[-1]])
    return HeldOut(tokens, ends, learn, _learnt_bytes(found.tokenizer(), tokens, learn))


def _cut(found: Folders, shard: Shard, limit: int) -> HeldOut:
    """The first tokens of a shard's first document."""
    tokenizer = found.tokenizer()
    # A token has a byte at least; where there are special tokens, which have none, the cut may come a little earlier.
    ids = shard.tokens[1 : min(int(shard.documents[0, 0]) - 1, limit + 1)].tolist()
    count = _tokens_within(tokenizer, ids, limit)
    tokens = np.asarray(shard.tokens[: 1 + count])
    learn = None if shard.learn is None else np.asarray(shard.learn[: 1 + count])
    everything = np.ones(len(tokens), np.uint8) if learn is None else learn
    return HeldOut(tokens, np.array([len(tokens)]), learn, _learnt_bytes(tokenizer, tokens[1:], everything[1:]))


def _tokens_within(tokenizer: Tokenizer, ids: list[int], limit: int) -> int:
    """The most ids, at least one, whose text has at most `limit` bytes and ends with a whole character."""
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        # The mark of a broken character is longer than the part of the character.
        if len(tokenizer.decode(ids[:middle]).rstrip(BROKEN).encode()) <= limit:
            low = middle
        else:
            high = middle - 1
    for count in chain(range(low, 0, -1), range(low + 1, len(ids) + 1)):
        if not tokenizer.decode(ids[:count]).endswith(BROKEN):
            return count
    return low


def _learnt_bytes(tokenizer: Tokenizer, tokens: np.ndarray, learn: np.ndarray) -> int:
    """The UTF-8 bytes of the text that each run of learnt tokens decodes to; a special token has none."""
    bounds = np.flatnonzero(np.diff(learn.astype(np.int8), prepend=0, append=0))
    runs = [tokens[start:end].tolist() for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
    return sum(len(text.encode()) for text in tokenizer.decode_batch(runs))


def _as_rows(parts: Sequence[HeldOut], length: int, pad: int, document_mask: bool) -> Rows:
    """Each shard's part as windows, as in training."""
    rows = []
    for part in parts:
        info = ShardInfo("", "", "valid", len(part.tokens), len(part.ends), part.num_bytes, {})
        documents = np.stack([part.ends, np.zeros_like(part.ends)], 1)
        stream = Stream(Shard(info, part.tokens, documents, part.learn), pad)
        rows += [stream.row(window, length) for window in range(num_windows(len(part.tokens), length))]
    inputs, targets, documents = (
        torch.from_numpy(np.stack([getattr(row, name) for row in rows]))
        for name in ("inputs_S", "targets_S", "documents_S")
    )
    return Rows(inputs, targets, documents if document_mask else None, sum(part.num_bytes for part in parts))
