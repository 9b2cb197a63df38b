"""Peers that are not there: the share of one rank of many on a single device, with the true kernel and protocol.

A ghost's mailbox is this rank's own, a slot further on. So what the rank sends to a peer comes back as if that peer had
sent it: every message arrives, with the rank's own values, as soon as the rank has sent its own. All stores, polls and
re-arms are real; what is missing is the link. The result is that of ranks which all have this rank's weights.
"""

from __future__ import annotations

import torch

from laneformer.kernels.buffers import Shared
from laneformer.kernels.plan import Plan, PlanError

ALIGNED_WORDS = 4


def ghost_peers(plan: Plan, device: torch.device | str = "cpu") -> list[Shared]:
    """Shared memory of all ranks as rank 0 reaches it, cleared. Raises PlanError for sizes that cannot be shifted."""
    config, ranks = plan.config, plan.ranks
    if not plan.presummed or plan.config.lm_head_type == "lane":
        raise PlanError("ghosts need a power of two of lanes, and a head that is no lane head")
    slice_words = plan.lanes * plan.head_rows
    if ranks * slice_words != config.vocab_size or config.hidden_size % ALIGNED_WORDS or slice_words % ALIGNED_WORDS:
        raise PlanError(
            f"ghosts need a vocabulary of {ranks} equal parts and sizes that are multiples of {ALIGNED_WORDS}, got "
            f"{config.vocab_size} tokens, hidden size {config.hidden_size}"
        )
    sizes = plan.shared_sizes

    def filled(count: int, value: int) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.int32, device=device)

    # The last peer's slot of the last generation ends where the mailbox does; the views only have to begin inside.
    box, logits = filled(sizes["box"], -1), filled(sizes["logit_box"], -1)
    peers = []
    for peer in range(ranks):
        abort, control = filled(sizes["abort"], 0), filled(sizes["control"], -1)
        peers.append(Shared(box[peer * config.hidden_size :], logits[peer * slice_words :], abort, control))
    return peers
