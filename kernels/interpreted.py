"""Triton's interpreter with two things mended while it runs: its speed, and its conversions of bfloat16.

It patches the language anew at every call of a device function, which takes most of the time; once is enough. And it
keeps bfloat16 as bare 16-bit words that it converts as if they were integers; here they are rounded to nearest even, as
torch does. Arithmetic in bfloat16 itself is not mended: kernels compute in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def mended() -> Iterator[None]:
    """The interpreter mended; put back afterwards, the language too."""
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    kept = {name: builder.__dict__[name] for name in ("cast_impl", "create_fp_to_fp")}
    builder.cast_impl = converting(kept["cast_impl"])
    builder.create_fp_to_fp = converting(kept["create_fp_to_fp"])
    try:
        with patched_once():
            yield
    finally:
        for name, function in kept.items():
            setattr(builder, name, function)


@contextmanager
def patched_once() -> Iterator[None]:
    """Device functions' language is patched at their first call, and put back at the end."""
    from triton.runtime import interpreter

    kept: Any = interpreter._patch_lang
    scopes: dict[Any, Any] = {}

    def patch_once(function: Any) -> Any:
        if function not in scopes:
            scopes[function] = kept(function)
        # Put back in reverse at the end, not by whoever called.
        return Nothing

    interpreter._patch_lang = patch_once
    try:
        yield
    finally:
        interpreter._patch_lang = kept
        for scope in reversed(scopes.values()):
            scope.restore()


class Nothing:
    """A scope in which nothing was patched."""

    @staticmethod
    def restore() -> None:
        """Nothing to put back."""


def converting(kept: Callable[..., Any]) -> Callable[..., Any]:
    """A conversion of the interpreter's builder that knows bfloat16."""
    import triton.language as tl
    from triton.runtime import interpreter

    def convert(self: Any, source: Any, wanted: Any, *more: Any) -> Any:
        given, target = source.dtype.scalar, wanted.scalar
        if given == tl.bfloat16 and target != tl.bfloat16:
            wide = interpreter.TensorHandle(widened(source.data), tl.float32)
            return wide if target == tl.float32 else kept(self, wide, wanted, *more)
        if target == tl.bfloat16 and given != tl.bfloat16:
            return interpreter.TensorHandle(rounded(source.data), tl.bfloat16)
        return kept(self, source, wanted, *more)

    return convert


def widened(words: np.ndarray) -> np.ndarray:
    """Float32 values of bfloat16 words."""
    return (np.asarray(words).astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """Words of the bfloat16 values nearest to some numbers."""
    wide = torch.from_numpy(np.array(values, dtype=np.float32))
    return wide.to(torch.bfloat16).view(torch.uint16).numpy()
