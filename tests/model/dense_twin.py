"""transformers' norms and rope tables in float64: the twins of what it computes in float32 whatever the type."""

from __future__ import annotations

import math

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding


def put_float64_inside(monkeypatch):
    """Puts the twins in the places of Llama's and Qwen3's own."""
    for owner in (LlamaRMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(owner, "forward", norm)
    for owner in (LlamaRotaryEmbedding, Qwen3RotaryEmbedding):
        monkeypatch.setattr(owner, "forward", tables)


def norm(self, x):
    wide = x.double()
    return self.weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)


def tables(self, x, position_ids):
    block, size = self.config.rope_parameters, self.config.head_dim
    freq = block["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    if block["rope_type"] == "llama3":
        freq = torch.tensor([scaled(f, block) for f in freq.tolist()], dtype=torch.float64)
    angle = (position_ids[..., None] * freq).repeat(1, 1, 2)
    return angle.cos(), angle.sin()


def scaled(freq, block):
    """One frequency under Llama 3.1's rule, by wavelength."""
    original, low, high = block["original_max_position_embeddings"], block["low_freq_factor"], block["high_freq_factor"]
    wavelength = 2 * math.pi / freq
    if wavelength < original / high:
        return freq
    if wavelength > original / low:
        return freq / block["factor"]
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * freq / block["factor"] + smooth * freq
