"""make demo: from this Python's standard library to a trained lane model, and to a measured comparison of schedules.

First the standard library is cleaned and tokenised, and the `demo` model learns it with schedule delayed:4 for a few
minutes; its bits per byte on held-out files are printed beside n-gram models. Then decode speed is measured on a larger
model with random weights (speed does not depend on what weights say), against standard tensor parallelism.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from baselines import baselines
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from laneformer import LaneConfig
from laneformer.random_weights import write_random_checkpoint

PROMPT = "def read_lines(path):\n    "
LATENCIES = "0,50,200,300,500"
SCHEDULES = "tensor-parallel,delayed:4,ladder,silent"
MODULES = {"infer": "laneformer.infer.cli", "train": "laneformer.train.cli", "laneformer": "laneformer.tools.cli"}


def run(program: str, *arguments: str) -> None:
    """Runs one of the commands, shown first as a user would type it; ends the demo if it fails."""
    print(f"\n$ {program} {shlex.join(arguments)}", flush=True)
    result = subprocess.run([sys.executable, "-m", MODULES[program], *arguments], check=False)
    if result.returncode:
        sys.exit(result.returncode)


def build_corpus(out: Path, valid: str) -> Path:
    """The standard library as tokenised shards."""
    run("laneformer", "data", "collect", str(out / "raw"), "--stdlib")
    run("laneformer", "data", "clean", str(out / "raw"), str(out / "corpus"))
    share = ("--valid-fraction", valid)
    run("laneformer", "data", "train-tokenizer", str(out / "corpus"), str(out / "tokenizer"), "--vocab-size", "2048",
        *share)  # fmt: skip
    run("laneformer", "data", "tokenize", str(out / "corpus"), str(out / "shards"), "--tokenizer",
        str(out / "tokenizer"), *share)  # fmt: skip
    return out / "shards"


def learn(out: Path, shards: Path, extra: list[str]) -> None:
    """Trains the demo model, draws its loss curve and prints its bits per byte beside the n-grams'."""
    folder = out / "train"
    run("train", "experiment=demo", f"data.folders=[{shards}]", f"out={folder}", "overwrite=true", *extra)
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(6.5, 4), layout="constrained", dpi=150)
    axes = figure.subplots()
    axes.plot([line["step"] for line in lines], [line["loss"] for line in lines], color="#0072b2")
    axes.set(xlabel="step", ylabel="loss, nats a token", title="demo model, schedule delayed:4")
    axes.grid(alpha=0.3)
    figure.savefig(out / "loss.png")
    bits = lines[-1]["valid_bits_per_byte"]["stdlib"]
    settings = OmegaConf.load(folder / "config.yaml")
    seen = lines[-1]["step"] * settings.data.batch * settings.data.sequence_length
    print(f"\nHeld-out files, bits a byte (the run saw {seen:,} tokens; the loss curve is in {out / 'loss.png'}):")
    print(f"  {bits:.3f}  lane model, delayed:4, {seen:,} tokens")
    rows = baselines(shards, seen, settings.data.valid_bytes)
    for row in rows:
        print(f"  {row['bits_per_byte']:.3f}  {row['model']}, {row['tokens']:,} tokens")
    result = {"bits_per_byte": bits, "tokens_seen": seen, "baselines": rows}
    (out / "learnt.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(out: Path, tokenizer: Path, preset: str, rounds: int) -> None:
    """Decode speed of a model with random weights, each schedule at several link latencies."""
    folder = out / f"{preset}-random"
    print(f"\nWriting a checkpoint with random weights in the published format: {folder}", flush=True)
    write_random_checkpoint(LaneConfig.preset(preset), folder)
    shutil.copyfile(tokenizer / "tokenizer.json", folder / "tokenizer.json")
    run("infer", "check", str(folder), "--ranks", "2", "--schedule", "delayed:4", "--runner", "compiled")
    size = ("--prompt-tokens", "128", "--new-tokens", "32", "--rounds", str(rounds))
    results = ("--json", str(out / "bench.json"), "--figure", str(out / "bench.png"))
    variants = ("--ranks", "2", "--schedules", SCHEDULES, "--link-latency", LATENCIES)
    run("infer", "bench", str(folder), *variants, *size, *results)
    print(f"\nThe numbers are in {out / 'bench.json'}, the figure in {out / 'bench.png'}.")
    print(conclusion(json.loads((out / "bench.json").read_text(encoding="utf-8"))))


def conclusion(result: dict) -> str:
    """What the numbers show and what they do not, in one line."""
    rows = {(row["schedule"], row["link_latency_us"]): row for row in result["results"]}
    slowest = max(latency for _, latency in rows)
    tp, late = rows["tensor-parallel", slowest], rows["delayed:4", slowest]
    gone = 1 - late["wait_us_per_token"] / tp["wait_us_per_token"]
    return (
        f"With a link of {slowest:g} us, delayed:4 decodes {late['ratio_to_tp']['median']:.2f} times as fast as "
        f"standard tensor parallelism, and {gone:.0%} of the time spent waiting for partials is gone. "
        "The weights are random: this shows speed only, nothing about the quality of either."
    )


def main() -> None:
    """The whole demo; everything it makes lies in --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for everything that is made")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of the comparison")
    parser.add_argument("--preset", default="small", help="size of the model whose speed is measured")
    parser.add_argument("--train", nargs="*", default=[], metavar="KEY=VALUE", help="changes of the training run")
    options = parser.parse_args()
    began, out = time.monotonic(), options.out
    shards = build_corpus(out, "0.05")
    learn(out, shards, options.train)
    run("infer", "generate", str(out / "train" / "checkpoint"), "--prompt", PROMPT, "--max-tokens", "64")
    measure(out, out / "tokenizer", options.preset, options.rounds)
    print(f"The demo took {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
