"""The reference operations of decoding one token, in plain PyTorch: what each tile of the persistent kernel computes.

Sums are kept in the accumulation type, so that float64 in is float64 throughout. Shape suffixes: R ranks, L lanes (of a
rank), D hidden, H query heads of a lane, K key-value heads of a lane, T positions of the cache, E head size (E / 2 for
angles), N blocks of positions, S slots of a mailbox, V vocabulary, C a lane's share of it, I and O a weight's input and
output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .ops import accumulation_dtype, gated_mlp, rms_norm, rope, tree_sum

EMPTY_WORD = -1
OTHER_NAN = 0x7FC00000
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
MASK_32 = 0xFFFFFFFF


def matvec(x_LI: Tensor, weight_LOI: Tensor) -> Tensor:
    """Each lane's matrix times its vector, [L, O]; one matrix may serve all lanes."""
    wide = accumulation_dtype(weight_LOI.dtype)
    return torch.matmul(weight_LOI.to(wide), x_LI.to(wide).unsqueeze(-1)).squeeze(-1)


def normed_matvec(x_LD: Tensor, norm_LD: Tensor, weight_LOD: Tensor, eps: float) -> Tensor:
    """Each lane's matrix times its vector after RMSNorm, [L, O]."""
    wide = accumulation_dtype(weight_LOD.dtype)
    return matvec(rms_norm(x_LD.to(wide), norm_LD.to(wide), eps), weight_LOD)


def gated_units(x_LD: Tensor, norm_LD: Tensor, gate_up_LOD: Tensor, eps: float) -> Tensor:
    """silu(gate) * up of each lane's vector after RMSNorm, [L, O / 2]; gate's rows come first."""
    return gated_mlp(*normed_matvec(x_LD, norm_LD, gate_up_LOD, eps).chunk(2, -1))


def decode_attention(
    qkv_LO: Tensor, keys_LKTE: Tensor, values_LKTE: Tensor, position: int, cos_E: Tensor, sin_E: Tensor,
    window: int | None = None, q_norm_E: Tensor | None = None, k_norm_E: Tensor | None = None, eps: float = 0.0,
    block: int = 128,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Appends the new position to the cache and attends to it, a block of positions at a time.

    The cache is a ring: position p lies in slot p % T. The last `window` positions are seen (None: all), cut into
    blocks from the oldest on. Returns weighted values [L, H, N, E] and, for each block, the largest score and the sum
    of weights [L, H, N, 2]; N blocks cover the whole cache, and those without a position hold 0 and (-inf, 0).
    """
    lanes, kv_heads, ring, size = keys_LKTE.shape
    heads = qkv_LO.shape[1] // size - 2 * kv_heads
    wide = accumulation_dtype(qkv_LO.dtype)
    q, k, v = qkv_LO.to(wide).unflatten(1, (-1, size)).split((heads, kv_heads, kv_heads), 1)
    if q_norm_E is not None and k_norm_E is not None:
        q, k = rms_norm(q, q_norm_E, eps), rms_norm(k, k_norm_E, eps)
    keys_LKTE[:, :, position % ring] = rope(k, cos_E, sin_E).to(keys_LKTE.dtype)
    values_LKTE[:, :, position % ring] = v.to(values_LKTE.dtype)
    length = position + 1 if window is None else min(window, position + 1)
    slots = torch.arange(position + 1 - length, position + 1, device=qkv_LO.device) % ring
    keys, values = (cache[:, :, slots].to(wide).repeat_interleave(heads // kv_heads, 1)
                    for cache in (keys_LKTE, values_LKTE))  # fmt: skip
    scores = (rope(q, cos_E, sin_E).unsqueeze(2) * keys).sum(-1) / size**0.5
    blocks = -(-ring // block)
    out, scale = q.new_zeros(lanes, heads, blocks, size), q.new_zeros(lanes, heads, blocks, 2)
    scale[..., 0] = -torch.inf
    for b, start in enumerate(range(0, length, block)):
        part = scores[:, :, start : start + block]
        largest = part.max(-1, keepdim=True).values
        weights = (part - largest).exp()
        out[:, :, b] = (weights.unsqueeze(-1) * values[:, :, start : start + block]).sum(2)
        scale[:, :, b] = torch.cat((largest, weights.sum(-1, keepdim=True)), -1)
    return out, scale


def attention_output(weighted_LHNE: Tensor, scale_LHN2: Tensor, blocks: int, weight_LOI: Tensor) -> Tensor:
    """The output projection [L, O] of attention, its first `blocks` blocks of positions combined on the way in.

    Each block counts with exp(its largest score - the largest of all); Milakov and Gimelshein, arXiv 1805.02867.
    """
    most, total = scale_LHN2[:, :, :blocks].unbind(-1)
    share = (most - most.max(-1, keepdim=True).values).exp()
    joined = (weighted_LHNE[:, :, :blocks] * share.unsqueeze(-1)).sum(2)
    return matvec((joined / (total * share).sum(-1, keepdim=True)).flatten(1), weight_LOI)


def to_words(x: Tensor) -> Tensor:
    """Float32 bits as int32; a value whose bits are those of an empty mailbox word becomes another NaN."""
    words = x.to(torch.float32).contiguous().view(torch.int32)
    return torch.where(words == EMPTY_WORD, OTHER_NAN, words)


def tree_slots(lanes: int) -> list[int]:
    """The leaf of each lane in a binary tree whose leaves are a power of two, as `tree_sum` halves the lanes."""
    if lanes == 1:
        return [0]
    width, half = 1 << (lanes - 1).bit_length(), lanes // 2
    ratio = width // 2
    left, right = tree_slots(half), tree_slots(lanes - half)
    spread = [(slots, ratio // (1 << (len(slots) - 1).bit_length())) for slots in (left, right)]
    (left, by), (right, other) = spread
    return [slot * by for slot in left] + [ratio + slot * other for slot in right]


def post_partials(partials_RLD: Tensor, boxes_R: tuple[Tensor, ...]) -> None:
    """Writes each rank's partials into every rank's box, int32 [S, D]; one rank alone writes nothing.

    Where the lanes are a power of two in number a rank sends their sum, in its own slot; otherwise each lane has the
    slot that its place in the balanced tree gives it.
    """
    ranks, lanes = partials_RLD.shape[:2]
    places, count = tree_slots(ranks * lanes), ranks * lanes
    if ranks == 1:
        return
    presummed = count & (count - 1) == 0
    for box in boxes_R:
        for rank, partials_LD in enumerate(partials_RLD):
            if presummed:
                box[rank] = to_words(tree_sum(partials_LD))
            else:
                box[places[rank * lanes : (rank + 1) * lanes]] = to_words(partials_LD)


def land_partials(partials_RLD: Tensor, boxes_R: tuple[Tensor, ...], last: bool) -> Tensor:
    """Each rank's sum over all lanes, [R, D], from its own box; `last` makes the box ready for another message."""
    ranks, lanes = partials_RLD.shape[:2]
    if ranks == 1:
        return tree_sum(partials_RLD[0])[None]
    count = ranks * lanes
    filled = list(range(ranks)) if count & (count - 1) == 0 else tree_slots(count)
    totals = torch.stack([tree_sum(box[filled].view(torch.float32)) for box in boxes_R])
    if last:
        for box in boxes_R:
            box[filled] = EMPTY_WORD
    return totals


def post_logits(
    x_LD: Tensor, norm_LD: Tensor | None, head_LCD: Tensor, eps: float, first_lane: int, boxes_R: tuple[Tensor, ...]
) -> None:
    """Writes logits of lanes' slices of the head into every rank's box, int32 [V]; no norm: x is normalised already.

    Lane l's rows are the tokens from (first_lane + l) * C on; rows beyond V are left out.
    """
    logits_LC = matvec(x_LD, head_LCD) if norm_LD is None else normed_matvec(x_LD, norm_LD, head_LCD, eps)
    start, words = first_lane * logits_LC.shape[1], to_words(logits_LC).flatten()
    for box in boxes_R:
        end = min(start + len(words), len(box))
        box[start:end] = words[: end - start]


def philox(counter_4C: Tensor, seed: int) -> Tensor:
    """Philox-4x32-10 (Salmon et al., SC 2011): 32-bit words [4, C], held in int64, from counters and a 64-bit key."""
    c0, c1, c2, c3 = counter_4C.to(torch.int64)
    k0, k1 = seed & MASK_32, seed >> 32
    for _ in range(PHILOX_ROUNDS):
        # Products wrap around at 64 bits, which leaves their bits right.
        low, high = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (high >> 32 & MASK_32) ^ c1 ^ k0,
            high & MASK_32,
            (low >> 32 & MASK_32) ^ c3 ^ k1,
            low & MASK_32,
        )
        k0, k1 = (k0 + PHILOX_WEYL[0]) & MASK_32, (k1 + PHILOX_WEYL[1]) & MASK_32
    return torch.stack((c0, c1, c2, c3))


def gumbel(ids_C: Tensor, seed: int, position: int) -> Tensor:
    """Standard Gumbel noise of token ids at a position, float64 [C]: word id % 4 of Philox at (id // 4, position)."""
    ids = ids_C.to(torch.int64)
    zero = torch.zeros_like(ids)
    words = philox(torch.stack((ids // 4, zero + position, zero, zero)), seed)
    uniform = (words.gather(0, (ids % 4)[None])[0].to(torch.float64) + 0.5) / 2.0**32
    return -(-uniform.log()).log()


def draw(
    logits_V: Tensor, seen_V: Tensor, temperature: float, top_k: int, top_p: float, penalty: float, seed: int,
    position: int,
) -> Tensor:  # fmt: skip
    """The token for `position`, int32 [1]; -1 where the logits are not numbers. Ties go to the smallest id.

    seen_V marks the ids that the repetition penalty holds for (arXiv 1909.05858). Temperature 0 is greedy; top_k 0 and
    top_p 1 are off. The noise added to scores / temperature makes it a draw (Gumbel-max).
    """
    scores = logits_V.to(torch.float64)
    scores = torch.where(seen_V != 0, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    if not scores.max().isfinite():
        return torch.tensor([-1], dtype=torch.int32, device=logits_V.device)
    if temperature > 0:
        scores = scores / temperature
        order = scores.argsort(descending=True, stable=True)
        order = order[:top_k] if 0 < top_k < len(order) else order
        weights = (scores[order] - scores[order[0]]).exp()
        if top_p < 1:
            order = order[weights.cumsum(0) - weights < top_p * weights.sum()]
        kept = order.sort().values
        best = kept[(scores[kept] + gumbel(kept, seed, position)).argmax()]
    else:
        best = scores.argmax()
    return best.to(torch.int32)[None]
