"""AdamW with its two groups of parameters, and the learning rate of every step."""

from __future__ import annotations

import math

import torch
from torch import nn

from laneformer.train.settings import OptimSettings


def decays(name: str) -> bool:
    """Whether weight decay holds for a parameter: for every matrix but the embedding, not for norms."""
    return "norm" not in name and "tok_embeddings" not in name


def adamw(model: nn.Module, settings: OptimSettings) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) over the model: weight decay on matrices, none on norms and the embedding."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if decays(name)], "weight_decay": settings.weight_decay},
        {"params": [p for name, p in named if not decays(name)], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=True)


def learning_rate(step: int, steps: int, settings: OptimSettings) -> float:
    """The rate of step 0..steps-1: a linear rise, then half a cosine, or a plateau and a linear fall, to `final`.

    The first step's rate is above 0, the last step's is the final one.
    """
    warmup = round(settings.warmup * steps)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    falling = steps - warmup if settings.lr_shape == "cosine" else round(settings.decay * steps)
    # How far the fall has come: 0 before it, 1 at the last step.
    done = max(0.0, (step + 1 - (steps - falling)) / falling) if falling else 0.0
    fall = (1 - math.cos(math.pi * done)) / 2 if settings.lr_shape == "cosine" else done
    return settings.lr * (1 - (1 - settings.final) * fall)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
