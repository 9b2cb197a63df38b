"""The reference operations of a lane model on one page, in plain PyTorch.

Shape suffixes: L lanes, B batch, S positions, T cached positions, D hidden, H query heads of a lane, K key-value
heads of a lane, E head size, F feed-forward width of a lane, V vocabulary, I and O a weight's input and output.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .norm import RmsNorm


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type sums are kept in: float64 for float64, float32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] divided by its root mean square over D, times weight (broadcast to x); arXiv 1910.07467."""
    wide = x.to(accumulation_dtype(x.dtype))
    if torch.is_grad_enabled():
        return cast(Tensor, RmsNorm.apply(wide, weight.to(wide.dtype), eps)).to(x.dtype)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.to(wide.dtype)).to(x.dtype)


def lane_linear(x_LBSI: Tensor, weight_LOI: Tensor) -> Tensor:
    """Each lane's own matrix on its own rows, as one batched product: [L, B, S, O]."""
    lanes, batch, length, width = x_LBSI.shape
    flat = torch.bmm(x_LBSI.reshape(lanes, batch * length, width), weight_LOI.transpose(1, 2))
    return flat.view(lanes, batch, length, -1)


def rope_frequencies(
    head_size: int, theta: float, scaling: tuple[float, float, float, int] | None, device: torch.device | None = None
) -> Tensor:
    """Radians per position of each pair, float64 [E/2]; `scaling` = (factor, low, high, original positions).

    With scaling, slow pairs are slowed by `factor` and the ones between are blended, as in Llama 3.1.
    """
    exponent = torch.arange(0, head_size, 2, dtype=torch.float64, device=device) / head_size
    freq = theta**-exponent
    if scaling is None:
        return freq
    factor, low, high, original = scaling
    turns = original * freq / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return freq * (blend + (1 - blend) / factor)


def rope_tables(positions: Tensor, freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of position times frequency, [..., S, E/2], in the accumulation type of `dtype`."""
    angle = positions.to(freq.dtype)[..., None] * freq
    wide = accumulation_dtype(dtype)
    return angle.cos().to(wide), angle.sin().to(wide)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns neighbouring pairs (2i, 2i+1) of x [..., E] by the angles of cos, sin [..., E/2]; arXiv 2104.09864."""
    wide = x.to(cos.dtype)
    # Whole rows are multiplied, since every other element of memory is slow to read: (a, b) cos + (b, a) (-sin, sin).
    swapped = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    cos_E, sin_E = torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
    return (wide * cos_E + swapped * sin_E).to(x.dtype)


def visible(query_S: Tensor, key_T: Tensor, window: int | None) -> Tensor:
    """Which keys a query sees, bool [S, T]: positions i - window < j <= i; a negative key position holds nothing."""
    gap = query_S[:, None] - key_T[None, :]
    seen = (gap >= 0) & (key_T >= 0)
    return seen if window is None else seen & (gap < window)


def attention(q_LBHSE: Tensor, k_LBKTE: Tensor, v_LBKTE: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention of every lane, [L, B, H, S, E]; mask is bool, [S, T] or [B, 1, S, T]; None is causal."""
    lanes, batch = q_LBHSE.shape[:2]
    mask_B = mask if mask is None or mask.dim() == 2 else mask.repeat(lanes, 1, 1, 1)
    out = F.scaled_dot_product_attention(
        q_LBHSE.flatten(0, 1),
        k_LBKTE.flatten(0, 1),
        v_LBKTE.flatten(0, 1),
        attn_mask=mask_B,
        is_causal=mask_B is None,
        enable_gqa=q_LBHSE.shape[2] != k_LBKTE.shape[2],
    )
    return out.unflatten(0, (lanes, batch))


def gated_mlp(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (SwiGLU, arXiv 2002.05202), any equal shapes."""
    return F.silu(gate) * up


def tree_sum(x_L: Tensor) -> Tensor:
    """Sum over the first dimension in a fixed order: a balanced binary tree in the accumulation type."""
    count = x_L.shape[0]
    if count == 1:
        return x_L[0].to(accumulation_dtype(x_L.dtype))
    half = count // 2
    return tree_sum(x_L[:half]) + tree_sum(x_L[half:])
