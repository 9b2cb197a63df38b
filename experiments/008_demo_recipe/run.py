"""What makes a few minutes' training of the demo model learn more? Each row is one run of as many tokens.

The first row is what the demo was before; a row's changes are to that one. Rows that --json holds already are kept, so
that an interrupted table goes on. A run takes about five minutes on one core.

Example: python experiments/008_demo_recipe/run.py out/shards out/recipe --only zero "m 5e-3, lr 4e-2" --json rows.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from laneformer.files import write_text

BEFORE = {"steps": "450", "data.batch": "8", "data.sequence_length": "256", "zero_outputs": "false",
          "model.head_norms": "false", "optim.lr": "6e-3", "optim.muon_lr": "2e-2"}  # fmt: skip
NORMS = {"model.head_norms": "true"}
ZERO = {**NORMS, "zero_outputs": "true"}


def rates(lr: str, muon: str) -> dict[str, str]:
    """Zero outputs with these rates of AdamW and of Muon."""
    return {**ZERO, "optim.lr": lr, "optim.muon_lr": muon}


CHOSEN = rates("4e-2", "5e-3")
ROWS: dict[str, dict[str, str]] = {
    "before": {},
    "sequences of 512, batch of 4": {"data.sequence_length": "512", "data.batch": "4"},
    "norms": NORMS,
    "norms, tied": {**NORMS, "model.tie_word_embeddings": "true"},
    "norms, lr 3e-3, m 1e-2": {**NORMS, "optim.lr": "3e-3", "optim.muon_lr": "1e-2"},
    "norms, lr 1.2e-2": {**NORMS, "optim.lr": "1.2e-2"},
    "zero": ZERO,
    "zero, two lanes": {**ZERO, "model.num_lanes": "2"},
    "zero, no weight decay": {**ZERO, "optim.weight_decay": "0"},
    "m 4e-2, lr 6e-3": rates("6e-3", "4e-2"),
    "m 2e-2, lr 1.2e-2": rates("1.2e-2", "2e-2"),
    "the same, weight decay 0.3": {**rates("1.2e-2", "2e-2"), "optim.weight_decay": "0.3"},
    "m 2e-2, lr 2e-2": rates("2e-2", "2e-2"),
    "m 1.2e-2, lr 1.2e-2": rates("1.2e-2", "1.2e-2"),
    "m 1.2e-2, lr 2.4e-2": rates("2.4e-2", "1.2e-2"),
    "m 7e-3, lr 1.2e-2": rates("1.2e-2", "7e-3"),
    "m 7e-3, lr 2.4e-2": rates("2.4e-2", "7e-3"),
    "m 5e-3, lr 4e-2": CHOSEN,
    "m 5e-3, lr 8e-2": rates("8e-2", "5e-3"),
    "m 3e-3, lr 4e-2": rates("4e-2", "3e-3"),
    "m 5e-3, lr 2e-2, batch of 4": {**rates("2e-2", "5e-3"), "data.batch": "4", "steps": "900"},
    "m 1.2e-2, lr 1.6e-2, width 192": {
        **rates("1.6e-2", "1.2e-2"), "model.hidden_size": "192", "model.intermediate_size": "480"
    },
    "chosen, seed 1": {**CHOSEN, "seed": "1"},
    "chosen, dense": {**CHOSEN, "model.num_lanes": "1", "schedule": "tensor-parallel"},
    "chosen without zero outputs": {**CHOSEN, "zero_outputs": "false"},
    "chosen without head norms": {**CHOSEN, "model.head_norms": "false"},
}  # fmt: skip


def measured(name: str, shards: Path, out: Path) -> dict[str, object]:
    """Trains one row from its start; its changes, tokens and bits a byte."""
    settings = BEFORE | ROWS[name]
    folder = out / "".join(c if c.isalnum() else "-" for c in name)
    subprocess.run(
        [sys.executable, "-m", "laneformer.train.cli", "experiment=demo", f"data.folders=[{shards}]", f"out={folder}",
         "threads=1", "checkpoint.every=0", "overwrite=true", *(f"{key}={value}" for key, value in settings.items())],
        check=True,
    )  # fmt: skip
    return result_of(name, folder)


def result_of(name: str, folder: Path) -> dict[str, object]:
    """What a finished run's log says."""
    line = json.loads((folder / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    settings = BEFORE | ROWS[name]
    if line["step"] != int(settings["steps"]):
        raise SystemExit(f"{folder} stopped at step {line['step']} of {settings['steps']}; run it again")
    tokens = line["step"] * int(settings["data.batch"]) * int(settings["data.sequence_length"])
    bits = line["valid_bits_per_byte"]["stdlib"]
    return {"run": name, "changes": ROWS[name], "tokens": tokens, "bits_per_byte": bits}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path, help="the demo's folder of tokenised shards")
    parser.add_argument("out", type=Path, help="folder for the runs")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help="these rows")
    parser.add_argument("--json", type=Path, required=True, help="the table, which is added to")
    options = parser.parse_args()
    rows = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else []
    for name in options.only:
        if all(row["run"] != name for row in rows):
            rows.append(measured(name, options.shards, options.out))
            write_text(options.json, json.dumps(rows, indent=1) + "\n")
        row = next(row for row in rows if row["run"] == name)
        print(f"{row['bits_per_byte']:.3f}  {name}, {row['tokens']:,} tokens", flush=True)


if __name__ == "__main__":
    main()
