"""The loss of a batch: cross-entropy summed over the tokens that are learnt, and the z-loss.

Shape suffixes: B batch, S positions, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneformer.lanes import ModelExchange
from laneformer.model import Laneformer

# Target of a position that is not learnt, which the loss leaves out.
IGNORED = -100


def count_targets(targets_BS: Tensor) -> int:
    """How many tokens are learnt."""
    return int((targets_BS != IGNORED).sum())


def sums(logits_BSV: Tensor, targets_BS: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """What is minimised and the cross-entropy alone, both summed over the targets, in nats.

    z_loss weighs the squared log-normaliser of each target's softmax (arXiv 2204.02311, section 5).
    """
    logits = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32)).flatten(0, 1)
    targets = targets_BS.flatten()
    nats = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    if not z_loss:
        return nats, nats.detach()
    squares = torch.logsumexp(logits, -1).square()
    return nats + z_loss * squares[targets != IGNORED].sum(), nats.detach()


class SummedLoss(nn.Module):
    """A model and its exchange as one module whose output is the summed loss, so that wrappers see all of it."""

    def __init__(self, model: Laneformer, exchange: ModelExchange | None, z_loss: float) -> None:
        super().__init__()
        self.model, self.exchange, self.z_loss = model, exchange, z_loss

    def forward(self, inputs_BS: Tensor, targets_BS: Tensor, documents_BS: Tensor | None) -> tuple[Tensor, Tensor]:
        """`sums` of one micro-batch."""
        logits_BSV = self.model(inputs_BS, exchange=self.exchange, documents_BS=documents_BS)
        return sums(logits_BSV, targets_BS, self.z_loss)
