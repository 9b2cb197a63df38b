"""Stand-alone kernels around the tile functions of the persistent kernel, so that each can be tested and timed alone.

No program waits for another here, except in `draw_token`. What the persistent kernel reads from memory is not
specialised. Host side: kernels/standalone_launches.py. Legend: kernels/decode.py; L
lanes, K columns of a matrix, LANE, X_LANE and SCALE_LANE elements from one lane's matrix, vector or norm to the next.
"""

import triton
import triton.language as tl

from laneformer.kernels import memory as mem
from laneformer.kernels.attention import attention_block, head_scale
from laneformer.kernels.draw import draw_phase
from laneformer.kernels.exchange import land_rows, post_rows, tree_sum
from laneformer.kernels.matvec import NORMED, load_tile, matvec_tile
from laneformer.kernels.phases import tile_at
from laneformer.kernels.sampling import gumbel
from laneformer.kernels.sync import ABORT_WORDS, block_barrier, pointer, to_words


@triton.jit(do_not_specialize=["count"])
def norm_rows(
    p_x, p_weight, p_out, eps, count, WEIGHT_ROW: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Rows of x [count, E] over their root mean square, times a weight; BN rows a program."""
    rows, i_e = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, EP)
    m_rows = rows < count
    m_tile = m_rows[:, None] & (i_e < E)[None, :]
    scale = head_scale(p_x, rows, m_rows, eps, E, EP)
    x = tl.load(p_x + rows[:, None] * E + i_e[None, :], mask=m_tile, other=0.0)
    weight = tl.load(p_weight + rows[:, None] * WEIGHT_ROW + i_e[None, :], mask=m_tile, other=0.0).to(tl.float32)
    tl.store(p_out + rows[:, None] * E + i_e[None, :], x * scale[:, None] * weight, mask=m_tile)


@triton.jit(do_not_specialize=["blocks"])
def matrix_rows(
    p_w, p_x, p_scale, p_out, blocks, eps,
    INPUT: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    LANE: tl.constexpr, X_LANE: tl.constexpr, SCALE_LANE: tl.constexpr, E: tl.constexpr, NB: tl.constexpr,
    NBP: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Rows of each lane's matrix times its vector, float32 [L, ROWS]; INPUT and STRIDE as matvec_tile has them."""
    TILES: tl.constexpr = (ROWS + BR - 1) // BR
    p, P = tl.program_id(0), tl.num_programs(0)
    lane, row, rows, offset = tile_at(p, TILES, BR, ROWS, STRIDE, LANE, L * TILES)
    w = load_tile(p_w, offset, rows, 0, K, BR, BK, STRIDE)
    for item in range(p, L * TILES, P):
        next_lane, next_row, next_rows, next_offset = tile_at(item + P, TILES, BR, ROWS, STRIDE, LANE, L * TILES)
        out, w = matvec_tile(
            w, p_w, offset, rows, next_offset, next_rows, p_x + lane * X_LANE, p_scale + lane * SCALE_LANE, blocks,
            eps, INPUT, K, BR, BK, E, NB, NBP, STRIDE,
        )  # fmt: skip
        i_r = tl.arange(0, BR)
        tl.store(p_out + lane * ROWS + row + i_r, out, mask=i_r < rows)
        lane, row, rows, offset = next_lane, next_row, next_rows, next_offset


@triton.jit
def unit_rows(
    p_w, p_x, p_norm, p_out, eps,
    L: tl.constexpr, F: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, LANE: tl.constexpr,
    X_LANE: tl.constexpr, SCALE_LANE: tl.constexpr,
):  # fmt: skip
    """Feed-forward units silu(gate) * up of each lane's normalised stream, float32 [L, F]."""
    TILES: tl.constexpr = (F + BR - 1) // BR
    p, P = tl.program_id(0), tl.num_programs(0)
    lane, row, rows, offset = tile_at(p, TILES, BR, F, D, LANE, L * TILES)
    w = load_tile(p_w, offset, rows, 0, D, BR, BK)
    for item in range(p, L * TILES, P):
        next_lane, next_row, next_rows, next_offset = tile_at(item + P, TILES, BR, F, D, LANE, L * TILES)
        p_lane, p_scale = p_x + lane * X_LANE, p_norm + lane * SCALE_LANE
        gate, w = matvec_tile(
            w, p_w, offset, rows, offset + F * D, rows, p_lane, p_scale, 0, eps, NORMED, D, BR, BK, 1, 1, 1
        )
        up, w = matvec_tile(
            w, p_w, offset + F * D, rows, next_offset, next_rows, p_lane, p_scale, 0, eps, NORMED, D, BR, BK, 1, 1, 1
        )
        i_r = tl.arange(0, BR)
        tl.store(p_out + lane * F + row + i_r, gate * tl.sigmoid(gate) * up, mask=i_r < rows)
        lane, row, rows, offset = next_lane, next_row, next_rows, next_offset


@triton.jit(do_not_specialize=["first_lane"])
def head_rows(
    p_w, p_x, p_norm, boxes, first_lane, eps,
    INPUT: tl.constexpr, R: tl.constexpr, L: tl.constexpr, C: tl.constexpr, V: tl.constexpr, D: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, LANE: tl.constexpr, X_LANE: tl.constexpr, SCALE_LANE: tl.constexpr,
):  # fmt: skip
    """Logits of lanes' slices of the head, as words in every rank's logit box [V]."""
    TILES: tl.constexpr = (C + BR - 1) // BR
    p, P = tl.program_id(0), tl.num_programs(0)
    lane, row, rows, offset = tile_at(p, TILES, BR, C, D, LANE, L * TILES)
    w = load_tile(p_w, offset, rows, 0, D, BR, BK)
    for item in range(p, L * TILES, P):
        next_lane, next_row, next_rows, next_offset = tile_at(item + P, TILES, BR, C, D, LANE, L * TILES)
        out, w = matvec_tile(
            w, p_w, offset, rows, next_offset, next_rows, p_x + lane * X_LANE, p_norm + lane * SCALE_LANE, 0, eps,
            INPUT, D, BR, BK, 1, 1, 1,
        )  # fmt: skip
        i_r = tl.arange(0, BR)
        ids = (first_lane + lane) * C + row + i_r
        for rank in range(R):
            p_box = tl.load(boxes + rank).to(tl.pointer_type(tl.int32))
            tl.store(p_box + ids, to_words(out), mask=(i_r < rows) & (ids < V), cache_modifier=".wt")
        lane, row, rows, offset = next_lane, next_row, next_rows, next_offset


@triton.jit(do_not_specialize=["position", "length", "ring"])
def attention_blocks(
    p_qkv, p_keys, p_values, p_q_norm, p_k_norm, p_cos, p_sin, p_out, p_scale, position, length, ring, eps,
    L: tl.constexpr, H: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, EC: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr, HEAD_NORMS: tl.constexpr,
):  # fmt: skip
    """Every (lane, key-value head, block of positions): see attention_block."""
    blocks = (length + BT - 1) // BT
    ROWS: tl.constexpr = (H + 2 * KV) * E
    for task in range(tl.program_id(0), L * KV * blocks, tl.num_programs(0)):
        head, block = task // blocks, task % blocks
        lane, kv = head // KV, head % KV
        p_lane = p_qkv + lane * ROWS
        first = lane * H + kv * G
        cache = tl.cast(head, tl.int64) * ring * E
        attention_block(
            p_lane + kv * G * E, p_lane + (H + kv) * E, p_lane + (H + KV + kv) * E, p_keys + cache, p_values + cache,
            p_q_norm, p_k_norm, p_cos, p_sin, p_out + first * NB * E, p_scale + first * NB * 2, block, position,
            length, ring, eps, G, GP, E, EP, EC, BT, NB, HEAD_NORMS,
        )  # fmt: skip


@triton.jit
def sum_rows(
    p_x, slot_row, p_out, W: tl.constexpr, S: tl.constexpr, LOG_S: tl.constexpr, BW: tl.constexpr
):  # fmt: skip
    """Sum over the rows of x [rows, W] as a balanced tree; slot_row [S]: the row of each leaf, or -1."""
    i_w = tl.program_id(0) * BW + tl.arange(0, BW)
    row = tl.load(slot_row + tl.arange(0, S))
    m_tile = (row >= 0)[:, None] & (i_w < W)[None, :]
    x = tl.load(p_x + row[:, None] * W + i_w[None, :], mask=m_tile, other=0.0).to(tl.float32)
    tl.store(p_out + i_w, tree_sum(x, S, BW, LOG_S), mask=i_w < W)


@triton.jit
def post_tiles(
    p_partials, boxes, lane_slot, R: tl.constexpr, LR: tl.constexpr, LP: tl.constexpr, LOG_LP: tl.constexpr,
    NODES: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Every rank sends its partials [LR, D] to every rank; lane_slot [R, NODES]."""
    TILES: tl.constexpr = (D + BD - 1) // BD
    rank, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    rows = tile * BD + tl.arange(0, BD)
    post_rows(p_partials + rank * (LR * D), boxes, 0, lane_slot + rank * NODES, rank, rows, rows < D,
              R, LR, LP, LOG_LP, NODES, D, BD)  # fmt: skip


@triton.jit(do_not_specialize=["last"])
def land_tiles(
    p_partials, boxes, slot_lane, p_abort, aborts, p_out, last, limit,
    R: tl.constexpr, LR: tl.constexpr, S: tl.constexpr, LOG_S: tl.constexpr, VALID: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """Every rank's sum of the message in its own mailbox, float32 [R, D]."""
    TILES: tl.constexpr = (D + BD - 1) // BD
    rank, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    rows = tile * BD + tl.arange(0, BD)
    total, _ = land_rows(
        p_partials + rank * (LR * D), pointer(boxes, rank, tl.int32), slot_lane, rows, rows < D, last != 0,
        p_abort + rank * ABORT_WORDS, aborts, rank, tile, 0, limit, R, S, LOG_S, VALID, D, BD, AMD,
    )  # fmt: skip
    tl.store(p_out + rank * D + rows, total, mask=rows < D)


@triton.jit(do_not_specialize=["position", "count"])
def noise_of(p_ids, p_seed, p_out, position, count, BC: tl.constexpr):
    """Gumbel noise of token ids, float64 [count]."""
    i_c = tl.program_id(0) * BC + tl.arange(0, BC)
    ids = tl.load(p_ids + i_c, mask=i_c < count, other=0)
    tl.store(p_out + i_c, gumbel(ids, tl.load(p_seed), position), mask=i_c < count)


@triton.jit(do_not_specialize=["position"])
def draw_token(
    me, launch, knobs, p_logits, p_token, position, limit,
    P: tl.constexpr, PP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """One rank's draw from logits [V]: its logit box is filled, then draw_phase runs. Grid (P,), all resident."""
    p = tl.program_id(0)
    # What the last launch left: draws so far, and the counts reached.
    state = pointer(me, mem.TARGETS, tl.int32)
    draws, scored, selected = tl.load(state), tl.load(state + mem.C_SCORES), tl.load(state + mem.C_SELECT)
    parity = draws % 2
    p_box = tl.load(pointer(me, mem.LOGIT_BOXES, tl.int64)).to(tl.pointer_type(tl.int32)) + parity * V
    for chunk in range(p, (V + BV - 1) // BV, P):
        ids = chunk * BV + tl.arange(0, BV)
        tl.store(p_box + ids, to_words(tl.load(p_logits + ids, mask=ids < V, other=0.0)), mask=ids < V)
    block_barrier(AMD)
    token, arrivals, selects, _, _ = draw_phase(
        me, launch, knobs, 0, parity, scored, selected, position, 0, p, 0, limit,
        1, P, PP, V, BV, 1, 0, 1, False, "gpu", AMD,
    )  # fmt: skip
    # Program 0 leaves draw_phase once all have arrived in it, which is after they have read the state.
    if p == 0:
        tl.store(p_token, token)
        tl.store(state, draws + 1)
        tl.store(state + mem.C_SCORES, scored + arrivals)
        tl.store(state + mem.C_SELECT, selected + selects)
