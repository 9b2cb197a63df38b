"""Checkpoints with random weights in the published layout: for measuring speed, and for trying things out."""

from __future__ import annotations

import os

import torch

from .config import LaneConfig
from .model import Laneformer


def write_random_checkpoint(config: LaneConfig, folder: str | os.PathLike, seed: int = 0) -> None:
    """Writes a checkpoint of `config`, initialised as the published code does, in its type; same seed, same bytes."""
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = Laneformer(config, dtype=getattr(torch, config.torch_dtype))
    finally:
        torch.random.set_rng_state(state)
    model.save_pretrained(folder)
