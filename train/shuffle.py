"""In which order are samples taken? Counter-based: from a position, a seed and an epoch alone, with no state.

Shape suffix: N samples.
"""

from __future__ import annotations

import hashlib

import numpy as np

ROUNDS = 6
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def permuted(
    index_N: np.ndarray, size: int | np.ndarray, seed: int | np.ndarray, epoch: int | np.ndarray
) -> np.ndarray:
    """Where indices lie in the permutation of 0..size-1 that belongs to (seed, epoch), uint64 [N].

    `size`, `seed` and `epoch` are one number each, or arrays [N] where samples belong to several permutations. A
    Feistel network over the next power of four, walked until the value is below `size`: each index is computed alone,
    in constant memory, and only from integers, so that it is the same everywhere and in every version.
    """
    value_N = np.array(index_N, np.uint64)
    size_N, seed_N, epoch_N = (_spread(number, value_N.shape) for number in (size, seed, epoch))
    half_N = _spread(_half_bits(np.asarray(size)), value_N.shape)
    mask_N = (np.uint64(1) << half_N) - np.uint64(1)
    base_N = seed_N * GOLDEN + epoch_N * np.uint64(ROUNDS)
    keys_N = [mixed(base_N + np.uint64(i)) for i in range(ROUNDS)]
    walking_N = np.ones(value_N.shape, bool)
    while walking_N.any():
        half, mask = half_N[walking_N], mask_N[walking_N]
        left, right = value_N[walking_N] >> half, value_N[walking_N] & mask
        for key_N in keys_N:
            left, right = right, left ^ (mixed(right ^ key_N[walking_N]) & mask)
        value_N[walking_N] = left << half | right
        walking_N = value_N >= size_N
    return value_N


def _spread(number: int | np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A number, modulo 2^64, or an array as uint64 of this shape."""
    array = number if isinstance(number, np.ndarray) else np.array(number % 2**64, np.uint64)
    return np.broadcast_to(array.astype(np.uint64), shape)


def _half_bits(size: np.ndarray) -> np.ndarray:
    """Half the bits of the smallest power of four that holds `size` values."""
    halves = [max(1, ((int(one) - 1).bit_length() + 1) // 2) for one in size.flat]
    return np.array(halves, np.uint64).reshape(size.shape)


def mixed(value: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every input bit flips about half of the output's."""
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


def derived_seed(seed: int, name: str) -> int:
    """A seed of 64 bits for one purpose or source, so that no two of them share an order."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")


def draws(*key: int) -> tuple[int, int, int, int]:
    """Four numbers of 0..2^64-1 that belong to this key of numbers of 64 bits, and to no other."""
    content = b"".join(number.to_bytes(8, "little") for number in key)
    digest = hashlib.blake2b(content, digest_size=32).digest()
    first, second, third, fourth = (int.from_bytes(digest[at : at + 8], "little") for at in range(0, 32, 8))
    return first, second, third, fourth
