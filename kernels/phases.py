"""The phases of a layer inside a rank, each as what one program does: wait, compute its tiles, signal.

Every phase asks for its first weights before it waits, and returns the polls it waited. In the compiled code each is a
function of its own, so that registers are given out for each alone and none spills in a loop. Values that all share:
`me` the rank's table of addresses (kernels/memory.py), rank, program p of P, place (what an abort record shows), limit
(polls). Legend: kernels/decode.py.
"""

import triton
import triton.language as tl

from laneformer.kernels import memory as mem
from laneformer.kernels.attention import attention_block
from laneformer.kernels.exchange import land_rows, post_rows
from laneformer.kernels.matvec import ATTENTION, NORMED, PLAIN, load_tile, matvec_tile
from laneformer.kernels.sync import block_barrier, pointer, signal, wait


@triton.jit
def wait_for(
    me, which: tl.constexpr, target, rank, p, place, limit, R: tl.constexpr, SCOPE: tl.constexpr,
):  # fmt: skip
    """Waits until one of this rank's counters has reached `target`."""
    counter = pointer(me, mem.COUNTERS, tl.int32) + which * mem.LINE
    p_abort, aborts = own_abort(me, rank)
    return wait(counter, target, p_abort, aborts, rank, p, place, limit, R, SCOPE)


@triton.jit
def signal_to(me, which: tl.constexpr, SCOPE: tl.constexpr, AMD: tl.constexpr):
    """Signals one of this rank's counters."""
    signal(pointer(me, mem.COUNTERS, tl.int32) + which * mem.LINE, SCOPE, AMD)


@triton.jit
def own_abort(me, rank):
    """This rank's abort block, and the table of everybody's."""
    aborts = pointer(me, mem.ABORTS, tl.int64)
    return tl.load(aborts + rank).to(tl.pointer_type(tl.int32)), aborts


@triton.jit
def tile_at(
    item, TILES: tl.constexpr, BR: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, LANE: tl.constexpr,
    ITEMS: tl.constexpr,
):  # fmt: skip
    """(lane, first row, rows left, offset in elements) of a lane-major item; no rows beyond the last item."""
    lane, row = item // TILES, (item % TILES) * BR
    rows = tl.where(item < ITEMS, ROWS - row, 0)
    return lane, row, rows, tl.cast(lane, tl.int64) * LANE + tl.cast(row, tl.int64) * K


@triton.jit(noinline=True)
def qkv_phase(
    me, layer, target, rank, p, place, limit, eps,
    R: tl.constexpr, P: tl.constexpr, LR: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, WEIGHT: tl.constexpr, LANE: tl.constexpr, NORM_LANE: tl.constexpr, SCOPE: tl.constexpr,
    AMD: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values of the new position from every lane's normalised stream."""
    TILES: tl.constexpr = (ROWS + BR - 1) // BR
    p_w = pointer(layer, mem.QKV_WEIGHT, WEIGHT)
    p_norm = pointer(layer, mem.ATTENTION_NORM, WEIGHT)
    p_x, p_out = pointer(me, mem.STREAM, tl.float32), pointer(me, mem.QKV, tl.float32)
    lane, row, rows, offset = tile_at(p, TILES, BR, ROWS, D, LANE, LR * TILES)
    w = load_tile(p_w, offset, rows, 0, D, BR, BK)
    # Who has nothing to do here waits too: the token's end reads what a later token overwrites.
    polls = wait_for(me, mem.C_STREAM, target, rank, p, place, limit, R, SCOPE)
    for item in range(p, LR * TILES, P):
        next_lane, next_row, next_rows, next_offset = tile_at(item + P, TILES, BR, ROWS, D, LANE, LR * TILES)
        out, w = matvec_tile(
            w, p_w, offset, rows, next_offset, next_rows, p_x + lane * D, p_norm + lane * NORM_LANE, 0, eps,
            NORMED, D, BR, BK, 1, 1, 1,
        )  # fmt: skip
        i_r = tl.arange(0, BR)
        tl.store(p_out + lane * ROWS + row + i_r, out, mask=i_r < rows)
        lane, row, rows, offset = next_lane, next_row, next_rows, next_offset
    if p < LR * TILES:
        signal_to(me, mem.C_QKV, SCOPE, AMD)
    else:
        # The wait was told to all threads through shared memory, which the next wait uses again.
        tl.debug_barrier()
    return polls


@triton.jit(noinline=True)
def attention_phase(
    me, layer, position, p_cos, p_sin, target, rank, p, place, limit, eps,
    R: tl.constexpr, P: tl.constexpr, LR: tl.constexpr, H: tl.constexpr, KV: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, EC: tl.constexpr, GP: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr, WEIGHT: tl.constexpr,
    HEAD_NORMS: tl.constexpr, SCOPE: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """Blocks of positions of every lane's key-value heads; the polls, and the blocks a head has."""
    G: tl.constexpr = H // KV
    ROWS: tl.constexpr = (H + 2 * KV) * E
    ring, window = tl.load(layer + mem.RING_POSITIONS).to(tl.int32), tl.load(layer + mem.WINDOW).to(tl.int32)
    length = tl.where(window == 0, position + 1, tl.minimum(window, position + 1))
    blocks = (length + BT - 1) // BT
    tasks = LR * KV * blocks
    polls = 0
    if p < tasks:
        polls = wait_for(me, mem.C_QKV, target, rank, p, place, limit, R, SCOPE)
        p_qkv, p_out = pointer(me, mem.QKV, tl.float32), pointer(me, mem.WEIGHTED, tl.float32)
        p_scale = pointer(me, mem.WEIGHTED_SCALE, tl.float32)
        p_keys, p_values = pointer(layer, mem.KEY_CACHE, WEIGHT), pointer(layer, mem.VALUE_CACHE, WEIGHT)
        p_q_norm, p_k_norm = pointer(layer, mem.Q_NORM, WEIGHT), pointer(layer, mem.K_NORM, WEIGHT)
        for task in range(p, tasks, P):
            head, block = task // blocks, task % blocks
            lane, kv = head // KV, head % KV
            p_lane = p_qkv + lane * ROWS
            first = lane * H + kv * G
            cache = tl.cast(head, tl.int64) * ring * E
            attention_block(
                p_lane + kv * G * E, p_lane + (H + kv) * E, p_lane + (H + KV + kv) * E, p_keys + cache,
                p_values + cache, p_q_norm, p_k_norm, p_cos, p_sin, p_out + first * NB * E, p_scale + first * NB * 2,
                block, position, length, ring, eps, G, GP, E, EP, EC, BT, NB, HEAD_NORMS,
            )  # fmt: skip
        signal_to(me, mem.C_ATTENTION, SCOPE, AMD)
    return polls, blocks


@triton.jit(noinline=True)
def units_phase(
    me, layer, target, rank, p, place, limit, eps,
    R: tl.constexpr, P: tl.constexpr, LR: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, WEIGHT: tl.constexpr, LANE: tl.constexpr, NORM_LANE: tl.constexpr, SCOPE: tl.constexpr,
    AMD: tl.constexpr,
):  # fmt: skip
    """Feed-forward units silu(gate) * up (SwiGLU, arXiv 2002.05202) of every lane's normalised stream."""
    TILES: tl.constexpr = (F + BR - 1) // BR
    polls = 0
    if p < LR * TILES:
        p_w, p_norm = pointer(layer, mem.GATE_UP_WEIGHT, WEIGHT), pointer(layer, mem.FFN_NORM, WEIGHT)
        p_x, p_out = pointer(me, mem.STREAM, tl.float32), pointer(me, mem.UNITS, tl.float32)
        lane, row, rows, offset = tile_at(p, TILES, BR, F, D, LANE, LR * TILES)
        w = load_tile(p_w, offset, rows, 0, D, BR, BK)
        polls = wait_for(me, mem.C_MIDDLE, target, rank, p, place, limit, R, SCOPE)
        for item in range(p, LR * TILES, P):
            next_lane, next_row, next_rows, next_offset = tile_at(item + P, TILES, BR, F, D, LANE, LR * TILES)
            p_lane, p_scale = p_x + lane * D, p_norm + lane * NORM_LANE
            gate, w = matvec_tile(
                w, p_w, offset, rows, offset + F * D, rows, p_lane, p_scale, 0, eps, NORMED, D, BR, BK, 1, 1, 1
            )
            up, w = matvec_tile(
                w, p_w, offset + F * D, rows, next_offset, next_rows, p_lane, p_scale, 0, eps,
                NORMED, D, BR, BK, 1, 1, 1,
            )  # fmt: skip
            i_r = tl.arange(0, BR)
            tl.store(p_out + lane * F + row + i_r, gate * tl.sigmoid(gate) * up, mask=i_r < rows)
            lane, row, rows, offset = next_lane, next_row, next_rows, next_offset
        signal_to(me, mem.C_UNITS, SCOPE, AMD)
    return polls


@triton.jit(noinline=True)
def rows_phase(
    me, p_w, module, schedule, own, message_base, lane_slot, slot_lane, blocks, target, rank, p, place, limit,
    R: tl.constexpr, P: tl.constexpr, LR: tl.constexpr, LP: tl.constexpr, LOG_LP: tl.constexpr, NODES: tl.constexpr,
    S: tl.constexpr, LOG_S: tl.constexpr, VALID: tl.constexpr, GENERATIONS: tl.constexpr, ROW: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, LANE: tl.constexpr, STRIDE: tl.constexpr,
    IS_OUT: tl.constexpr, H: tl.constexpr, E: tl.constexpr, NB: tl.constexpr, NBP: tl.constexpr, SCOPE: tl.constexpr,
    AMD: tl.constexpr,
):  # fmt: skip
    """A module's partials: this program's rows of every lane's, sent, kept, and landed as the schedule says.

    The rows of a tile belong to one program in both modules of every layer, so landing needs no other signal.
    """
    TILES: tl.constexpr = (D + BR - 1) // BR
    WAIT: tl.constexpr = mem.C_ATTENTION if IS_OUT else mem.C_UNITS
    DONE: tl.constexpr = mem.C_MIDDLE if IS_OUT else mem.C_STREAM
    counted, landed = 0, 0
    if p < TILES:
        step = schedule + module * ROW
        sends, number = tl.load(step), tl.load(step + 1)
        # A partial that is not sent is kept beside the ring.
        place_in_ring = tl.where(sends != 0, (message_base + number) % GENERATIONS, GENERATIONS)
        p_ring = pointer(me, mem.RING, tl.float32) + place_in_ring * (LR * D)
        if IS_OUT:
            p_in, p_scale = pointer(me, mem.WEIGHTED, tl.float32), pointer(me, mem.WEIGHTED_SCALE, tl.float32)
        else:
            p_in = pointer(me, mem.UNITS, tl.float32)
            p_scale = p_in
        offset = tl.cast(p, tl.int64) * (BR * STRIDE)
        w = load_tile(p_w, offset, D - p * BR, 0, K, BR, BK, STRIDE)
        counted = wait_for(me, WAIT, target, rank, p, place, limit, R, SCOPE)
        for tile in range(p, TILES, P):
            rows = tile * BR + tl.arange(0, BR)
            m_rows = rows < D
            for lane in range(LR):
                turn = lane + 1 == LR
                next_lane, next_tile = tl.where(turn, 0, lane + 1), tl.where(turn, tile + P, tile)
                next_rows = tl.where(next_tile < TILES, D - next_tile * BR, 0)
                next_offset = tl.cast(next_lane, tl.int64) * LANE + tl.cast(next_tile, tl.int64) * (BR * STRIDE)
                if IS_OUT:
                    out, w = matvec_tile(
                        w, p_w, offset, D - tile * BR, next_offset, next_rows, p_in + lane * (H * NB * E),
                        p_scale + lane * (H * NB * 2), blocks, 0.0, ATTENTION, K, BR, BK, E, NB, NBP, STRIDE,
                    )  # fmt: skip
                else:
                    out, w = matvec_tile(
                        w, p_w, offset, D - tile * BR, next_offset, next_rows, p_in + lane * K, p_scale, 0, 0.0,
                        PLAIN, K, BR, BK, 1, 1, 1, STRIDE,
                    )  # fmt: skip
                tl.store(p_ring + lane * D + rows, out, mask=m_rows)
                offset = next_offset
            if sends != 0:
                # Other threads of the block stored some of what this one reads back.
                block_barrier(AMD)
                boxes = pointer(me, mem.BOXES, tl.int64)
                o_box = ((message_base + number) % GENERATIONS) * (S * D)
                if R > 1:
                    post_rows(p_ring, boxes, o_box, lane_slot, rank, rows, m_rows, R, LR, LP, LOG_LP, NODES, D, BR)
        block_barrier(AMD)
        for tile in range(p, TILES, P):
            rows = tile * BR + tl.arange(0, BR)
            landed += update_rows(
                me, p_ring, module, schedule, own, message_base, slot_lane, rows, rank, p, place, limit,
                R, LR, LP, S, LOG_S, VALID, GENERATIONS, ROW, D, BR, AMD,
            )  # fmt: skip
        signal_to(me, DONE, SCOPE, AMD)
    return counted, landed


@triton.jit
def update_rows(
    me, p_ring, module, schedule, own, message_base, slot_lane, rows, rank, p, place, limit,
    R: tl.constexpr, LR: tl.constexpr, LP: tl.constexpr, S: tl.constexpr, LOG_S: tl.constexpr, VALID: tl.constexpr,
    GENERATIONS: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """Adds to rows of this rank's streams what a module keeps of its own and what it lands; the polls it waited."""
    m_rows = rows < D
    i_l = tl.arange(0, LP)
    m_tile = (i_l < LR)[:, None] & m_rows[None, :]
    o_tile = i_l[:, None] * D + rows[None, :]
    p_x = pointer(me, mem.STREAM, tl.float32)
    p_rings = pointer(me, mem.RING, tl.float32)
    p_abort, aborts = own_abort(me, rank)
    x = tl.load(p_x + o_tile, mask=m_tile, other=0.0)
    factor = tl.load(own + module)
    if factor != 0.0:
        x += factor * tl.load(p_ring + o_tile, mask=m_tile, other=0.0)
    polls = 0
    step = schedule + module * ROW
    for j in range(tl.load(step + 2)):
        message, with_own = tl.load(step + 3 + 3 * j), tl.load(step + 4 + 3 * j)
        last = tl.load(step + 5 + 3 * j)
        place_in_ring = (message_base + message) % GENERATIONS
        p_box = tl.load(pointer(me, mem.BOXES, tl.int64) + rank).to(tl.pointer_type(tl.int32))
        p_sent = p_rings + place_in_ring * (LR * D)
        total, waited = land_rows(
            p_sent, p_box + place_in_ring * (S * D), slot_lane, rows, m_rows, last != 0, p_abort, aborts, rank, p,
            place, limit, R, S, LOG_S, VALID, D, BD, AMD,
        )  # fmt: skip
        polls += waited
        if with_own != 0:
            x += total[None, :]
        else:
            x += total[None, :] - tl.load(p_sent + o_tile, mask=m_tile, other=0.0)
    tl.store(p_x + o_tile, x, mask=m_tile)
    return polls
