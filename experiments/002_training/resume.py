"""Is a run that was killed the run that was not, and is a run on more ranks the run on one?

Kills `train` with SIGKILL at random points three times and compares the last weights bit by bit; then repeats a run on
1, 2 and 4 ranks in every layout and compares each step's loss. Bits are compared on this CPU with one thread.

Example: python experiments/002_training/resume.py --out out/resume --json experiments/002_training/resume.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from laneformer.files import write_text

STEPS = 30
LAYOUTS = [(1, 1, "ddp"), (2, 1, "ddp"), (2, 1, "fsdp"), (2, 2, "ddp"), (4, 2, "ddp"), (4, 2, "fsdp"), (4, 4, "ddp")]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def arguments(corpus: Path, out: Path, *more: str) -> list[str]:
    """A run of the demo model small enough for seconds."""
    return ["experiment=demo", f"corpus={corpus}", f"out={out}", f"steps={STEPS}", "data.batch=8", "data.micro_batch=1",
            "data.sequence_length=64", "model.num_hidden_layers=3", "data.valid_bytes=5000", "log.every=1",
            "checkpoint.every=1", "resume=true", *more]  # fmt: skip


def finish(corpus: Path, out: Path, ranks: int = 1, *more: str) -> None:
    """Runs to the end, on ranks of torchrun if there are several."""
    program = [sys.executable, "-m", "laneformer.train.cli"]
    if ranks > 1:
        program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                   "-m", "laneformer.train.cli"]  # fmt: skip
    subprocess.run([*program, *arguments(corpus, out, *more)], check=True, env=ENVIRONMENT, capture_output=True)


def steps_logged(out: Path) -> int:
    """How many lines the log has."""
    log = out / "log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def kill_after(corpus: Path, out: Path, steps: int, delay: float) -> int:
    """Starts the run, waits for a step and a moment more, and kills it; the step it had logged."""
    command = [sys.executable, "-m", "laneformer.train.cli", *arguments(corpus, out)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    while steps_logged(out) < steps and process.poll() is None:
        time.sleep(0.005)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return steps_logged(out)


def weights_sha(out: Path) -> str:
    """The hash of the last weights."""
    return hashlib.sha256((out / "checkpoint" / "model.safetensors").read_bytes()).hexdigest()


def killed(corpus: Path, out: Path, seed: int) -> dict:
    """Hashes of a run that was left alone and of one that was killed three times."""
    finish(corpus, out / "whole")
    draw = random.Random(seed)
    points = sorted(draw.sample(range(2, STEPS - 4), 3))
    logged = [kill_after(corpus, out / "killed", point, draw.uniform(0, 0.2)) for point in points]
    finish(corpus, out / "killed")
    hashes = {name: weights_sha(out / name) for name in ("whole", "killed")}
    return {"killed_at_steps": logged, **hashes, "bit_equal": hashes["whole"] == hashes["killed"]}


def losses(out: Path) -> list[float]:
    """Each step's loss."""
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


def ranks_table(corpus: Path, out: Path) -> list[dict]:
    """For each layout the largest relative difference of a step's loss from one process, in two precisions."""
    rows = []
    for precision in ("float32", "float64"):
        one: list[float] = []
        for ranks, lanes, shard in LAYOUTS:
            folder = out / f"{precision}-{ranks}-{lanes}-{shard}"
            finish(corpus, folder, ranks, f"precision={precision}", f"parallel.lanes={lanes}",
                   f"parallel.shard={shard}", "steps=8")  # fmt: skip
            found = losses(folder)
            one = one or found
            apart = max(abs(a - b) / b for a, b in zip(found, one, strict=True))
            rows.append({"precision": precision, "ranks": ranks, "lane_ranks": lanes, "shard": shard,
                         "last_loss": found[-1], "largest_relative_difference": apart})  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("laneformer"), help="text to learn")
    parser.add_argument("--out", type=Path, default=Path("out/resume"), help="folder for the runs, emptied first")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments of the kills")
    parser.add_argument("--json", type=Path, help="where the numbers go")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    result = {"seed": options.seed, "kill": killed(options.corpus, options.out, options.seed)}
    print(result, flush=True)
    result["ranks"] = ranks_table(options.corpus, options.out)
    if options.json:
        write_text(options.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
