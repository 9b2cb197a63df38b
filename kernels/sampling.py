"""From logits to a token on the device: greedy, temperature, top-k, top-p, penalty; draws as infer/sampling.py does.

Scores are float64. What top-k and top-p keep is a prefix of the order (score falling, id rising), found by a radix
search over integer keys whose histograms are integers, so that the order in which programs add never shows.

Legend: BV token ids of a chunk, V vocabulary.
"""

import triton
import triton.language as tl

# A key is 32 bits of score and 24 bits of id, searched in digits of 8 bits.
ID_BITS = tl.constexpr(24)
ID_MASK = tl.constexpr((1 << 24) - 1)
DIGITS = tl.constexpr(7)
BINS = tl.constexpr(256)
# Probability mass of the likeliest token, as an integer.
MASS_ONE = tl.constexpr(1 << 40)
NO_TOKEN = tl.constexpr(1 << 30)


@triton.jit
def penalised(logits, seen, penalty):
    """Float64 scores; ids seen before are made less likely on either side of zero (arXiv 1909.05858)."""
    scores = logits.to(tl.float64)
    held = tl.where(scores > 0, scores / penalty, scores * penalty)
    return tl.where(seen != 0, held, scores)


@triton.jit
def order_key(scores, ids):
    """Int64 keys that rise with the score (rounded to float32) and fall with the id; all different."""
    bits = scores.to(tl.float32).to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + (1 << 31)
    return (ordered << ID_BITS) | (ID_MASK - ids.to(tl.int64))


@triton.jit
def gumbel(ids, seed, position):
    """Standard Gumbel noise, float64, of token ids at a position: Philox-4x32-10 with counter (id // 4, position)."""
    zero = ids * 0
    c0, c1, c2, c3 = tl.philox(seed, (ids // 4).to(tl.uint32), (zero + position).to(tl.uint32), zero.to(tl.uint32),
                               zero.to(tl.uint32))  # fmt: skip
    word = tl.where(ids % 4 == 0, c0, tl.where(ids % 4 == 1, c1, tl.where(ids % 4 == 2, c2, c3)))
    uniform = (word.to(tl.int64) & 0xFFFFFFFF).to(tl.float64)
    uniform = (uniform + 0.5) / 4294967296.0
    return -tl.log(-tl.log(uniform))


@triton.jit
def mass_of(scores, best):
    """Integer probability masses relative to the best score's; at least 1, so that every token counts."""
    return tl.maximum((tl.exp(scores - best) * MASS_ONE + 0.5).to(tl.int64), 1)


@triton.jit
def better(score, token, best_score, best_token):
    """The larger score of two, and of equal ones the smaller token."""
    take = (score > best_score) | ((score == best_score) & (token < best_token))
    return tl.where(take, score, best_score), tl.where(take, token, best_token)


@triton.jit
def best_of(scores, ids, mask):
    """The largest score of a block and the smallest id that has it."""
    held = tl.where(mask, scores, float("-inf"))
    best = tl.max(held, 0)
    return best, tl.min(tl.where(mask & (held == best), ids, NO_TOKEN), 0)


@triton.jit
def add_digits(hist, keys, weights, mask, prefix, shift):
    """Adds the weights of keys that begin with `prefix` to the bins of their next digit."""
    inside = mask & ((keys >> (shift + 8)) == prefix) & (weights > 0)
    tl.atomic_add(hist + ((keys >> shift) & 255), weights, mask=inside, sem="relaxed", scope="gpu")


@triton.jit
def next_digit(hist, prefix, before, limit):
    """The digit in which the last kept key lies: (longer prefix, weight before it); kept is before < limit."""
    bins = tl.load(hist + tl.arange(0, BINS))
    ahead = before + tl.sum(bins, 0) - tl.cumsum(bins, 0)
    keep = (bins > 0) & (ahead.to(tl.float64) < limit)
    i_b = tl.arange(0, BINS)
    digit = tl.min(tl.where(keep, i_b, BINS - 1), 0)
    return prefix * BINS + digit, before + tl.sum(tl.where(i_b > digit, bins, 0), 0)
