"""Which documents are copies of others? datatrove's exact and MinHash stages, set up for code."""

from __future__ import annotations

import hashlib
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.exact_dedup import (
    ExactDedupConfig,
    ExactDedupFilter,
    ExactDedupSignature,
    ExactFindDedups,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig

from laneformer.data.words import HASHES, NORMALISED, Words

# 14 buckets of 8 hashes over word 5-grams: pairs of similarity 0.72 and more are likely to be found.
MINHASH = MinhashConfig(norm_config=NORMALISED, hash_config=HASHES)
HIGHEST = 65535


def normalised(text: str) -> str:
    """A text without what editors change: trailing blanks, blank lines, the kind of line end."""
    return "\n".join(stripped for line in text.splitlines() if (stripped := line.rstrip()))


def content_hash(document: Document) -> str:
    """The SHA-256 of a document's normalised text."""
    return hashlib.sha256(normalised(document.text).encode()).hexdigest()


def exact_config() -> ExactDedupConfig:
    """datatrove keeps 64 bits of the hash: among 10^9 documents one false match is expected once in 37 corpora."""
    return ExactDedupConfig(content_hash, hash_config=HASHES)


class ExactSignature(ExactDedupSignature):
    """datatrove's signatures with the task as the priority: of several copies the one in the first file stays.

    Without it the copy that stays is the one that is earliest within its own file, whichever file that is.
    """

    name = "exact signatures"

    def __init__(self, folder: str, finders: int) -> None:
        super().__init__(folder, exact_config(), finders)
        self.priority = HIGHEST

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        """Consumes all documents and writes their signatures."""
        self.priority = max(1, HIGHEST - rank)
        super().run(data, rank, world_size)

    def get_hashes(self, doc: Document, doc_idx: int) -> list[tuple[int, int, int]]:
        """(hash, priority, index) of a document."""
        return [(self.hash_fc(content_hash(doc)), self.priority, doc_idx)]  # pyright: ignore


def exact_finder(signatures: str, found: str) -> ExactFindDedups:
    """Finds equal signatures of all tasks."""
    return ExactFindDedups(signatures, found, exact_config())


class ExactFilter(ExactDedupFilter):
    """Removes the copies that were found."""

    name = "exact duplicates"

    def __init__(self, found: str) -> None:
        super().__init__(found, exact_config())


def near_signatures(folder: str) -> MinhashDedupSignature:
    """MinHash signatures of documents; stage 1."""
    return MinhashDedupSignature(folder, MINHASH, language=Words())


def near_buckets(signatures: str, pairs: str) -> MinhashDedupBuckets:
    """Pairs of documents that share a bucket; stage 2, one task a bucket."""
    return MinhashDedupBuckets(signatures, pairs, config=MINHASH)


def near_clusters(pairs: str, removals: str) -> MinhashDedupCluster:
    """Clusters of pairs, of which one document stays; stage 3, one task."""
    return MinhashDedupCluster(pairs, removals, MINHASH)


class NearFilter(MinhashDedupFilter):
    """Removes all documents of a cluster but one; stage 4."""

    name = "near duplicates"
