"""Compiles the whole decode in a process that does not interpret, and says what the inspectors find; JSON to a file."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

from laneformer.kernels import assembly
from laneformer.kernels.catalogue import ENTRIES, decode_of
from laneformer.kernels.plan import DeviceShape

NAME = "decode of the 2b on 1 of 8 devices, 8 warps"
VOLATILE = re.compile(r"isVolatile = true\}.*?tensor<([\dx]+)x!tt\.ptr<i32>, (#\w+)>")
LAYOUT = re.compile(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>", re.M)
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


def polls() -> list[dict[str, object]]:
    """Volatile loads of decodes with small and large tiles: elements, and how many threads read each of them."""
    found: list[dict[str, object]] = []
    for preset, ranks in (("demo", 1), ("demo", 4)):
        text = decode_of("sm_90", preset, ranks, DeviceShape(132), 256).compile("sm_90").texts["ttgir"]
        layouts = {name: layout_size(body) for name, body in LAYOUT.findall(text)}
        for shape, layout in VOLATILE.findall(text):
            sizes = [int(size) for size in shape.split("x")]
            # A layout that is larger than the tensor in a dimension reads it several times there.
            copies = math.prod(max(1, whole // size) for whole, size in zip(layouts[layout], sizes, strict=True))
            found.append({"decode": f"{preset}, {ranks} ranks", "shape": sizes, "readers": copies})
    return found


def layout_size(body: str) -> list[int]:
    """Elements of each dimension that a blocked layout covers at once."""
    fields = {name: [int(n) for n in values.split(",")] for name, values in re.findall(r"(\w+) = \[([\d, ]+)\]", body)}
    parts = [fields[name] for name in ("sizePerThread", "threadsPerWarp", "warpsPerCTA")]
    return [math.prod(sizes) for sizes in zip(*parts, strict=True)]


if __name__ == "__main__":
    found: dict[str, object] = {target: findings(target) for target in sys.argv[2:]}
    Path(sys.argv[1]).write_text(json.dumps(found | {"polls": polls()}))
