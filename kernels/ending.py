"""The two ends of a token inside a rank: the embedding; the final norm with its exchange, and the head.

Conventions as in kernels/phases.py; legend: kernels/decode.py.
"""

import triton
import triton.language as tl

from laneformer.kernels import memory as mem
from laneformer.kernels.exchange import land_rows, post_rows
from laneformer.kernels.matvec import NORMED, PLAIN, load_tile, matvec_tile
from laneformer.kernels.phases import own_abort, signal_to, wait_for
from laneformer.kernels.sync import block_barrier, pointer, to_words

# Types of head: the lanes' mean after the norm; their normalised sum; a slice for each lane; all lanes side by side.
MEAN = tl.constexpr(0)
NORMED_SUM = tl.constexpr(1)
SLICES = tl.constexpr(2)
JOINED = tl.constexpr(3)


@triton.jit(noinline=True)
def embed_phase(
    me, token, p, P: tl.constexpr, LR: tl.constexpr, LP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    WEIGHT: tl.constexpr, SCOPE: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """Every lane's stream starts as the token's row of the embedding; every program signals."""
    TILES: tl.constexpr = (D + BD - 1) // BD
    p_e, p_x = pointer(me, mem.EMBEDDING, WEIGHT), pointer(me, mem.STREAM, tl.float32)
    i_l = tl.arange(0, LP)
    for tile in range(p, TILES, P):
        rows = tile * BD + tl.arange(0, BD)
        m_rows = rows < D
        row = tl.load(p_e + tl.cast(token, tl.int64) * D + rows, mask=m_rows, other=0.0).to(tl.float32)
        m_tile = (i_l < LR)[:, None] & m_rows[None, :]
        tl.store(p_x + i_l[:, None] * D + rows[None, :], tl.zeros((LP, BD), tl.float32) + row[None, :], mask=m_tile)
    signal_to(me, mem.C_STREAM, SCOPE, AMD)


@triton.jit(noinline=True)
def final_phase(
    me, number, message_base, lane_slot, slot_lane, target, rank, p, place, limit, eps,
    KIND: tl.constexpr, R: tl.constexpr, P: tl.constexpr, LANES: tl.constexpr, LR: tl.constexpr, LP: tl.constexpr,
    LOG_LP: tl.constexpr, NODES: tl.constexpr, S: tl.constexpr, LOG_S: tl.constexpr, VALID: tl.constexpr,
    GENERATIONS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, WEIGHT: tl.constexpr,
    NORM_LANE: tl.constexpr, SCOPE: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """What a replicated head reads, [D]: the lanes' mean after the norm, or their sum, exchanged at once."""
    TILES: tl.constexpr = (D + BD - 1) // BD
    counted, landed = 0, 0
    if p < TILES:
        counted = wait_for(me, mem.C_STREAM, target, rank, p, place, limit, R, SCOPE)
        p_x, p_norm = pointer(me, mem.STREAM, tl.float32), pointer(me, mem.FINAL_NORM, WEIGHT)
        place_in_ring = (message_base + number) % GENERATIONS
        p_ring = pointer(me, mem.RING, tl.float32) + place_in_ring * (LR * D)
        p_box = tl.load(pointer(me, mem.BOXES, tl.int64) + rank).to(tl.pointer_type(tl.int32))
        p_abort, aborts = own_abort(me, rank)
        i_l = tl.arange(0, LP)
        m_l = (i_l < LR)[:, None]
        scale = tl.zeros((LP,), tl.float32) + 1.0
        if KIND == MEAN:
            squares = tl.zeros((LP, BK), tl.float32)
            for column in range(0, D, BK):
                i_k = column + tl.arange(0, BK)
                x = tl.load(p_x + i_l[:, None] * D + i_k[None, :], mask=m_l & (i_k < D)[None, :], other=0.0)
                squares += x * x
            scale = 1.0 / tl.sqrt(tl.sum(squares, 1) / D + eps)
        for tile in range(p, TILES, P):
            rows = tile * BD + tl.arange(0, BD)
            m_rows = rows < D
            m_tile = m_l & m_rows[None, :]
            x = tl.load(p_x + i_l[:, None] * D + rows[None, :], mask=m_tile, other=0.0)
            if KIND == MEAN:
                norm = tl.load(p_norm + i_l[:, None] * NORM_LANE + rows[None, :], mask=m_tile, other=0.0)
                x = x * scale[:, None] * norm.to(tl.float32)
            tl.store(p_ring + i_l[:, None] * D + rows[None, :], x, mask=m_tile)
            block_barrier(AMD)
            if R > 1:
                boxes = pointer(me, mem.BOXES, tl.int64)
                post_rows(p_ring, boxes, place_in_ring * (S * D), lane_slot, rank, rows, m_rows,
                          R, LR, LP, LOG_LP, NODES, D, BD)  # fmt: skip
        for tile in range(p, TILES, P):
            rows = tile * BD + tl.arange(0, BD)
            total, waited = land_rows(
                p_ring, p_box + place_in_ring * (S * D), slot_lane, rows, rows < D, True, p_abort, aborts, rank, p,
                place, limit, R, S, LOG_S, VALID, D, BD, AMD,
            )  # fmt: skip
            landed += waited
            if KIND == MEAN:
                total = total / LANES
            tl.store(pointer(me, mem.FINAL, tl.float32) + rows, total, mask=rows < D)
        signal_to(me, mem.C_FINAL, SCOPE, AMD)
    return counted, landed


@triton.jit(noinline=True)
def head_phase(
    me, lane_slot, parity, target, rank, p, place, limit, eps,
    KIND: tl.constexpr, R: tl.constexpr, P: tl.constexpr, LR: tl.constexpr, LP: tl.constexpr, LOG_LP: tl.constexpr,
    NODES: tl.constexpr, LS: tl.constexpr, V: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, WEIGHT: tl.constexpr, NORM_LANE: tl.constexpr, ALIGN: tl.constexpr, SCOPE: tl.constexpr,
    AMD: tl.constexpr,
):  # fmt: skip
    """Logits of this rank's part of the head, sent to every rank's logit box."""
    TILES: tl.constexpr = (C + BR - 1) // BR
    ITEMS: tl.constexpr = LR * TILES
    WAIT: tl.constexpr = mem.C_FINAL if KIND <= NORMED_SUM else mem.C_STREAM
    INPUT: tl.constexpr = PLAIN if KIND == MEAN else NORMED
    polls = 0
    # Of a joined head a program takes all lanes of a row tile, one after another; otherwise lanes lie apart.
    if p < (TILES if KIND == JOINED else ITEMS):
        p_w, offsets = pointer(me, mem.HEAD, WEIGHT), pointer(me, mem.HEAD_OFFSETS, tl.int64)
        p_norm, boxes = pointer(me, mem.FINAL_NORM, WEIGHT), pointer(me, mem.LOGIT_BOXES, tl.int64)
        p_parts = pointer(me, mem.HEAD_PARTS, tl.float32)
        if KIND <= NORMED_SUM:
            p_x = pointer(me, mem.FINAL, tl.float32)
        else:
            p_x = pointer(me, mem.STREAM, tl.float32)
        STRIDE: tl.constexpr = 1 if KIND == JOINED else P
        item = p * LR if KIND == JOINED else p
        lane, row, rows, offset = head_tile(item, offsets, KIND, LR, TILES, BR, C, D, ALIGN)
        w = load_tile(p_w, offset, rows, 0, D, BR, BK)
        polls = wait_for(me, WAIT, target, rank, p, place, limit, R, SCOPE)
        while item < ITEMS:
            following = item + STRIDE
            if KIND == JOINED:
                if following % LR == 0:
                    following += (P - 1) * LR
            next_lane, next_row, next_rows, next_offset = head_tile(
                following, offsets, KIND, LR, TILES, BR, C, D, ALIGN
            )
            own_x = 0 if KIND <= NORMED_SUM else lane * D
            own_norm = 0 if KIND <= NORMED_SUM else lane * NORM_LANE
            out, w = matvec_tile(
                w, p_w, offset, rows, next_offset, next_rows, p_x + own_x, p_norm + own_norm, 0, eps,
                INPUT, D, BR, BK, 1, 1, 1,
            )  # fmt: skip
            i_r = tl.arange(0, BR)
            if KIND == JOINED:
                tl.store(p_parts + lane * V + row + i_r, out, mask=i_r < rows)
                if lane == LR - 1:
                    block_barrier(AMD)
                    post_rows(p_parts, boxes, parity * (LS * V), lane_slot, rank, row + i_r, i_r < rows,
                              R, LR, LP, LOG_LP, NODES, V, BR)  # fmt: skip
            else:
                ids = (rank * LR + lane) * C + row + i_r
                for turn in range(R):
                    p_box = tl.load(boxes + (rank + 1 + turn) % R).to(tl.pointer_type(tl.int32)) + parity * (LS * V)
                    tl.store(p_box + ids, to_words(out), mask=(i_r < rows) & (ids < V), cache_modifier=".wt")
            item = following
            lane, row, rows, offset = next_lane, next_row, next_rows, next_offset
    return polls


@triton.jit
def head_tile(
    item, offsets, KIND: tl.constexpr, LR: tl.constexpr, TILES: tl.constexpr, BR: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """(lane, first row, rows left, offset) of an item of the head; no rows beyond the last."""
    if KIND == JOINED:
        lane, tile = item % LR, item // LR
    else:
        lane, tile = item // TILES, item % TILES
    inside = item < LR * TILES
    row = tile * BR
    offset = tl.multiple_of(tl.load(offsets + lane, mask=inside, other=0), ALIGN)
    return lane, row, tl.where(inside, C - row, 0), offset + tl.cast(row, tl.int64) * D
