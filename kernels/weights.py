"""What the kernel and its twin read of a rank's weights (laneformer.infer.weights.RankWeights has it)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Weights(Protocol):
    """The embedding, the layers' packed matrices, the final norm, and the lanes' parts of the head."""

    lanes: tuple[int, ...]
    embedding_VD: Tensor
    layers: Any
    norm_LD: Tensor
    head_L: tuple[Tensor, ...]
