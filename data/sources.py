"""Which files make up a source, and under which licence? The standard library, installed distributions, folders."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from laneformer.data.licences import UNKNOWN, distribution_licence, spdx_id

TEST_FOLDERS = {"test", "tests", "testing", "idle_test"}
# Folders that hold no source of their own, or somebody else's under another licence.
SKIPPED = {"__pycache__", "site-packages", "dist-packages", "node_modules", "build", "dist"}
VENDORED = {"_vendor", "_vendored", "vendor", "vendored", "third_party", "thirdparty", "extern", "externals"}
TEXT_SUFFIXES = {".md", ".rst", ".txt"}
MAX_FILE_BYTES = 5_000_000


class CollectError(ValueError):
    """A source that cannot be collected."""


@dataclass(frozen=True)
class SourceFile:
    """One file to collect: where it is, and what the document's metadata says of it. `size` is in bytes."""

    file: str
    path: str
    license: str
    origin: str
    size: int


def standard_library() -> list[SourceFile]:
    """The modules of the interpreter in use without their tests, under the PSF licence."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # The build's own settings name folders of the machine it was built on.
    names = (p for p in walk(root, {".py"}, TEST_FOLDERS | SKIPPED) if not p.name.startswith("_sysconfigdata"))
    return _files(root, names, "PSF-2.0", f"cpython {platform.python_version()}")


def installed_distributions() -> list[SourceFile]:
    """The Python files of every installed distribution, without tests and vendored copies, in the order of names."""
    found = {}
    for distribution in importlib.metadata.distributions():
        found.setdefault(distribution.name or "", distribution)
    files = [file for name in sorted(found, key=str.lower) for file in _distribution_files(found[name])]
    # Two distributions may list one file.
    return list({file.file: file for file in reversed(files)}.values())[::-1]


def _distribution_files(distribution: importlib.metadata.Distribution) -> Iterator[SourceFile]:
    origin = f"{distribution.name} {distribution.version}"
    licence = distribution_licence(distribution.metadata)  # pyright: ignore[reportArgumentType]
    unwanted = TEST_FOLDERS | SKIPPED | VENDORED
    for path in sorted(distribution.files or (), key=str):
        if path.suffix != ".py" or unwanted.intersection(path.parts[:-1]) or ".." in path.parts:
            continue
        file = Path(str(distribution.locate_file(path)))
        if file.is_file():
            yield SourceFile(str(file), str(PurePosixPath(path)), licence, origin, file.stat().st_size)


def folder(root: Path, licence: str | None, suffixes: Iterable[str]) -> list[SourceFile]:
    """The files of a folder that have one of the suffixes; raises CollectError where there is none."""
    if not root.is_dir():
        raise CollectError(f"{root} is no folder; give the folder that holds the files to collect")
    wanted = {suffix if suffix.startswith(".") else f".{suffix}" for suffix in suffixes}
    files = _files(root, walk(root, wanted, SKIPPED), spdx_id(licence or ""), root.resolve().name)
    if not files:
        raise CollectError(f"{root} holds no file ending in {', '.join(sorted(wanted))}; choose others with --suffix")
    return files


def walk(root: Path, suffixes: set[str], skipped: set[str]) -> Iterator[Path]:
    """Files below a folder in a stable order, hidden ones and links left out."""
    for place, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith("."))
        for name in sorted(names):
            path = Path(place, name)
            if path.suffix in suffixes and not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def _files(root: Path, paths: Iterable[Path], licence: str, origin: str) -> list[SourceFile]:
    return [
        SourceFile(str(p.absolute()), p.relative_to(root).as_posix(), licence, origin, p.stat().st_size) for p in paths
    ]


def file_list(files: list[SourceFile]) -> str:
    """The list as JSON lines, which the tasks of a collection read."""
    return "".join(json.dumps(asdict(file)) + "\n" for file in files)


def check_licence(licence: str | None) -> str | None:
    """A licence a user names, as SPDX id; raises CollectError for one that is not recognised."""
    if licence is not None and UNKNOWN in spdx_id(licence):
        raise CollectError(f"licence {licence!r} is not recognised; give an SPDX id such as MIT or Apache-2.0")
    return None if licence is None else spdx_id(licence)
