"""Muon for lane-first matrices: momentum whose update is made orthogonal, each lane's matrix by itself.

torch.optim.Muon takes two-dimensional matrices only. Here a parameter is [L, O, I], and a lane's matrix is what a rank
owns, so each is orthogonalised alone: the update of a lane does not depend on where the other lanes live.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

# Quintic Newton-Schulz iteration (Jordan et al., "Muon", 2024): the slope at zero is as steep as convergence allows.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalised(matrix_LOI: Tensor) -> Tensor:
    """Each matrix with its singular values brought near 1 (0.7 to 1.2), its singular vectors kept; same shape."""
    a, b, c = COEFFICIENTS
    tall = matrix_LOI.shape[-2] > matrix_LOI.shape[-1]
    x = matrix_LOI.mT if tall else matrix_LOI
    # bfloat16 is enough for the iteration, and is fast on GPUs; a CPU multiplies float32 faster.
    x = x.to(torch.bfloat16) if x.is_cuda else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix_LOI.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, scaled to the size of AdamW's updates (0.2 sqrt(max(O, I)), arXiv 2502.16982).

    Weight decay is decoupled. Sharded parameters (DTensor) gather each matrix for its update.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Moves every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)

    def _move(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        grad, state = parameter.grad, self.state[parameter]
        assert grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(buffer, group["momentum"])
        if isinstance(update, DTensor):
            whole = orthogonalised(update.full_tensor())
            update = distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None)
        else:
            update = orthogonalised(update)
        size = 0.2 * max(parameter.shape[-2:]) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * size)
