"""The persistent kernel: one launch decodes many tokens on all programs of one or several ranks.

Everything it needs to know comes from kernels/plan.py, through kernels/buffers.py. Legend of the sizes: R ranks, P
programs of a rank, N layers, LANES lanes of the model, LR of a rank (LP padded), D hidden, H query heads of a lane, KV
its key-value heads, E head size, F feed-forward units of a lane, V vocabulary, C rows of a lane's slice of the head, S
slots of a message, NB blocks of BT positions, BR_ and BK_ rows and columns of a matrix's tile, BV tokens of a chunk.
"""

import triton
import triton.language as tl

from laneformer.kernels import memory as mem
from laneformer.kernels.draw import draw_phase
from laneformer.kernels.ending import NORMED_SUM, embed_phase, final_phase, head_phase
from laneformer.kernels.phases import attention_phase, own_abort, qkv_phase, rows_phase, units_phase
from laneformer.kernels.sync import aborted, give_up, pointer, volatile


@triton.jit
def post_control(me, number, R: tl.constexpr, AMD: tl.constexpr):
    """Rank 0 tells every rank whether the host has cancelled, for token `number`, which all then act upon alike."""
    # Host memory: read, never added to.
    one = tl.arange(0, 1)
    cancel = tl.max(volatile(pointer(me, mem.CANCEL, tl.int32) + one, one == 0, AMD), 0)
    controls = pointer(me, mem.CONTROLS, tl.int64)
    for r in range(R):
        p_control = tl.load(controls + r).to(tl.pointer_type(tl.int32))
        tl.store(p_control + number % 4, number * 2 + (cancel != 0).to(tl.int32), cache_modifier=".wt")


@triton.jit
def cancelled(me, number, rank, p, place, limit, R: tl.constexpr):
    """What rank 0 said about token `number`: 1 to stop."""
    p_control = tl.load(pointer(me, mem.CONTROLS, tl.int64) + rank).to(tl.pointer_type(tl.int32)) + number % 4
    p_abort, aborts = own_abort(me, rank)
    word = tl.atomic_add(p_control, 0, sem="acquire", scope="sys")
    polls = 0
    stop = 0
    while ((word >> 1) != number) & (stop == 0):
        polls += 1
        word = tl.atomic_add(p_control, 0, sem="acquire", scope="sys")
        if polls % 16 == 0:
            stop = aborted(p_abort)
        if (polls >= limit) & (stop == 0) & ((word >> 1) != number):
            give_up(p_abort, aborts, rank, 1, p, place, 0, -1, R)
            stop = 1
    return word & 1


@triton.jit
def is_stop(stops, count, token):
    """1 if the token is among the first `count` stop ids."""
    found = 0
    for i in range(count):
        found = found | (tl.load(stops + i) == token).to(tl.int32)
    return found


@triton.jit
def decode(
    ranks, launch, knobs, stops, schedule, own, lane_slot, slot_lane, cos, sin, eps,
    R: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, LR: tl.constexpr,
    LP: tl.constexpr, LOG_LP: tl.constexpr, NODES: tl.constexpr, S: tl.constexpr, LOG_S: tl.constexpr,
    VALID: tl.constexpr, GENERATIONS: tl.constexpr, MESSAGES: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr,
    H: tl.constexpr, KV: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, EC: tl.constexpr, GP: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr, NBP: tl.constexpr,
    BR_QKV: tl.constexpr, BK_QKV: tl.constexpr, BR_ROWS: tl.constexpr, BK_OUT: tl.constexpr, BR_UNITS: tl.constexpr,
    BK_UNITS: tl.constexpr, BK_DOWN: tl.constexpr, BR_HEAD: tl.constexpr, BK_HEAD: tl.constexpr, BV: tl.constexpr,
    LS: tl.constexpr, LOG_LS: tl.constexpr, LVALID: tl.constexpr, KIND: tl.constexpr, HEAD_NORMS: tl.constexpr,
    WEIGHT: tl.constexpr, QKV_LANE: tl.constexpr, OUT_LANE: tl.constexpr, UNITS_LANE: tl.constexpr,
    DOWN_LANE: tl.constexpr, NORM_LANE: tl.constexpr, FINAL_LANE: tl.constexpr, OUT_ROW: tl.constexpr,
    DOWN_ROW: tl.constexpr, HEAD_ALIGN: tl.constexpr, KEEP: tl.constexpr, SCOPE: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """Decodes up to TOKENS_TO_DECODE tokens after FIRST_TOKEN; grid (ranks on this device * P,).

    ranks: int64 [ranks on this device, RANK_WORDS] of kernels/memory.py. schedule [2N + 1, ROW] and own [2N] as
    Plan.schedule_rows gives them; lane_slot [ranks on this device, NODES]; cos, sin [positions, E / 2].
    """
    pid = tl.program_id(0)
    p = pid % P
    me = ranks + (pid // P) * mem.RANK_WORDS
    rank = tl.load(me + mem.RANK).to(tl.int32)
    lane_slot += (pid // P) * NODES
    layers = pointer(me, mem.LAYERS, tl.int64)
    targets = pointer(me, mem.TARGETS, tl.int32)
    limit = tl.load(launch + mem.WAIT_LIMIT).to(tl.int32)
    count = tl.load(launch + mem.TOKENS_TO_DECODE).to(tl.int32)
    first_position = tl.load(launch + mem.POSITION).to(tl.int32)
    decoded_before = tl.load(launch + mem.TOKENS_BEFORE)
    token = tl.load(launch + mem.FIRST_TOKEN).to(tl.int32)
    num_stops = tl.load(launch + mem.STOP_IDS).to(tl.int32)
    stream, qkv = tl.load(targets + mem.C_STREAM), tl.load(targets + mem.C_QKV)
    attended, middle = tl.load(targets + mem.C_ATTENTION), tl.load(targets + mem.C_MIDDLE)
    units, final = tl.load(targets + mem.C_UNITS), tl.load(targets + mem.C_FINAL)
    scored, selected = tl.load(targets + mem.C_SCORES), tl.load(targets + mem.C_SELECT)
    ROWS: tl.constexpr = (H + 2 * KV) * E
    TILES: tl.constexpr = (D + BR_ROWS - 1) // BR_ROWS
    ROW_PROGRAMS: tl.constexpr = TILES if TILES < P else P
    QKV_ITEMS: tl.constexpr = LR * ((ROWS + BR_QKV - 1) // BR_QKV)
    QKV_PROGRAMS: tl.constexpr = QKV_ITEMS if QKV_ITEMS < P else P
    UNIT_ITEMS: tl.constexpr = LR * ((F + BR_UNITS - 1) // BR_UNITS)
    UNIT_PROGRAMS: tl.constexpr = UNIT_ITEMS if UNIT_ITEMS < P else P
    counted = decoded_before * 0
    landed = decoded_before * 0
    t = count * 0
    running = count * 0 + 1
    while (t < count) & (running != 0):
        position = first_position + t
        number = ((decoded_before + t) & 0x1FFFFFFF).to(tl.int32)
        message_base = (((decoded_before + t) * MESSAGES) % GENERATIONS).to(tl.int32)
        parity = ((decoded_before + t) % 2).to(tl.int32)
        place = t << 16
        p_cos, p_sin = cos + position * (E // 2), sin + position * (E // 2)
        embed_phase(me, token, p, P, LR, LP, D, BR_ROWS, WEIGHT, SCOPE, AMD)
        stream += P
        if (rank == 0) & (p == 0):
            post_control(me, number, R, AMD)
        for index in range(N):
            layer = layers + index * mem.LAYER_WORDS
            here = place + (2 * index << 4)
            counted += qkv_phase(
                me, layer, stream, rank, p, here, limit, eps, R, P, LR, D, ROWS, BR_QKV, BK_QKV, WEIGHT,
                QKV_LANE, NORM_LANE, SCOPE, AMD,
            )  # fmt: skip
            qkv += QKV_PROGRAMS
            polls, blocks = attention_phase(
                me, layer, position, p_cos, p_sin, qkv, rank, p, here + 1, limit, eps,
                R, P, LR, H, KV, E, EP, EC, GP, BT, NB, WEIGHT, HEAD_NORMS, SCOPE, AMD,
            )  # fmt: skip
            counted += polls
            attended += tl.minimum(LR * KV * blocks, P)
            polls, waited = rows_phase(
                me, pointer(layer, mem.OUT_WEIGHT, WEIGHT), 2 * index, schedule, own, message_base,
                lane_slot, slot_lane, blocks, attended, rank, p, here + 2, limit, R, P, LR, LP, LOG_LP, NODES,
                S, LOG_S, VALID, GENERATIONS, ROW, D, H * E, BR_ROWS, BK_OUT, OUT_LANE, OUT_ROW, True, H, E,
                NB, NBP, SCOPE, AMD,
            )  # fmt: skip
            counted += polls
            landed += waited
            middle += ROW_PROGRAMS
            here += 16
            counted += units_phase(me, layer, middle, rank, p, here + 3, limit, eps, R, P, LR, D, F, BR_UNITS, BK_UNITS,
                                   WEIGHT, UNITS_LANE, NORM_LANE, SCOPE, AMD)  # fmt: skip
            units += UNIT_PROGRAMS
            polls, waited = rows_phase(
                me, pointer(layer, mem.DOWN_WEIGHT, WEIGHT), 2 * index + 1, schedule, own, message_base, lane_slot,
                slot_lane, 0, units, rank, p, here + 4, limit, R, P, LR, LP, LOG_LP, NODES, S, LOG_S, VALID,
                GENERATIONS, ROW, D, F, BR_ROWS, BK_DOWN, DOWN_LANE, DOWN_ROW, False, H, E, NB, NBP, SCOPE, AMD,
            )  # fmt: skip
            counted += polls
            landed += waited
            stream += ROW_PROGRAMS
        here = place + (2 * N << 4)
        if KIND <= NORMED_SUM:
            polls, waited = final_phase(
                me, MESSAGES - 1, message_base, lane_slot, slot_lane, stream, rank, p, here + 5, limit, eps, KIND, R, P,
                LANES, LR, LP, LOG_LP, NODES, S, LOG_S, VALID, GENERATIONS, D, BR_ROWS, BK_HEAD, WEIGHT, FINAL_LANE,
                SCOPE, AMD,
            )  # fmt: skip
            counted += polls
            landed += waited
            final += ROW_PROGRAMS
        if KIND <= NORMED_SUM:
            ready = final
        else:
            ready = stream
        counted += head_phase(
            me, lane_slot, parity, ready, rank, p, here + 6, limit, eps, KIND, R, P, LR, LP, LOG_LP, NODES, LS, V, C, D,
            BR_HEAD, BK_HEAD, WEIGHT, FINAL_LANE, HEAD_ALIGN, SCOPE, AMD,
        )  # fmt: skip
        token, more_scored, more_selected, polls, waited = draw_phase(
            me, launch, knobs, t, parity, scored, selected, position + 1, rank, p, here + 7, limit,
            R, P, PP, V, BV, LS, LOG_LS, LVALID, KEEP, SCOPE, AMD,
        )  # fmt: skip
        scored += more_scored
        selected += more_selected
        counted += polls
        landed += waited
        p_abort, aborts = own_abort(me, rank)
        # Who was told to stop has no logits either, which is no fault of the model. Peers see it by themselves.
        if (token < 0) & (p == 0) & (aborted(p_abort) == 0):
            give_up(p_abort, aborts, rank, 2, p, here + 7, position + 1, -1, 0)
        stop = cancelled(me, number, rank, p, here + 8, limit, R)
        stop = stop | is_stop(stops, num_stops, token) | (token < 0).to(tl.int32) | aborted(p_abort)
        if p == 0:
            if token >= 0:
                tl.store(pointer(me, mem.TOKENS, tl.int32) + t, token, cache_modifier=".wt")
                tl.store(pointer(me, mem.SEEN, tl.int8) + token, 1)
        t += 1
        running = (stop == 0).to(tl.int32)
    if p == 0:
        tl.store(pointer(me, mem.RESULT, tl.int32), t)
        tl.store(targets + mem.C_STREAM, stream)
        tl.store(targets + mem.C_QKV, qkv)
        tl.store(targets + mem.C_ATTENTION, attended)
        tl.store(targets + mem.C_MIDDLE, middle)
        tl.store(targets + mem.C_UNITS, units)
        tl.store(targets + mem.C_FINAL, final)
        tl.store(targets + mem.C_SCORES, scored)
        tl.store(targets + mem.C_SELECT, selected)
    waits = pointer(me, mem.WAITS, tl.int64) + p * 2
    tl.store(waits, counted)
    tl.store(waits + 1, landed)
