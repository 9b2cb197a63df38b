"""Puts the steps' results into one document, with the device, versions and which steps failed, and prints a table."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from laneformer.terminal import write_json


def installed(name: str) -> str | None:
    """An installed distribution's version."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def device() -> dict[str, Any]:
    """The GPU, as torch and the driver name it."""
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"name": properties.name, "programs": properties.multi_processor_count}
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        found["driver"] = None
    return found


def rows(found: Any, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Every row of every table of a document, with the table's name."""
    if isinstance(found, dict):
        return [row for key, value in found.items() for row in rows(value, f"{path} {key}".strip())]
    if isinstance(found, list) and found and isinstance(found[0], dict):
        return [(path, row) for row in found]
    return []


def line(row: dict[str, Any]) -> str:
    """A row in a line."""
    shown = []
    for key, value in row.items():
        if isinstance(value, dict):
            value = " ".join(f"{name} {number:.4g}" for name, number in value.items())
        shown.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
    return ", ".join(shown)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", type=Path, help="folder of the steps' JSON files and of steps.txt (name, exit code)")
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--rehearsal", action="store_true")
    options = parser.parse_args()
    codes = dict(line.split() for line in (options.parts / "steps.txt").read_text().splitlines())
    parts = {path.stem: json.loads(path.read_text()) for path in sorted(options.parts.glob("*.json"))}
    document = {
        "commit": options.commit, "rehearsal": options.rehearsal, "device": device(),
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in ("laneformer", "torch", "triton", "numpy")},
        "failed": [name for name, code in codes.items() if code != "0"], "exit_codes": codes, "steps": parts,
    }  # fmt: skip
    write_json(document, options.out)
    for table, row in rows(parts):
        print(f"{table}: {line(row)}")
    print("failed steps:", ", ".join(document["failed"]) or "none")


if __name__ == "__main__":
    main()
