"""What one decode step computes between two exchanges, as functions of tensors that stay in place.

Every function takes `fused`: True for the form that torch.compile's compiler turns into few kernels (products as sums
in float32, which become one pass over the weights), False for torch's own products and attention. Streams and vectors
between the functions are float32, weights and cache of any type.

Shape suffixes: M matrices at once (the lanes of this rank, or 1 where they are one wide matrix), L lanes of this rank,
D hidden, O and I a matrix's output and input, K key-value heads of a lane, G query heads per key-value head, T cached
positions, E head size, V vocabulary, n terms of a sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from laneformer import ops


def matvec(x_MI: Tensor, weight_MOI: Tensor, fused: bool) -> Tensor:
    """Each matrix times its vector, float32 [M, O]."""
    if fused:
        return (weight_MOI.float() * x_MI[:, None]).sum(-1)
    return torch.bmm(weight_MOI, x_MI.to(weight_MOI.dtype)[..., None])[..., 0].float()


def embed(
    token_1: Tensor, position_1: Tensor, embedding_VD: Tensor, cos_TE: Tensor, sin_TE: Tensor, copies: int, fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The token's row for every stream [M, D], and cos and sin [1, E/2] of its position."""
    x_1D = embedding_VD.index_select(0, token_1).float()
    return x_1D.expand(copies, -1).clone(), cos_TE.index_select(0, position_1), sin_TE.index_select(0, position_1)


def heads(
    x_MD: Tensor, cos_1E: Tensor, sin_1E: Tensor, norm_MD: Tensor, qkv_MOI: Tensor, q_norm_E: Tensor | None,
    k_norm_E: Tensor | None, keys_LKTE: Tensor, values_LKTE: Tensor, position_1: Tensor, eps: float, fused: bool,
) -> Tensor:  # fmt: skip
    """The position's queries [L, K, G, E], scaled; its keys and values go to their place in the (ring) cache."""
    lanes, kv_heads, size, head = keys_LKTE.shape
    rows = matvec(ops.rms_norm(x_MD, norm_MD, eps), qkv_MOI, fused).view(lanes, -1, head)
    q, k, v = rows.split((rows.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    if q_norm_E is not None and k_norm_E is not None:
        q, k = ops.rms_norm(q, q_norm_E, eps), ops.rms_norm(k, k_norm_E, eps)
    q, k = ops.rope(q, cos_1E, sin_1E), ops.rope(k, cos_1E, sin_1E)
    slot_1 = position_1 % size
    keys_LKTE.index_copy_(2, slot_1, k[:, :, None].to(keys_LKTE.dtype))
    values_LKTE.index_copy_(2, slot_1, v[:, :, None].to(values_LKTE.dtype))
    return (q * head**-0.5).reshape(lanes, kv_heads, -1, head)


def attend(
    q_LKGE: Tensor, keys_LKTE: Tensor, values_LKTE: Tensor, position_1: Tensor, matrices: int, fused: bool
) -> Tensor:
    """What the queries find in the cache's first slots, float32 [M, I], the heads of a matrix one after another.

    A slot beyond the position is empty; a ring that is full (the position beyond its size) holds its window, no more.
    """
    seen_T = torch.arange(keys_LKTE.shape[2], device=keys_LKTE.device) <= position_1
    if fused:
        scores_LKGT = (q_LKGE[:, :, :, None] * keys_LKTE[:, :, None].float()).sum(-1)
        share_LKGT = scores_LKGT.masked_fill(~seen_T, -torch.inf).softmax(-1)
        out_LKGE = (share_LKGT[..., None] * values_LKTE[:, :, None].float()).sum(3)
    else:
        # The query heads that share a key-value head are as many queries of it.
        q, mask = q_LKGE.to(keys_LKTE.dtype), seen_T.expand(1, 1, q_LKGE.shape[2], -1)
        out_LKGE = F.scaled_dot_product_attention(q, keys_LKTE, values_LKTE, attn_mask=mask, scale=1.0).float()
    return out_LKGE.reshape(matrices, -1)


def gated(x_MD: Tensor, norm_MD: Tensor, gate_up_MOI: Tensor, lanes: int, eps: float, fused: bool) -> Tensor:
    """silu(gate) * up of every lane, float32 [M, I]."""
    rows = matvec(ops.rms_norm(x_MD, norm_MD, eps), gate_up_MOI, fused)
    gate, up = rows.view(lanes, -1).chunk(2, -1)
    return ops.gated_mlp(gate, up).reshape(x_MD.shape[0], -1)


def land(
    x_MD: Tensor, partial_MD: Tensor, scale: float | None, with_own: tuple[bool, ...], *arrived: Tensor, fused: bool
) -> Tensor:
    """The streams after a module: plus `scale` times its partial, plus each sum over lanes that lands.

    `arrived` holds for each landing its terms [n, D], and, where a lane's own share is not part of it, that [M, D].
    """
    given = iter(arrived)
    if scale is not None:
        x_MD = x_MD + partial_MD * scale
    for whole in with_own:
        total_D = next(given).sum(0)
        x_MD = x_MD + (total_D if whole else total_D - next(given))
    return x_MD


def final_norm(x_MD: Tensor, norm_MD: Tensor, eps: float, factor: float, fused: bool) -> Tensor:
    """The norm of `factor` times the streams, float32."""
    return ops.rms_norm(x_MD if factor == 1.0 else x_MD * factor, norm_MD, eps)


def add_terms(terms_nD: Tensor, divisor: float, fused: bool) -> Tensor:
    """The sum of the terms over `divisor`, [1, D]."""
    return terms_nD.sum(0, keepdim=True) / divisor


def pick(logits_V: Tensor, fused: bool) -> Tensor:
    """The likeliest token, int64 [1]; -1 where the largest logit is no finite number, which NaN always counts as."""
    best = logits_V.argmax(-1, keepdim=True)
    return torch.where(logits_V.index_select(0, best).isfinite(), best, -1)
