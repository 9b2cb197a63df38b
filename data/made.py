"""Folders of shards that are made as a whole: found again, replaced, and described by their manifest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from laneformer.data.shards import Manifest, ShardInfo, read_manifest, token_dtype
from laneformer.data.specials import Specials, SpecialTokens
from laneformer.data.tokenizer import TOKENIZER, tokenizer_file, tokenizer_sha256, vocab_size
from laneformer.files import write_text

# What a folder was made from: settings, and hashes of what was read.
RECORD = "made-from.json"


def made_from(out: Path, inputs: Mapping[str, Any]) -> bool:
    """Whether a folder is complete and was made from these inputs."""
    try:
        return bool(read_manifest(out)) and json.loads((out / RECORD).read_text(encoding="utf-8")) == inputs
    except (OSError, ValueError):
        return False


def refuse_foreign(out: Path, tokenizer: Path | None = None) -> None:
    """Raises ValueError for a folder whose replacement would destroy what was not made here, or the tokenizer."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give a folder for the shards")
    if out.is_dir() and any(out.iterdir()) and not (out / RECORD).is_file():
        raise ValueError(f"{out} holds files that were not made here; give an empty folder or a new one")
    if tokenizer and tokenizer_file(tokenizer).resolve() == (out / TOKENIZER).resolve():
        raise ValueError(f"tokenizer {tokenizer} lies in {out}, which is to be replaced; copy it elsewhere first")


def make_folder(out: Path, inputs: Mapping[str, Any], make: Callable[[Path], Manifest]) -> Manifest:
    """Has `make` fill a folder beside `out`, records its inputs, and puts it in the place of `out`."""
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        beside.mkdir()
        manifest = make(beside)
        write_text(beside / RECORD, json.dumps(inputs, indent=1) + "\n")
        _replace_folder(beside, out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return manifest


def manifest_of(tokenizer: Tokenizer, names: SpecialTokens, shards: Sequence[ShardInfo]) -> Manifest:
    """The manifest of shards that one tokenizer made; its special tokens are listed by role."""
    specials = Specials.of(tokenizer, names)
    size = vocab_size(tokenizer)
    return Manifest(
        dtype=str(token_dtype(size)),
        vocab_size=size,
        end_token=names.end,
        end_id=specials.end,
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        special_tokens=asdict(specials),
        shards=tuple(shards),
    )


def _replace_folder(made: Path, out: Path) -> None:
    """Puts a finished folder in the place of another; a stop in between leaves one of the two whole."""
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    if out.exists():
        os.replace(out, old)
    try:
        os.replace(made, out)
    except OSError:
        if old.exists():
            os.replace(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)
