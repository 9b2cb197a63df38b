"""How partials travel between the processes that decode one model together.

Every exchange sums lanes in the one order of laneformer.infer.sum_tree, so all of them give the same bits.

Shape suffixes: L lanes (of this rank), S positions, D hidden, n tree nodes of a rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laneformer.infer.mailbox import Mailbox, WaitTimeout
from laneformer.infer.mailbox_exchange import MailboxExchange
from laneformer.infer.rank_exchange import LocalExchange as LocalExchange
from laneformer.infer.rank_exchange import RankExchange as RankExchange
from laneformer.infer.rank_exchange import RowsAsTensors, ThroughHost
from laneformer.infer.request import RequestError
from laneformer.infer.shared_memory import WAITING_FOR, Progress, SharedBlock, Status, name_module
from laneformer.infer.sum_tree import SumTree


def gather_call() -> Callable[..., dist.Work | None]:
    """The collective that gathers tensors into one; newer releases of torch have another name for it."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class DistributedExchange(RowsAsTensors):
    """Partials through torch.distributed: asynchronous gathers, waited for only where the schedule lands them."""

    def __init__(self, lanes: int, modules: int, limit_s: float, status: Status | None = None) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._status, self._progress = status, None if status is None else Progress(status, self.rank)
        self.tree = SumTree.over(lanes, self.ranks)
        self.modules, self.limit_s = modules, limit_s
        self._under_way: dict[int, tuple[dist.Work, Tensor]] = {}
        self._module = 0
        self._waits = [0.0, 0.0]

    def at(self, module: int) -> None:
        """Remembers the module for error messages, and shows it to a parent process that watches."""
        self._module = module
        if self._progress is not None:
            self._progress.at(module)

    def set_latency(self, seconds: float) -> None:
        """Refuses a latency: only the mailbox emulates a link."""
        if seconds:
            raise RequestError("an emulated link latency needs the mailbox exchange, not torch.distributed")

    def take_waits(self) -> tuple[float, float]:
        """Seconds waited since last asked: for module partials, and for the head's exchanges."""
        waits = self._waits[0], self._waits[1]
        self._waits = [0.0, 0.0]
        return waits

    def post(self, module: int, partial_L: Tensor) -> None:
        """Starts gathering every rank's sums."""
        self._under_way[module] = self._start(self._padded(self.tree.own(self.rank, partial_L)))

    def land(self, module: int) -> Tensor:
        """Waits for the gather of `module`, and finishes the tree."""
        return self._finish(self._under_way.pop(module), f"the partial of {name_module(module, self.modules)}", 0)

    def sum_lanes(self, x_L: Tensor) -> Tensor:
        """The sum over all lanes, at once."""
        started = self._start(self._padded(self.tree.own(self.rank, x_L)))
        return self._finish(started, "the final sum over lanes", 1)

    def gather_lanes(self, x_L: Tensor) -> Tensor:
        """x of all lanes in lane order."""
        started = self._start(x_L.float())
        return self._arrived(started, "the logits", 1).flatten(0, 1)

    def _padded(self, own_n: Tensor) -> Tensor:
        """Every rank must send the same shape: the widest."""
        missing = self.tree.width - own_n.shape[0]
        return own_n if not missing else torch.cat((own_n, own_n.new_zeros(missing, *own_n.shape[1:])))

    def _start(self, own_n: Tensor) -> tuple[dist.Work, Tensor]:
        gathered = own_n.new_empty(self.ranks, *own_n.shape)
        work = gather_call()(gathered.flatten(0, 1), own_n.contiguous(), async_op=True)
        assert work is not None
        return work, gathered

    def _finish(self, started: tuple[dist.Work, Tensor], what: str, kind: int) -> Tensor:
        return self.tree.finish(list(self._arrived(started, what, kind).unbind(0)))

    def _arrived(self, started: tuple[dist.Work, Tensor], what: str, kind: int) -> Tensor:
        work, gathered = started
        if not work.is_completed():
            began = time.perf_counter()
            self._show_waiting(True)
            try:
                work.wait(timedelta(seconds=self.limit_s))
            except RuntimeError as error:
                raise WaitTimeout(
                    f"rank {self.rank} at {name_module(self._module, self.modules)} lost a peer while waiting "
                    f"{time.perf_counter() - began:.1f} s for {what}: {error}",
                    self._late_peer(),
                ) from None
            self._show_waiting(False)
            self._waits[kind] += time.perf_counter() - began
        else:
            work.wait()
        return gathered

    def _show_waiting(self, waiting: bool) -> None:
        """Shows that this rank waits; a gather is waited for as a whole, so for no rank in particular."""
        if self._status is not None:
            self._status.row(self.rank)[WAITING_FOR] = self.ranks + 1 if waiting else 0

    def _late_peer(self) -> int | None:
        """The first peer that waits for nobody itself, where there is a status to tell."""
        others = [] if self._status is None else [r for r in range(self.ranks) if r != self.rank]
        return next((r for r in others if self._status and self._status.waiting_for(r) is None), None)


def new_exchange(
    spec: dict[str, Any], block: SharedBlock, status: Status, device: torch.device | None = None
) -> RankExchange:
    """The exchange that a rank's settings ask for (see laneformer.infer.ranks), for partials on `device`."""
    rank, ranks, limit_s, kind = spec["rank"], spec["ranks"], spec["limit_s"], spec["exchange"]
    if ranks == 1:
        return LocalExchange(status)
    if kind == "mailbox":
        mailbox = Mailbox(block, status, rank, ranks, spec["slots"], spec["words"], limit_s)
        exchange: RankExchange = MailboxExchange(mailbox, spec["lanes"])
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        join_group(kind, device, init_method=f"file://{spec['meeting']}", rank=rank, world_size=ranks)
        exchange = DistributedExchange(spec["lanes"], spec["modules"], limit_s, status)
    return exchange if kind == "nccl" or device is None or device.type == "cpu" else ThroughHost(exchange, device)


def join_group(backend: str, device: torch.device | None, **how: Any) -> None:
    """Makes this process one of a torch.distributed group; `nccl` is bound to its GPU, which it then uses at once."""
    dist.init_process_group(backend, **how, device_id=device if backend == "nccl" else None)


class StreamExchange:
    """One token's partials through torch.distributed in stream order, so that a CUDA graph can hold it all.

    The host never waits on a GPU. What lands comes as terms [n, D], the same on every rank, that add up to the sum over
    all lanes; every rank sends one row, the sum over its lanes. A module that lands in its own step is all-reduced, by
    peers reading each other's memory where the GPUs can; others are gathered beside the computation.
    """

    def __init__(self, largest: int, device: torch.device) -> None:
        self.ranks, self.notes = dist.get_world_size(), list[str]()
        self._under_way: dict[int, tuple[Tensor, Tensor, dist.Work | None]] = {}
        self._symmetric = None if device.type == "cpu" else self._share(largest, device)

    def _share(self, largest: int, device: torch.device) -> tuple[Tensor, str] | None:
        """Memory of `largest` floats that every GPU can read in every other, if all ranks have it."""
        import torch.distributed._symmetric_memory as symmetric

        found, why = None, "another rank cannot"
        try:
            buffer, group = symmetric.empty(largest, dtype=torch.float32, device=device), dist.group.WORLD
            assert group is not None
            symmetric.rendezvous(buffer, group)
            found = buffer, str(group.group_name)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            why = str(error).strip().splitlines()[0]
        if self.agreed(found is not None, device):
            return found
        self.notes.append(f"sums over ranks go through NCCL, for the GPUs cannot read each other's memory: {why}")
        return None

    def agreed(self, fine: bool, device: torch.device) -> bool:
        """Whether all ranks are `fine`; waits for all of them."""
        votes = torch.tensor(float(fine), device=device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN)
        return bool(votes.item())

    def sum_terms(self, x_LD: Tensor) -> Tensor:
        """The sum over all lanes, at once, as [1, D]."""
        own_1D = x_LD.sum(0, keepdim=True)
        if self._symmetric is None:
            dist.all_reduce(own_1D)
            return own_1D
        buffer, group = self._symmetric
        shared_1D = buffer[: own_1D.numel()].view_as(own_1D)
        shared_1D.copy_(own_1D)
        # Every rank reads the buffers in the same order; none returns before all have read.
        return torch.ops.symm_mem.one_shot_all_reduce(shared_1D, "sum", group)

    def post(self, module: int, partial_LD: Tensor, at_once: bool) -> None:
        """Sends this rank's sum; `at_once` if the same step lands it."""
        if at_once:
            self._under_way[module] = partial_LD, self.sum_terms(partial_LD), None
            return
        own_1D = partial_LD.sum(0, keepdim=True)
        # What is sent is kept until it lands: its memory must not be used again before.
        self._under_way[module] = (own_1D, *self._gather(own_1D))

    def terms(self, module: int) -> Tensor:
        """The terms of `module`, [1 or ranks, D]; what follows on this stream waits for them."""
        _, terms, work = self._under_way.pop(module)
        if work is not None:
            work.wait()
        return terms

    def gather(self, x_LC: Tensor) -> Tensor:
        """x of all lanes in lane order, [all lanes, C]."""
        gathered, work = self._gather(x_LC.contiguous())
        work.wait()
        return gathered

    def _gather(self, x_LC: Tensor) -> tuple[Tensor, dist.Work]:
        gathered = x_LC.new_empty(self.ranks * x_LC.shape[0], x_LC.shape[1])
        work = gather_call()(gathered, x_LC, async_op=True)
        assert work is not None
        return gathered, work
