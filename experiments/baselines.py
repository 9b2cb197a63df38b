"""Bits per byte of unigram and 5-gram models (interpolated Kneser-Ney) on the held-out part of a folder of shards.

The n-grams are fitted to as many tokens as a training run has seen, in whole documents drawn with a seed, and to all;
they are measured on the very documents that a training run with the same data.valid_bytes measures its model on.

Example: python experiments/baselines.py out/demo/shards --tokens 819200 --json out/demo/baselines.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from laneformer.data.shards import Shard, open_shard, read_manifest
from laneformer.evaluation.ngram import NgramModel
from laneformer.files import write_text
from laneformer.train.folders import read_folders
from laneformer.train.validation import held_out

ORDERS = {"unigram": 1, "5-gram": 5}


def some_documents(shards: list[Shard], limit: float, seed: int = 0) -> np.ndarray:
    """The end token and whole documents, in random order, until there are `limit` tokens."""
    documents = [(shard, start, end) for shard in shards
                 for start, end in zip([1, *shard.documents[:-1, 0]], shard.documents[:, 0], strict=True)]  # fmt: skip
    parts, count = [shards[0].tokens[:1]], 0
    for index in np.random.default_rng(seed).permutation(len(documents)):
        if count >= limit:
            break
        shard, start, end = documents[index]
        parts.append(shard.tokens[start:end])
        count += end - start
    return np.concatenate(parts)


def baselines(folder: Path, seen: int, valid_bytes: int) -> list[dict]:
    """A row for each order and each amount of text; `valid_bytes` limits the held-out text as in a training run."""
    manifest = read_manifest(folder)
    opened = [open_shard(folder, info, manifest, verify=False) for info in manifest.shards]
    if any(shard.learn is not None for shard in opened):
        raise SystemExit(f"{folder} marks what is learnt, as conversations do; n-grams are measured on whole texts")
    train = [shard for shard in opened if shard.info.split == "train"]
    found = held_out(read_folders([folder]), valid_bytes, verify=False)
    valid = [part for parts in found.values() for part in parts]
    num_bytes = sum(part.num_bytes for part in valid)
    rows = []
    for limit in (seen, float("inf")):
        tokens = some_documents(train, limit)
        for name, order in ORDERS.items():
            model = NgramModel(order, manifest.vocab_size, manifest.end_id)
            model.fit(tokens)
            nats = sum(model.nats(part.tokens) for part in valid)
            rows.append({"model": name, "tokens": len(tokens), "bits_per_byte": nats / np.log(2) / num_bytes,
                         "measured_bytes": num_bytes})  # fmt: skip
    return rows


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of tokenised shards")
    parser.add_argument("--tokens", type=int, required=True, help="tokens that the run to compare with has seen")
    parser.add_argument("--valid-bytes", type=int, default=1_000_000,
                        help="the run's data.valid_bytes: held-out text measured at most, of each source")  # fmt: skip
    parser.add_argument("--json", type=Path, help="where the numbers go")
    options = parser.parse_args()
    rows = baselines(options.folder, options.tokens, options.valid_bytes)
    print(f"measured on {rows[0]['measured_bytes']:,} bytes")
    for row in rows:
        print(f"{row['model']:>8} fitted to {row['tokens']:>9,} tokens: {row['bits_per_byte']:.3f} bits a byte")
    if options.json:
        write_text(options.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
