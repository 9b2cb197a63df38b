"""What a run was made with: versions of packages, the machine, and the commit where the code is a git checkout."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import laneformer

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "hydra-core")


def versions() -> dict[str, str | None]:
    """Names and versions; `commit` is null outside a checkout, and ends in -dirty where files were changed."""
    found: dict[str, str | None] = {"laneformer": laneformer.__version__, "commit": commit()}
    found |= {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """The commit of the checkout this code runs from."""
    folder = Path(laneformer.__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
