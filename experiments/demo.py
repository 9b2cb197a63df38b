"""make demo: from nothing to a measured comparison of sync schedules, on real prompts, in a few minutes.

A `small` checkpoint with random weights is written in the published format, with a tokenizer trained on the Python
standard library; a prompt from there is continued; the logits are checked; then `infer bench` measures.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from laneformer import LaneConfig
from laneformer.random_weights import write_random_checkpoint

PROMPT_FILE = "textwrap.py"
PROMPT_CHARACTERS = 600
CORPUS_BYTES = 8_000_000
LATENCIES = "0,50,200,300,500"
SCHEDULES = "tensor-parallel,delayed:4,ladder,silent"


def standard_library() -> list[Path]:
    """Python sources of the standard library in use, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    return [path for path in sorted(root.rglob("*.py")) if not skipped & set(path.relative_to(root).parts)]


def train_tokenizer(sources: list[Path], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of `vocab_size` entries from Python sources."""
    texts, total = [], 0
    for path in sources:
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        total += len(texts[-1])
        if total > CORPUS_BYTES:
            break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def infer(*arguments: str) -> None:
    """Runs the `infer` command, shown first as a user would type it; ends the demo if it fails."""
    print(f"\n$ infer {shlex.join(arguments)}", flush=True)
    result = subprocess.run([sys.executable, "-m", "laneformer.infer.cli", *arguments], check=False)
    if result.returncode:
        sys.exit(result.returncode)


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
    parser.add_argument("--preset", default="small", help="size of the model")
    options = parser.parse_args()
    began, out = time.monotonic(), options.out
    folder = out / f"{options.preset}-random"
    config = LaneConfig.preset(options.preset)
    sources = standard_library()
    print(f"Writing a checkpoint with random weights in the published format: {folder}", flush=True)
    write_random_checkpoint(config, folder)
    print(f"Training a tokenizer of {config.vocab_size} entries on the standard library", flush=True)
    train_tokenizer(sources, config.vocab_size).save(str(folder / "tokenizer.json"))
    source = next(path for path in sources if path.name == PROMPT_FILE)
    prompt = out / "prompt.txt"
    prompt.write_text(source.read_text(encoding="utf-8")[:PROMPT_CHARACTERS], encoding="utf-8")
    shared = ("--ranks", "2", "--schedule", "delayed:4", "--runner", "compiled")
    infer("generate", str(folder), "--prompt-file", str(prompt), "--max-tokens", "24", *shared)
    infer("check", str(folder), *shared)
    prompt_options = ("--prompt-file", str(prompt), "--prompt-tokens", "128", "--new-tokens", "32")
    results = ("--json", str(out / "bench.json"), "--figure", str(out / "bench.png"))
    variants = ("--ranks", "2", "--schedules", SCHEDULES, "--link-latency", LATENCIES)
    infer("bench", str(folder), *variants, *prompt_options, "--rounds", str(options.rounds), *results)
    print(f"\nThe numbers are in {out / 'bench.json'}, the figure in {out / 'bench.png'}.")
    print(conclusion(json.loads((out / "bench.json").read_text(encoding="utf-8"))))
    print(f"The demo took {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
