"""Writing files so that nothing half-written is ever found under the final name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torch import Tensor


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Has `write` fill a file beside `path`, syncs it to disk and renames it into place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(beside)
        with open(beside, "rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text atomically."""
    replace_file(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def write_beside(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a safetensors file atomically."""
    from safetensors.torch import save_file

    replace_file(path, lambda beside: save_file(tensors, beside, metadata={"format": "pt"}))
