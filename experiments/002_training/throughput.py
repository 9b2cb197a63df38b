"""Training tokens/s of the lane trainer against a plain loop around transformers' Llama and AdamW, of equal size.

Interleaved rounds in one process; both read the same batches, in float32, without compilation. A document mask is off,
as the plain loop has none.

Example: python experiments/002_training/throughput.py out/shards --json experiments/002_training/throughput.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

# Spinning threads slow each other down on shared cores; read when torch starts.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from laneformer.files import write_text
from laneformer.train.parallel import Layout
from laneformer.train.prepare import prepare
from laneformer.train.settings_build import build_settings

SIZES = {
    "1.5 M": {"preset": "demo"},
    "7 M": {"preset": "demo", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8},
}
BATCH, LENGTH = 8, 256


def lane_step(shards: Path, model: dict, schedule: str, out: Path) -> tuple[Callable[[], object], object]:
    """A function that takes one step of the lane trainer, and the trainer."""
    data = {"folders": [str(shards)], "batch": BATCH, "sequence_length": LENGTH, "document_mask": False}
    values = {"out": str(out), "steps": 1000, "schedule": schedule, "model": dict(model), "data": data}
    trainer = prepare(build_settings(values, "throughput"), Console(quiet=True), Layout()).trainer
    return trainer.step, trainer


def llama_step(trainer) -> Callable[[], object]:
    """A function that takes one step of the plain loop on a Llama of the trainer's sizes."""
    config = trainer.model.config
    llama = LlamaForCausalLM(LlamaConfig(
        hidden_size=config.hidden_size, num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads, num_key_value_heads=config.kv_heads,
        intermediate_size=config.intermediate_size, vocab_size=config.vocab_size, attn_implementation="sdpa",
        max_position_embeddings=config.max_position_embeddings, tie_word_embeddings=config.tie_word_embeddings,
    ))  # fmt: skip
    assert sum(p.numel() for p in llama.parameters()) == sum(p.numel() for p in trainer.model.parameters())
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-3, fused=True)
    position = iter(range(0, 10**9, BATCH))

    def step() -> None:
        batch = trainer.loader.batch(next(position), BATCH)
        logits = llama(batch.inputs_BS).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch.targets_BS.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(llama.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(shards: Path, model: dict, rounds: int, out: Path) -> list[dict]:
    """Median tokens/s of each variant, and of its ratios to the plain loop, round by round."""
    steps: dict[str, Callable[[], object]] = {}
    for schedule in ("tensor-parallel", "delayed:4"):
        steps[schedule], trainer = lane_step(shards, model, schedule, out)
    steps["transformers Llama"] = llama_step(trainer)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if turn >= 2:
                times[name].append(time.perf_counter() - began)
    rows = []
    for name, taken in times.items():
        ratios = [b / a for a, b in zip(taken, times["transformers Llama"], strict=True)]
        cuts = statistics.quantiles(ratios, n=10)
        rows.append({"variant": name, "tokens_per_s": BATCH * LENGTH / statistics.median(taken),
                     "ratio": statistics.median(ratios), "ratio_p10": cuts[0], "ratio_p90": cuts[-1]})  # fmt: skip
    return rows


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path, help="folder of tokenised shards")
    parser.add_argument("--rounds", type=int, default=25, help="interleaved steps of each variant")
    parser.add_argument("--json", type=Path, help="where the numbers go")
    options = parser.parse_args()
    result = {}
    for size, model in SIZES.items():
        result[size] = compare(options.shards, model, options.rounds, Path("out/throughput"))
        for row in result[size]:
            print(f"{size}  {row['variant']:<20} {row['tokens_per_s']:>8.0f} tokens/s  {row['ratio']:.2f} "
                  f"({row['ratio_p10']:.2f} to {row['ratio_p90']:.2f})", flush=True)  # fmt: skip
    if options.json:
        write_text(options.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
