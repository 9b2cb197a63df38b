"""How partials travel while ranks that share the lanes train: asynchronous in the forward and in the backward pass.

Forward, a rank sums its lanes' partials of module n, starts an all-reduce, and waits for it only where the schedule
lands it. Backward runs the same way round: where the landing was, the all-reduce of the gradient starts, and it is
waited for where the partials were sent, modules of backward work later.

Every rank computes the same loss from the same final streams, so what follows a sum at the head needs no exchange in
the backward pass: its gradient is on every rank already.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from laneformer.ops import tree_sum


class Wire:
    """One module's partials under way: the sum over ranks forward, its gradient's sum backward."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.total: Tensor | None = None
        self.work: dist.Work | None = None

    def start(self, x: Tensor) -> None:
        """Starts summing x over the ranks."""
        self.total = x.clone(memory_format=torch.contiguous_format)
        self.work = dist.all_reduce(self.total, group=self.group, async_op=True)

    def finish(self) -> Tensor:
        """The sum, once it is complete."""
        assert self.work is not None and self.total is not None
        self.work.wait()
        total, self.total, self.work = self.total, None, None
        return total


class Post(torch.autograd.Function):
    """Partials [l, ...] go out; gives a token that ties the landing to them."""

    @staticmethod
    def forward(ctx: Any, partial_L: Tensor, wire: Wire) -> Tensor:
        """Starts the sum over all lanes."""
        ctx.wire, ctx.shape, ctx.dtype = wire, partial_L.shape, partial_L.dtype
        wire.start(tree_sum(partial_L))
        return partial_L.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The gradient of the sum, which is every lane's."""
        return ctx.wire.finish().to(ctx.dtype).expand(ctx.shape), None


class Land(torch.autograd.Function):
    """The sum arrives."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, wire: Wire) -> Tensor:
        """Waits for the sum over all lanes."""
        ctx.wire = wire
        return wire.finish()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Starts summing the gradient over the ranks, whose lanes all used the sum."""
        ctx.wire.start(grads[0])
        return grads[0].new_zeros(()), None


class SumOverRanks(torch.autograd.Function):
    """The sum over ranks at once; its gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """x summed."""
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The gradient as it is."""
        return grads[0], None


class GatherLanes(torch.autograd.Function):
    """All ranks' lanes in order; the gradient of a rank's own is a slice of what every rank has."""

    @staticmethod
    def forward(ctx: Any, x_L: Tensor, group: dist.ProcessGroup, rank: int) -> Tensor:
        """[L, ...] of [l, ...]."""
        ctx.own = slice(rank * x_L.shape[0], (rank + 1) * x_L.shape[0])
        parts = [
            torch.empty_like(x_L, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, x_L.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """This rank's slice."""
        return grads[0][ctx.own], None, None


class Shared(torch.autograd.Function):
    """What every rank has alike and feeds to its own lanes; the gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """x."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The sum."""
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class LaneExchange:
    """The exchange of training ranks that each hold equally many lanes, in rank order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._rank = dist.get_rank(group)
        self._posted: dict[int, tuple[Tensor, Wire]] = {}

    def post(self, module: int, partial_L: Tensor) -> None:
        """Starts the sum of the partials over all lanes."""
        wire = Wire(self.group)
        self._posted[module] = (cast(Tensor, Post.apply(partial_L, wire)), wire)

    def land(self, module: int) -> Tensor:
        """The sum, once it is complete."""
        return cast(Tensor, Land.apply(*self._posted.pop(module)))

    def sum_lanes(self, x_L: Tensor) -> Tensor:
        """The sum over all lanes, at once."""
        return cast(Tensor, SumOverRanks.apply(tree_sum(x_L), self.group))

    def gather_lanes(self, x_L: Tensor) -> Tensor:
        """x of all lanes in lane order."""
        return cast(Tensor, GatherLanes.apply(x_L, self.group, self._rank))

    def shared(self, x: Tensor) -> Tensor:
        """x, whose gradient is summed over the ranks."""
        return cast(Tensor, Shared.apply(x, self.group))
