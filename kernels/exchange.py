"""The lane exchange: rows of this rank's partials go into every rank's mailbox, and sums over all lanes come out.

Legend: R ranks, LR lanes of a rank, S slots of a message (padded to a power of two), D hidden, BD rows of a tile.
A ring holds this rank's own partials [G + 1, LR, D]; a mailbox holds messages [G, S, D] as words.
"""

import triton
import triton.language as tl

from laneformer.kernels.sync import pointer, poll_words, rearm, to_words


@triton.jit
def tree_sum(x, COUNT: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    """Sum of x [COUNT, WIDTH] over the first dimension as a balanced binary tree; COUNT = 2 ** STEPS."""
    for step in tl.static_range(STEPS):
        x = tl.sum(tl.reshape(x, (COUNT >> (step + 1), 2, WIDTH)), 1)
    return tl.reshape(x, (WIDTH,))


@triton.jit
def post_rows(
    p_ring, boxes, o_box, lane_slot, rank, rows, m_rows,
    R: tl.constexpr, LR: tl.constexpr, LP: tl.constexpr, LOG_LP: tl.constexpr, NODES: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Sends rows of the partials at `p_ring` [LR, D] to every rank: their tree sum, or each lane's if NODES > 1.

    boxes: int64 addresses of all ranks' mailboxes; o_box: the message's offset in words; lane_slot: the slot of each
    row that is sent.
    """
    i_l = tl.arange(0, LP)
    m_tile = (i_l < LR)[:, None] & m_rows[None, :]
    values = tl.load(p_ring + i_l[:, None] * D + rows[None, :], mask=m_tile, other=0.0)
    if NODES == 1:
        words = to_words(tree_sum(values, LP, BD, LOG_LP))
        slot = tl.load(lane_slot)
        for step in range(R):
            peer = (rank + 1 + step) % R
            p_box = pointer(boxes, peer, tl.int32) + o_box + slot * D
            tl.store(p_box + rows, words, mask=m_rows, cache_modifier=".wt")
    else:
        words = to_words(values)
        slots = tl.load(lane_slot + i_l, mask=i_l < LR, other=0)
        for step in range(R):
            peer = (rank + 1 + step) % R
            p_box = pointer(boxes, peer, tl.int32) + o_box
            tl.store(p_box + slots[:, None] * D + rows[None, :], words, mask=m_tile, cache_modifier=".wt")


@triton.jit
def land_rows(
    p_ring, p_box, slot_lane, rows, m_rows, last, p_abort, aborts, rank, program, place, limit,
    R: tl.constexpr, S: tl.constexpr, LOG_S: tl.constexpr, VALID: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    AMD: tl.constexpr,
):  # fmt: skip
    """Rows of a message's sum over all lanes, float32 [BD], and the polls waited; `last` re-arms what was read.

    With one rank the partials come from the ring, through slot_lane [S], the lane of each slot or -1.
    """
    i_s = tl.arange(0, S)
    if R == 1:
        lane = tl.load(slot_lane + i_s)
        m_tile = (lane >= 0)[:, None] & m_rows[None, :]
        values = tl.load(p_ring + lane[:, None] * D + rows[None, :], mask=m_tile, other=0.0)
        return tree_sum(values, S, BD, LOG_S), 0
    else:
        m_tile = (((VALID >> i_s) & 1) == 1)[:, None] & m_rows[None, :]
        pointers = p_box + i_s[:, None] * D + rows[None, :]
        words, polls = poll_words(pointers, m_tile, i_s[:, None], p_abort, aborts, rank, program, place, limit, R, AMD)
        if last:
            rearm(pointers, m_tile)
        return tree_sum(words.to(tl.float32, bitcast=True), S, BD, LOG_S), polls
