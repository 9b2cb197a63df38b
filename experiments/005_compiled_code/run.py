"""Compiles every kernel of the catalogue for GPUs that are not here: writes resources.json, or checks against it."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path

from laneformer.files import write_text

TABLE = Path(__file__).with_name("resources.json")
TARGETS = ("sm_90", "sm_100", "gfx942")


def main(check: bool) -> int:
    """Prints what each kernel takes; 1 if `check` and one takes more than the table says."""
    # Decorated kernels are fixed to be interpreted by this variable, so it goes before they are imported.
    os.environ.pop("TRITON_INTERPRET", None)
    from laneformer.kernels.catalogue import ENTRIES
    from laneformer.kernels.compiled import Resources, grown, table_of

    found: dict[str, dict[str, Resources]] = {}
    for name, entry in ENTRIES.items():
        for target in TARGETS:
            resources = entry(target).compile(target).resources
            found.setdefault(name, {})[target] = resources
            print(f"{target:8} {name}: " + ", ".join(f"{key} {value}" for key, value in asdict(resources).items()))
    if not check:
        write_text(TABLE, table_of(found))
        return 0
    more = grown(found, TABLE.read_text(encoding="utf-8"))
    print("\n".join(more) or "nothing has grown")
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
