"""Attention of one new position over a cache, a block of positions at a time; rope and the append in the same pass.

Legend: E head size, EC columns of it at a time, G query heads of a key-value head (GP padded), BT positions of a block.
"""

import triton
import triton.language as tl


@triton.jit
def head_scale(p_x, heads, m_heads, eps, E: tl.constexpr, EP: tl.constexpr):
    """1 over the root mean square of head vectors at p_x [heads, E]; arXiv 1910.07467."""
    i_e = tl.arange(0, EP)
    x = tl.load(p_x + heads[:, None] * E + i_e[None, :], mask=m_heads[:, None] & (i_e < E)[None, :], other=0.0)
    return 1.0 / tl.sqrt(tl.sum(x * x, 1) / E + eps)


@triton.jit
def turned(
    p_x, heads, m_heads, i_e, p_norm, scale, p_cos, p_sin, E: tl.constexpr, HEAD_NORMS: tl.constexpr
):  # fmt: skip
    """Columns i_e of head vectors at p_x [heads, E], normalised if asked and turned by a position's angles.

    Neighbouring pairs (2i, 2i+1) turn together; arXiv 2104.09864.
    """
    partner = i_e ^ 1
    m_tile = m_heads[:, None]
    x = tl.load(p_x + heads[:, None] * E + i_e[None, :], mask=m_tile, other=0.0)
    y = tl.load(p_x + heads[:, None] * E + partner[None, :], mask=m_tile, other=0.0)
    if HEAD_NORMS:
        x = x * scale[:, None] * tl.load(p_norm + i_e).to(tl.float32)[None, :]
        y = y * scale[:, None] * tl.load(p_norm + partner).to(tl.float32)[None, :]
    cos, sin = tl.load(p_cos + i_e // 2), tl.load(p_sin + i_e // 2)
    return x * cos[None, :] + y * tl.where(i_e % 2 == 0, -sin, sin)[None, :]


@triton.jit
def attention_block(
    p_q, p_k, p_v, p_keys, p_values, p_q_norm, p_k_norm, p_cos, p_sin, p_out, p_scale,
    block, position, length, ring, eps,
    G: tl.constexpr, GP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, EC: tl.constexpr,
    BT: tl.constexpr, NB: tl.constexpr, HEAD_NORMS: tl.constexpr,
):  # fmt: skip
    """One block of grouped-query attention: leaves weighted values, largest score and sum of weights.

    p_q [G, E], p_k, p_v [E]: the new position's, float32, before rope. p_keys, p_values [ring, E]: a head's cache; it
    takes the new position in the block that holds it. The last `length` positions up to `position` are seen; block b
    holds those from `position + 1 - length + b * BT`. p_out [G, NB, E], p_scale [G, NB, 2], float32.
    """
    i_g, i_t = tl.arange(0, GP), tl.arange(0, BT)
    m_g = i_g < G
    one = tl.zeros((1,), tl.int32)
    positions = position + 1 - length + block * BT + i_t
    new = positions == position
    m_t = positions <= position
    m_old = positions < position
    slots = (positions % ring).to(tl.int64)
    q_scale = one.to(tl.float32) + 1.0
    k_scale = q_scale
    if HEAD_NORMS:
        q_scale = head_scale(p_q, i_g, m_g, eps, E, EP)
        k_scale = head_scale(p_k, one, one == 0, eps, E, EP)
    holds_new = tl.max(new.to(tl.int32), 0)
    scores = tl.zeros((GP, BT), tl.float32)
    for chunk in tl.static_range(E // EC):
        i_e = chunk * EC + tl.arange(0, EC)
        keys = tl.load(p_keys + slots[:, None] * E + i_e[None, :], mask=m_old[:, None], other=0.0).to(tl.float32)
        q = turned(p_q, i_g, m_g, i_e, p_q_norm, q_scale, p_cos, p_sin, E, HEAD_NORMS)
        k = turned(p_k, one, one == 0, i_e, p_k_norm, k_scale, p_cos, p_sin, E, HEAD_NORMS)
        # The new key is rounded as the cache rounds it, so that it counts the same now and later.
        k = k.to(p_keys.dtype.element_ty).to(tl.float32)
        if holds_new:
            slot = (position % ring).to(tl.int64)
            tl.store(p_keys + slot * E + one[:, None] + i_e[None, :], k.to(p_keys.dtype.element_ty))
        keys = tl.where(new[:, None], k, keys)
        scores += tl.sum(q[:, None, :] * keys[None, :, :], 2)
    scores = tl.where(m_t[None, :], scores * (1.0 / tl.sqrt(E * 1.0)), float("-inf"))
    largest = tl.max(scores, 1)
    weights = tl.where(m_t[None, :], tl.exp(scores - largest[:, None]), 0.0)
    for chunk in tl.static_range(E // EC):
        i_e = chunk * EC + tl.arange(0, EC)
        values = tl.load(p_values + slots[:, None] * E + i_e[None, :], mask=m_old[:, None], other=0.0).to(tl.float32)
        v = tl.load(p_v + i_e).to(p_values.dtype.element_ty)
        if holds_new:
            slot = (position % ring).to(tl.int64)
            tl.store(p_values + slot * E + i_e, v)
        values = tl.where(new[:, None], v.to(tl.float32)[None, :], values)
        out = tl.sum(weights[:, :, None] * values[None, :, :], 1)
        tl.store(p_out + (i_g[:, None] * NB + block) * E + i_e[None, :], out, mask=m_g[:, None])
    tl.store(p_scale + (i_g * NB + block) * 2, largest, mask=m_g)
    tl.store(p_scale + (i_g * NB + block) * 2 + 1, tl.sum(weights, 1), mask=m_g)
