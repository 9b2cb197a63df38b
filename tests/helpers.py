"""One tolerance for all tests, derived from the type and the length of the longest sum."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def tolerance(dtype: torch.dtype, length: int) -> float:
    """Relative error that sums of `length` rounded terms may have: 4 epsilon sqrt(length), as errors add at random."""
    return 4 * torch.finfo(dtype).eps * math.sqrt(length)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest expected value; infinite where a shape or a NaN differs."""
    if got.shape != expected.shape or not torch.isfinite(got).all():
        return math.inf
    difference = (got.double() - expected.double()).abs().max().item()
    return difference / max(expected.double().abs().max().item(), torch.finfo(torch.float64).tiny)


def assert_close(got: Tensor, expected: Tensor, length: int, dtype: torch.dtype | None = None) -> None:
    """Asserts that `got` is `expected` up to the tolerance of its type (or of `dtype`) over sums of `length`."""
    limit = tolerance(dtype or got.dtype, length)
    error = relative_error(got, expected)
    assert error <= limit, f"relative error {error:.3g} exceeds {limit:.3g} ({dtype or got.dtype}, length {length})"
