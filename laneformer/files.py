"""Writing files so that nothing half-written is ever found under the final name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

Writer = Callable[[Path], object]


def replace_files(writers: Mapping[Path, Writer]) -> None:
    """Has each writer fill a file beside its path, syncs them all to disk, then renames them into place in order.

    When a writer fails, every path holds what it held before and nothing else is left.
    """
    umask = os.umask(0)
    os.umask(umask)
    beside = {path: path.with_name(f".{path.name}.{os.getpid()}.partial") for path in writers}
    try:
        for path, write in writers.items():
            write(beside[path])
            # Some writers create files for their owner alone; a checkpoint is as readable as any other file.
            beside[path].chmod(0o666 & ~umask)
            with open(beside[path], "rb+") as handle:
                os.fsync(handle.fileno())
        for path in writers:
            os.replace(beside[path], path)
    finally:
        for left in beside.values():
            left.unlink(missing_ok=True)


def text_writer(text: str) -> Writer:
    """Writes UTF-8 text to the path it is given."""
    return lambda path: path.write_text(text, encoding="utf-8")


def tensors_writer(tensors: dict[str, Tensor]) -> Writer:
    """Writes a safetensors file to the path it is given."""
    from safetensors.torch import save_file

    return lambda path: save_file(tensors, path, metadata={"format": "pt"})


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text atomically."""
    replace_files({path: text_writer(text)})
