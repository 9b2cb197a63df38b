"""Which documents are held out: decided by their content alone, so that no order, name or seed moves one."""

from __future__ import annotations

import hashlib

HASHES = 2**64


def content_hash(text: str) -> int:
    """The first 64 bits of the SHA-256 of the UTF-8 text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def held_out_below(fraction: float, smallest: int, largest: int) -> int:
    """Documents whose hash lies below this are held out; `smallest` and `largest` are the hashes of one source.

    The share is `fraction` of all hashes, moved as little as it takes to have one document on either side; with a
    fraction of 0, or where all documents of the source are equal, none is held out.
    """
    if fraction == 0 or smallest == largest:
        return 0
    return min(max(int(fraction * HASHES), smallest + 1), largest)
