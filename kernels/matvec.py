"""Matrix times vector, one row tile at a time, with the next tile's weights already on their way.

Legend: K columns, BR rows and BK columns of a tile, NB attention blocks. Weights are [rows, K], read once and not kept.
"""

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
NORMED = tl.constexpr(1)
ATTENTION = tl.constexpr(2)


@triton.jit
def load_tile(
    p_w, offset, rows, column, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, STRIDE: tl.constexpr = 0
):  # fmt: skip
    """Weights [BR, BK] from `offset` elements on; rows beyond `rows` and columns beyond K are 0 and not read.

    STRIDE: elements from one row to the next, if not K.
    """
    ROW: tl.constexpr = STRIDE if STRIDE > 0 else K
    i_r, i_k = tl.arange(0, BR), column + tl.arange(0, BK)
    m_tile = (i_r < rows)[:, None]
    if K % BK != 0:
        m_tile = m_tile & (i_k < K)[None, :]
    pointers = p_w + offset + (i_r[:, None] * ROW + i_k[None, :])
    return tl.load(pointers, mask=m_tile, other=0.0, eviction_policy="evict_first")


@triton.jit
def joined(p_x, p_scale, i_k, m_k, blocks, E: tl.constexpr, NB: tl.constexpr, NBP: tl.constexpr):
    """Columns of a lane's attention output [H * E], float32, from what its blocks of positions left.

    p_x: weighted values [H, NB, E]; p_scale: largest score and sum of weights [H, NB, 2] (Milakov and Gimelshein,
    arXiv 1805.02867). Blocks are taken a few at a time, so that any number of them fits into registers.
    """
    FEW: tl.constexpr = NBP if NBP < 16 else 16
    head, e = i_k // E, i_k % E
    largest = tl.where(m_k, float("-inf"), float("-inf"))
    total = tl.where(m_k, 0.0, 0.0)
    out = tl.where(m_k, 0.0, 0.0)
    for first in range(0, blocks, FEW):
        i_b = first + tl.arange(0, FEW)[:, None]
        m_tile = (i_b < blocks) & m_k[None, :]
        place = head[None, :] * NB + i_b
        most = tl.load(p_scale + place * 2, mask=m_tile, other=float("-inf"))
        now = tl.maximum(largest, tl.max(most, 0))
        # Columns beyond the last head have no blocks, and the first blocks nothing before them.
        weight = tl.where(m_tile, tl.exp(most - now[None, :]), 0.0)
        before = tl.where(largest > float("-inf"), tl.exp(largest - now), 0.0)
        sums = tl.load(p_scale + place * 2 + 1, mask=m_tile, other=0.0)
        values = tl.load(p_x + place * E + e[None, :], mask=m_tile, other=0.0)
        total = total * before + tl.sum(sums * weight, 0)
        out = out * before + tl.sum(values * weight, 0)
        largest = now
    return out / tl.where(m_k, total, 1.0)


@triton.jit
def matvec_tile(
    w, p_w, offset, rows, next_offset, next_rows, p_x, p_scale, blocks, eps,
    INPUT: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    E: tl.constexpr, NB: tl.constexpr, NBP: tl.constexpr, STRIDE: tl.constexpr = 0,
):  # fmt: skip
    """Rows of a matrix times a vector, float32 [BR]; `w` holds the tile's first columns, and the next tile's come back.

    INPUT: PLAIN x [K]; NORMED x [K] with RMSNorm scale p_scale [K] (arXiv 1910.07467); ATTENTION blocks, see `joined`.
    STRIDE as in `load_tile`.
    """
    acc = tl.zeros((BR, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for column in range(0, K, BK):
        more = column + BK < K
        # Weights of the next step are asked for before this step's are used.
        following = load_tile(
            p_w, tl.where(more, offset, next_offset), tl.where(more, rows, next_rows),
            tl.where(more, column + BK, 0), K, BR, BK, STRIDE,
        )  # fmt: skip
        i_k = column + tl.arange(0, BK)
        m_k = i_k < K
        if INPUT == ATTENTION:
            x = joined(p_x, p_scale, i_k, m_k, blocks, E, NB, NBP)
        else:
            x = tl.load(p_x + i_k, mask=m_k, other=0.0).to(tl.float32)
        if INPUT == NORMED:
            squares += x * x
            x = x * tl.load(p_scale + i_k, mask=m_k, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        w = following
    out = tl.sum(acc, 1)
    if INPUT == NORMED:
        out = out * (1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps))
    return out, w
