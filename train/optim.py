"""The optimizers with their groups of parameters, and the learning rate of every step."""

from __future__ import annotations

import math

import torch
from torch import nn

from laneformer.train.muon import Muon
from laneformer.train.settings import OptimSettings

MATRICES = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")


def decays(name: str) -> bool:
    """Whether weight decay holds for a parameter: for every matrix but the embedding, not for norms."""
    return "norm" not in name and "tok_embeddings" not in name


def orthogonal(name: str) -> bool:
    """Whether Muon may move a parameter: the lanes' matrices inside the layers, neither embedding, head nor norms."""
    return name.split(".")[-2] in MATRICES


def optimizers(model: nn.Module, settings: OptimSettings) -> list[torch.optim.Optimizer]:
    """AdamW over the model, or Muon over its layers' matrices and AdamW over the rest."""
    named = list(model.named_parameters())
    muon = [p for name, p in named if settings.name == "muon" and orthogonal(name)]
    rest = [(name, p) for name, p in named if settings.name != "muon" or not orthogonal(name)]
    found: list[torch.optim.Optimizer] = [adamw(rest, settings)]
    if muon:
        found.append(Muon(muon, settings.muon_lr or settings.lr, settings.muon_momentum, settings.weight_decay))
    return found


def adamw(named: list[tuple[str, nn.Parameter]], settings: OptimSettings) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101): weight decay on matrices, none on norms and the embedding."""
    groups = [
        {"params": [p for name, p in named if decays(name)], "weight_decay": settings.weight_decay},
        {"params": [p for name, p in named if not decays(name)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=True)


def learning_rate(step: int, steps: int, settings: OptimSettings) -> float:
    """The share of the highest rate at step 0..steps-1: a linear rise, then half a cosine, or a plateau and a fall.

    The first step's rate is above 0, the last step's is `final`.
    """
    warmup = round(settings.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    falling = steps - warmup if settings.lr_shape == "cosine" else round(settings.decay * steps)
    # How far the fall has come: 0 before it, 1 at the last step.
    done = max(0.0, (step + 1 - (steps - falling)) / falling) if falling else 0.0
    fall = (1 - math.cos(math.pi * done)) / 2 if settings.lr_shape == "cosine" else done
    return 1 - (1 - settings.final) * fall


def set_learning_rate(found: list[torch.optim.Optimizer], settings: OptimSettings, share: float) -> None:
    """Sets the rate of every group to its share of the highest."""
    for optimizer in found:
        highest = (settings.muon_lr or settings.lr) if isinstance(optimizer, Muon) else settings.lr
        for group in optimizer.param_groups:
            group["lr"] = highest * share
