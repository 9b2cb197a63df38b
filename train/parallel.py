"""Which ranks there are, what each holds, and how gradients meet.

World = data-parallel groups x ranks that share the lanes; neighbouring ranks share lanes, so that the partials stay
within a machine. Rank r has lane rank r % lanes and data rank r // lanes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from laneformer.checkpoint import has_lane_axis
from laneformer.config import LaneConfig
from laneformer.model import Laneformer
from laneformer.train.lane_exchange import LaneExchange
from laneformer.train.loss import SummedLoss
from laneformer.train.settings import Settings


@dataclass(frozen=True)
class Layout:
    """This rank's place; `mesh` has the dimensions data and lanes, and is None in a single process."""

    rank: int = 0
    world: int = 1
    lanes: int = 1
    mesh: DeviceMesh | None = None

    @property
    def data(self) -> int:
        """Data-parallel groups."""
        return self.world // self.lanes

    @property
    def data_rank(self) -> int:
        """This rank's data-parallel group."""
        return self.rank // self.lanes

    @property
    def first(self) -> bool:
        """Whether this is the rank that speaks and writes."""
        return self.rank == 0

    def held(self, config: LaneConfig) -> list[int]:
        """The lanes this rank trains."""
        share = config.num_lanes // self.lanes
        own = self.rank % self.lanes
        return list(range(own * share, (own + 1) * share))

    def group(self, dimension: str) -> dist.ProcessGroup:
        """The ranks along `data` or `lanes` that this one meets."""
        assert self.mesh is not None
        return self.mesh.get_group(dimension)

    def sum(self, values: Tensor, dimension: str) -> Tensor:
        """Values summed over the ranks along a dimension."""
        if (self.data if dimension == "data" else self.lanes) > 1:
            dist.all_reduce(values, group=self.group(dimension))
        return values


@contextlib.contextmanager
def layout(settings: Settings) -> Iterator[Layout]:
    """The ranks that torchrun (or anything that sets its variables) started; leaves the group at the end.

    Raises ValueError where the ranks cannot be divided as asked.
    """
    world, lanes = int(os.environ.get("WORLD_SIZE", "1")), settings.parallel.lanes
    if world % lanes:
        raise ValueError(
            f"parallel.lanes={lanes} does not divide the {world} ranks; start {lanes} or a multiple of it with "
            f"torchrun --nproc-per-node {lanes}"
        )
    if world == 1:
        yield Layout()
        return
    kind = settings.device.partition(":")[0]
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    limit = timedelta(seconds=settings.parallel.timeout)
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", timeout=limit)
    try:
        mesh = init_device_mesh(kind, (world // lanes, lanes), mesh_dim_names=("data", "lanes"))
        yield Layout(dist.get_rank(), world, lanes, mesh)
    finally:
        dist.destroy_process_group()


def check_lanes(config: LaneConfig, lanes: int) -> None:
    """Raises ValueError where the ranks cannot share the lanes equally."""
    if config.num_lanes % lanes:
        raise ValueError(f"parallel.lanes={lanes} does not divide the model's {config.num_lanes} lanes")


def wrapped(model: Laneformer, settings: Settings, place: Layout) -> tuple[nn.Module, nn.Module]:
    """The summed loss as called in training, and the same without gradients meeting (for validation)."""
    exchange = LaneExchange(place.group("lanes")) if place.lanes > 1 else None
    loss = SummedLoss(model, exchange, settings.optim.z_loss)
    if settings.compile:
        compiled(loss, exchange is not None or settings.parallel.shard == "fsdp")
    if place.data == 1:
        return loss, loss
    if settings.parallel.shard == "fsdp":
        shard(loss, settings, place)
        return loss, loss
    # Ranks of one lane group hold other lanes: gradients meet only among those that hold the same.
    return DistributedDataParallel(loss, process_group=place.group("data"), gradient_as_bucket_view=True), loss


def compiled(loss: SummedLoss, by_module: bool) -> None:
    """Has torch.compile fuse the whole loss, or module by module where collectives run between modules."""
    if not by_module:
        loss.compile(dynamic=False)
        return
    for layer in range(loss.model.config.num_hidden_layers):
        for module in loss.model.model.layer(layer).children():
            module.compile(dynamic=False)


def shard(loss: SummedLoss, settings: Settings, place: Layout) -> None:
    """FSDP2: every attention and feed-forward module is a unit of its own, the rest belongs to the whole."""
    assert place.mesh is not None
    low = torch.bfloat16 if settings.precision == "bfloat16" else None
    options: dict[str, Any] = {
        "mesh": place.mesh["data"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None),
        "shard_placement_fn": lambda parameter: placement(parameter, place.data),
    }
    for index in range(loss.model.config.num_hidden_layers):
        layer = loss.model.model.layer(index)
        fully_shard(layer.attention, **options)
        fully_shard(layer.feed_forward, **options)
    fully_shard(loss, **options)


def placement(parameter: nn.Parameter, ranks: int) -> Shard:
    """The first dimension that divides equally, so that few lanes over many ranks leave none of them empty."""
    even = (i for i, size in enumerate(parameter.shape) if size % ranks == 0)
    return Shard(next(even, 0))


@contextlib.contextmanager
def gradients_meet(module: nn.Module, meet: bool, place: Layout, settings: Settings) -> Iterator[None]:
    """Whether this backward pass is the one after which data-parallel ranks add up their gradients."""
    if place.data == 1:
        yield
    elif settings.parallel.shard == "fsdp":
        cast(Any, module).set_requires_gradient_sync(meet)
        yield
    else:
        with contextlib.nullcontext() if meet else cast(DistributedDataParallel, module).no_sync():
            yield


def add_shared_gradients(model: Laneformer, place: Layout) -> None:
    """Adds up what ranks that share the lanes have each a part of: the gradients of norms that all lanes use.

    The embedding's gradient is whole already (`shared`), and a head behind the sum over lanes is alike on every rank.
    """
    if place.lanes == 1:
        return
    parts = [local(p.grad) for name, p in model.named_parameters() if p.grad is not None and in_parts(name, model)]
    if not parts:
        return
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat, group=place.group("lanes"))
    for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(total.view_as(part))


def in_parts(name: str, model: Laneformer) -> bool:
    """Whether lane ranks hold a parameter alike and each only the gradient of its own lanes' use."""
    if has_lane_axis(name, model.config) or "norm" not in name:
        return False
    return name != "model.norm.weight" or not model.config.pre_norm_lane_agg


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_gradients(model: Laneformer, place: Layout, settings: Settings) -> Tensor:
    """Scales all gradients down to optim.clip; returns their norm over all ranks, before that."""
    own, alike = [], []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            (own if has_lane_axis(name, model.config) else alike).append(local(parameter.grad))
    squares = torch.stack([squared_norm(own), squared_norm(alike)])
    if settings.parallel.shard == "fsdp":
        place.sum(squares, "data")
    squares[:1] = place.sum(squares[:1].clone(), "lanes")
    norm = squares.sum().sqrt()
    scale = (settings.optim.clip / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(own + alike, scale.to(own[0].device if own else alike[0].device))
    return norm


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """The sum of all squares, in float32 or wider."""
    if not tensors:
        return torch.zeros(())
    norms = torch.stack(torch._foreach_norm(tensors))
    return norms.to(torch.promote_types(norms.dtype, torch.float32)).square().sum()
