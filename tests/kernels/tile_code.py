"""Compiles stand-alone tiles in a process that does not interpret, and writes what the inspectors find as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

from laneformer.kernels import assembly
from laneformer.kernels.catalogue import ENTRIES


def findings(tile: str, target: str) -> dict[str, object]:
    """Spills, and how the final code of a tile loads."""
    compiled = ENTRIES[f"{tile} of the 2b on 1 of 8 devices"](target).compile(target)
    listing = compiled.listing()
    found = {"spills": compiled.resources.spills, "wide": len(assembly.wide_loads(listing))}
    return {**found, "bare": list(assembly.bare_releases(listing))}


if __name__ == "__main__":
    _, out, targets, *tiles = sys.argv
    found = {target: {tile: findings(tile, target) for tile in tiles} for target in targets.split(",")}
    Path(out).write_text(json.dumps(found))
