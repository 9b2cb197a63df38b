"""Each tile of the persistent kernel as a function of tensors, beside its PyTorch twin of the same name and signature.

Twins: laneformer/ops.py (rms_norm, tree_sum) and laneformer/decode_ops.py, which define what comes out. Here sums are
float32 and results float32, weights float32, float16 or bfloat16. Tensors lie on a GPU, or on the CPU where
TRITON_INTERPRET=1 was set before triton was imported. Sizes are whatever the twins take: tiles are masked. ValueError
says what does not fit. Shape suffixes: laneformer/decode_ops.py.
"""

from __future__ import annotations

from torch import Tensor

from laneformer.kernels import standalone_launches as launches


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] divided by its root mean square over D, times weight (broadcast to x), in x's type."""
    return launches.rms_norm(x, weight, eps).run()


def tree_sum(x_L: Tensor) -> Tensor:
    """Sum over the first dimension as a balanced binary tree, the same bits as the twin's."""
    return launches.tree_sum(x_L).run()


def matvec(x_LI: Tensor, weight_LOI: Tensor) -> Tensor:
    """Each lane's matrix times its vector, [L, O]: the down projection."""
    return launches.matvec(x_LI, weight_LOI).run()


def normed_matvec(x_LD: Tensor, norm_LD: Tensor, weight_LOD: Tensor, eps: float) -> Tensor:
    """Each lane's matrix times its vector after RMSNorm, [L, O]: the fused query, key and value projections."""
    return launches.normed_matvec(x_LD, norm_LD, weight_LOD, eps).run()


def gated_units(x_LD: Tensor, norm_LD: Tensor, gate_up_LOD: Tensor, eps: float) -> Tensor:
    """silu(gate) * up of each lane's vector after RMSNorm, [L, O / 2]; gate's rows come first."""
    return launches.gated_units(x_LD, norm_LD, gate_up_LOD, eps).run()


def decode_attention(
    qkv_LO: Tensor, keys_LKTE: Tensor, values_LKTE: Tensor, position: int, cos_E: Tensor, sin_E: Tensor,
    window: int | None = None, q_norm_E: Tensor | None = None, k_norm_E: Tensor | None = None, eps: float = 0.0,
    block: int = 128,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Appends the new position to the cache and attends to it, a block of positions at a time.

    Returns weighted values [L, H, N, E] and scales [L, H, N, 2]; blocks that hold no position are left unwritten.
    """
    return launches.decode_attention(
        qkv_LO, keys_LKTE, values_LKTE, position, cos_E, sin_E, window, q_norm_E, k_norm_E, eps, block
    ).run()


def attention_output(weighted_LHNE: Tensor, scale_LHN2: Tensor, blocks: int, weight_LOI: Tensor) -> Tensor:
    """The output projection [L, O] of attention, its first `blocks` blocks of positions combined on the way in."""
    return launches.attention_output(weighted_LHNE, scale_LHN2, blocks, weight_LOI).run()


def post_partials(partials_RLD: Tensor, boxes_R: tuple[Tensor, ...]) -> None:
    """Sends each rank's partials (float32) to every rank's box, int32 [S, D]; one rank alone sends nothing."""
    return launches.post_partials(partials_RLD, boxes_R).run()


def land_partials(partials_RLD: Tensor, boxes_R: tuple[Tensor, ...], last: bool) -> Tensor:
    """Each rank's sum over all lanes, [R, D], from its own box; `last` makes the box ready for another message."""
    return launches.land_partials(partials_RLD, boxes_R, last).run()


def post_logits(
    x_LD: Tensor, norm_LD: Tensor | None, head_LCD: Tensor, eps: float, first_lane: int, boxes_R: tuple[Tensor, ...]
) -> None:
    """Sends logits of lanes' slices of the head to every rank's box, int32 [V]; no norm: x is normalised already."""
    return launches.post_logits(x_LD, norm_LD, head_LCD, eps, first_lane, boxes_R).run()


def gumbel(ids_C: Tensor, seed: int, position: int) -> Tensor:
    """Standard Gumbel noise of token ids at a position, float64 [C]."""
    return launches.gumbel(ids_C, seed, position).run()


def draw(
    logits_V: Tensor, seen_V: Tensor, temperature: float, top_k: int, top_p: float, penalty: float, seed: int,
    position: int,
) -> Tensor:  # fmt: skip
    """The token for `position`, int32 [1]; -1 where the logits are not numbers."""
    return launches.draw(logits_V, seen_V, temperature, top_k, top_p, penalty, seed, position).run()
