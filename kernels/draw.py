"""Drawing the next token inside a rank: every program takes some of the vocabulary, then all pick the same token.

Conventions as in kernels/phases.py; legend: kernels/decode.py.
"""

import triton
import triton.language as tl

from laneformer.kernels import memory as mem
from laneformer.kernels.exchange import tree_sum
from laneformer.kernels.phases import own_abort, signal_to, wait_for
from laneformer.kernels.sampling import (
    BINS,
    DIGITS,
    NO_TOKEN,
    add_digits,
    best_of,
    better,
    gumbel,
    mass_of,
    next_digit,
    order_key,
    penalised,
)  # fmt: skip
from laneformer.kernels.sync import block_barrier, pointer, poll_words, rearm


@triton.jit
def first_pass(
    me, p_scores, p_keys, p_seen, temperature, penalty, seed, later, t, parity, position, rank, p, place, limit,
    R: tl.constexpr, P: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, LS: tl.constexpr, LOG_LS: tl.constexpr,
    LVALID: tl.constexpr, KEEP: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """Collects this program's logits: the best score and its token (-1 if one is not a number), and the polls waited.

    `later` leaves the noise to a second pass, once it is known what top-k and top-p keep.
    """
    p_abort, aborts = own_abort(me, rank)
    p_box = tl.load(pointer(me, mem.LOGIT_BOXES, tl.int64) + rank).to(tl.pointer_type(tl.int32)) + parity * (LS * V)
    best, token, polls = float("-inf") + temperature * 0, p * 0 + NO_TOKEN, 0
    broken = p * 0
    i_s = tl.arange(0, LS)
    for chunk in range(p, (V + BV - 1) // BV, P):
        ids = chunk * BV + tl.arange(0, BV)
        m_ids = ids < V
        m_tile = (((LVALID >> i_s) & 1) == 1)[:, None] & m_ids[None, :]
        pointers = p_box + i_s[:, None] * V + ids[None, :]
        words, waited = poll_words(pointers, m_tile, i_s[:, None], p_abort, aborts, rank, p, place, limit, R, AMD)
        rearm(pointers, m_tile)
        logits = tree_sum(words.to(tl.float32, bitcast=True), LS, BV, LOG_LS)
        polls += waited
        if KEEP:
            p_kept = pointer(me, mem.LOGITS, tl.float32) + tl.cast(t, tl.int64) * V
            tl.store(p_kept + ids, logits, mask=m_ids)
        scores = penalised(logits, tl.load(p_seen + ids, mask=m_ids, other=0), penalty)
        wrong = m_ids & ((scores != scores) | (scores == float("inf")))
        broken = tl.maximum(broken, tl.max(wrong.to(tl.int32), 0))
        if temperature > 0:
            tl.store(p_keys + ids, order_key(scores, ids), mask=m_ids)
            scores = scores / temperature
            tl.store(p_scores + ids, scores, mask=m_ids)
            if later == 0:
                scores += gumbel(ids, seed, position)
        score, which = best_of(scores, ids, m_ids)
        best, token = better(score, which, best, token)
    token = tl.where((broken != 0) & (p < (V + BV - 1) // BV), -1, token)
    return best, token, polls


@triton.jit
def agree(
    me, which: tl.constexpr, best, token, target, rank, p, place, limit,
    R: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, ARRIVE: tl.constexpr, SCOPE: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """The best score and token of all programs, or token -1 if one of them met something that is no number."""
    p_best = pointer(me, mem.BEST_SCORES, tl.float64) + which * P
    p_token = pointer(me, mem.BEST_TOKENS, tl.int32) + which * P
    if p < ARRIVE:
        tl.store(p_best + p, best)
        tl.store(p_token + p, token)
        signal_to(me, mem.C_SCORES, SCOPE, AMD)
    polls = wait_for(me, mem.C_SCORES, target, rank, p, place, limit, R, SCOPE)
    i_p = tl.arange(0, PP)
    m_p = i_p < ARRIVE
    tokens = tl.load(p_token + i_p, mask=m_p, other=NO_TOKEN)
    best, token = best_of(tl.load(p_best + i_p, mask=m_p, other=float("-inf")), tokens, m_p)
    token = tl.where((tl.min(tokens, 0) < 0) | (best == float("-inf")), -1, token)
    return best, token, polls


@triton.jit
def weigh(
    p_scores, p_keys, p_masses, best, least, p, P: tl.constexpr, V: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """Probability masses of this program's tokens, as integers; 0 for those whose key is below `least`."""
    for chunk in range(p, (V + BV - 1) // BV, P):
        ids = chunk * BV + tl.arange(0, BV)
        m_ids = ids < V
        masses = mass_of(tl.load(p_scores + ids, mask=m_ids, other=0.0), best)
        kept = tl.load(p_keys + ids, mask=m_ids, other=0) >= least
        tl.store(p_masses + ids, tl.where(kept, masses, 0), mask=m_ids)


@triton.jit
def last_kept(
    me, p_keys, p_masses, p_hist, limit_value, before_signals, rank, p, place, limit,
    BY_MASS: tl.constexpr, R: tl.constexpr, P: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, ARRIVE: tl.constexpr,
    SCOPE: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """The smallest key that is kept, where tokens are while the weight before them is below a limit; and the polls.

    By count the limit is a number of tokens, by mass a share of all mass.
    """
    prefix, before, polls = limit_value.to(tl.int64) * 0, limit_value.to(tl.int64) * 0, 0
    bound = limit_value
    for digit in range(DIGITS):
        for chunk in range(p, (V + BV - 1) // BV, P):
            ids = chunk * BV + tl.arange(0, BV)
            m_ids = ids < V
            keys = tl.load(p_keys + ids, mask=m_ids, other=0)
            if BY_MASS:
                weights = tl.load(p_masses + ids, mask=m_ids, other=0)
            else:
                weights = tl.where(m_ids, 1, 0).to(tl.int64)
            add_digits(p_hist + digit * BINS, keys, weights, m_ids, prefix, 8 * (DIGITS - 1 - digit))
        signal_to(me, mem.C_SELECT, SCOPE, AMD)
        polls += wait_for(me, mem.C_SELECT, before_signals + (digit + 1) * ARRIVE, rank, p, place, limit, R, SCOPE)
        if BY_MASS:
            # The first digit's bins hold all there is.
            bound = limit_value * tl.sum(tl.load(p_hist + tl.arange(0, BINS)), 0).to(tl.float64)
        prefix, before = next_digit(p_hist + digit * BINS, prefix, before, bound)
    return prefix, polls


@triton.jit
def second_pass(
    p_scores, p_keys, least, seed, position, p, P: tl.constexpr, V: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """The best of this program's kept tokens once noise is added, and its score."""
    best, token = float("-inf") + seed.to(tl.float64) * 0, p * 0 + NO_TOKEN
    for chunk in range(p, (V + BV - 1) // BV, P):
        ids = chunk * BV + tl.arange(0, BV)
        m_ids = ids < V
        kept = m_ids & (tl.load(p_keys + ids, mask=m_ids, other=0) >= least)
        scores = tl.load(p_scores + ids, mask=m_ids, other=0.0) + gumbel(ids, seed, position)
        score, which = best_of(scores, ids, kept)
        best, token = better(score, which, best, token)
    return best, token


@triton.jit(noinline=True)
def draw_phase(
    me, launch, knobs, t, parity, before, select_before, position, rank, p, place, limit,
    R: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, LS: tl.constexpr,
    LOG_LS: tl.constexpr, LVALID: tl.constexpr, KEEP: tl.constexpr, SCOPE: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """The next token: every program takes some of the vocabulary, then all pick among the programs' best.

    Returns (token or -1 if the logits are not numbers, arrivals at the counters scores and select, polls of counters,
    polls of the logit box).
    """
    CHUNKS: tl.constexpr = (V + BV - 1) // BV
    ARRIVE: tl.constexpr = CHUNKS if CHUNKS < P else P
    p_scores, p_keys = pointer(me, mem.SCORES, tl.float64), pointer(me, mem.KEYS, tl.int64)
    p_masses, p_seen = pointer(me, mem.MASSES, tl.int64), pointer(me, mem.SEEN, tl.int8)
    p_hist = pointer(me, mem.HISTOGRAMS, tl.int64)
    temperature, top_p = tl.load(knobs + mem.TEMPERATURE), tl.load(knobs + mem.TOP_P)
    penalty = tl.load(knobs + mem.PENALTY)
    seed, top_k = tl.load(launch + mem.SEED), tl.load(launch + mem.TOP_K)
    by_rank = (temperature > 0) & (top_k > 0) & (top_k < V)
    by_mass = (temperature > 0) & (top_p < 1)
    if p == 0:
        # The other half was used a token ago, and is used again in the next.
        i_h = tl.arange(0, BINS)
        for digit in range(2 * DIGITS):
            tl.store(p_hist + ((1 - parity) * 2 * DIGITS + digit) * BINS + i_h, i_h.to(tl.int64) * 0)
    best, token, landed = first_pass(
        me, p_scores, p_keys, p_seen, temperature, penalty, seed, by_rank | by_mass, t, parity, position, rank, p,
        place, limit, R, P, V, BV, LS, LOG_LS, LVALID, KEEP, AMD,
    )  # fmt: skip
    best, token, counted = agree(
        me, 0, best, token, before + ARRIVE, rank, p, place, limit, R, P, PP, ARRIVE, SCOPE, AMD
    )
    arrivals, selects = ARRIVE, 0
    if (by_rank | by_mass) & (token >= 0):
        if p < ARRIVE:
            least = top_k * 0
            p_hist += parity * 2 * DIGITS * BINS
            if by_rank:
                key, polls = last_kept(me, p_keys, p_masses, p_hist, top_k.to(tl.float64), select_before, rank, p,
                                       place, limit, 0, R, P, V, BV, ARRIVE, SCOPE, AMD)  # fmt: skip
                least = tl.maximum(least, key)
                counted += polls
                selects += DIGITS * ARRIVE
            if by_mass:
                weigh(p_scores, p_keys, p_masses, best, least, p, P, V, BV)
                block_barrier(AMD)
                key, polls = last_kept(me, p_keys, p_masses, p_hist + DIGITS * BINS, top_p,
                                       select_before + selects, rank, p, place, limit, 1, R, P, V, BV, ARRIVE,
                                       SCOPE, AMD)  # fmt: skip
                least = tl.maximum(least, key)
                counted += polls
                selects += DIGITS * ARRIVE
            best, token = second_pass(p_scores, p_keys, least, seed, position, p, P, V, BV)
        best, token, polls = agree(
            me, 1, best, token, before + 2 * ARRIVE, rank, p, place, limit, R, P, PP, ARRIVE, SCOPE, AMD
        )
        counted += polls
        arrivals += ARRIVE
    return token, arrivals, selects, counted, landed
