"""Plants each bug of tests/kernels/planted_bugs.py in a copy of the kernel and counts the seeds until it shows.

Example: python experiments/006_planted_bugs/run.py --json experiments/006_planted_bugs/results.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

# Chosen when triton is first imported.
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "kernels"))

from laneformer.files import write_text


def main() -> None:
    """The command."""
    from planted_bugs import BUGS, RARE, seeds_until_caught

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the table goes")
    options = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)
    rows = []
    for bug in (*BUGS, RARE):
        found = {memory: seeds_until_caught(bug, memory) for memory in ("weak", "sequential")}
        rows.append({"bug": bug.name, "seeds_tried": bug.seeds} | {
            memory: None if caught is None else {"seeds": caught[0], "how": caught[1]}
            for memory, caught in found.items()
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        write_text(options.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
