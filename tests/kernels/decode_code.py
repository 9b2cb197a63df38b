"""Compiles the whole decode in a process that does not interpret, and says what the inspectors find; JSON to a file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

from laneformer.kernels import assembly
from laneformer.kernels.catalogue import ENTRIES

NAME = "decode of the 2b on 1 of 8 devices, 8 warps"
KERNELS = Path(__file__).parents[2] / "kernels"


def findings(target: str) -> dict[str, object]:
    """What each inspector says of the final code of a target."""
    compiled = ENTRIES[NAME](target).compile(target)
    listing = compiled.listing("gcn" if target.startswith("gfx") else "sass")
    lost = [line for file in ("sync", "decode") for line in assembly.stale_polls(listing, KERNELS / f"{file}.py")]
    return {
        "bare": list(assembly.bare_releases(listing)),
        "undrained": list(assembly.undrained_releases(listing)),
        "spins": len(assembly.spins(listing)),
        "lost": lost,
        "system_writes": len(assembly.system_writes(listing)),
        "ahead": [overlap.ahead for overlap in assembly.overlaps(listing)],
        "wide": len(assembly.wide_loads(listing)),
        "spills": compiled.resources.spills,
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps({target: findings(target) for target in sys.argv[2:]}))
