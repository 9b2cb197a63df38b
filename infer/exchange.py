"""How partials travel between the processes that decode one model together.

Every exchange sums lanes in the one order of laneformer.infer.sum_tree, so all of them give the same bits.

Shape suffixes: L lanes (of this rank), S positions, D hidden, n tree nodes of a rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from laneformer.infer.mailbox import Mailbox, WaitTimeout
from laneformer.infer.shared_memory import Progress, SharedBlock, Status, name_module
from laneformer.infer.sum_tree import SumTree
from laneformer.lanes import Exchange, InProcess


class RankExchange(Exchange, Protocol):
    """An exchange between ranks, as the engine drives it: measured, watched, and set to an emulated link."""

    def at(self, module: int) -> None:
        """Notes that this rank begins `module` (2N = the head)."""
        ...

    def take_waits(self) -> tuple[float, float]:
        """Seconds waited since last asked: for module partials, and for the head's exchanges."""
        ...

    def set_latency(self, seconds: float) -> None:
        """Makes every message readable only `seconds` after it was posted."""
        ...


class LocalExchange(InProcess):
    """One rank holds all lanes: nothing travels, nothing is waited for."""

    def __init__(self, status: Status | None = None) -> None:
        super().__init__()
        self._progress = None if status is None else Progress(status, 0)

    def at(self, module: int) -> None:
        """Shows the parent process that there is progress, if one watches."""
        if self._progress is not None:
            self._progress.at(module)

    def take_waits(self) -> tuple[float, float]:
        """No time at all."""
        return 0.0, 0.0

    def set_latency(self, seconds: float) -> None:
        """Refuses a latency: there is no link."""
        if seconds:
            raise ValueError("a link latency needs at least 2 ranks")


class MailboxExchange:
    """Partials through shared memory, one-sided."""

    def __init__(self, mailbox: Mailbox, lanes: int) -> None:
        self.mailbox = mailbox
        self.tree = SumTree.over(lanes, mailbox.ranks)
        self._sent: dict[int, tuple[int, Tensor]] = {}
        self._module = 0
        self._head_wait = 0.0

    def at(self, module: int) -> None:
        """Notes progress in shared memory."""
        self._module = module
        self.mailbox.progress.at(module)

    def set_latency(self, seconds: float) -> None:
        """Sets the emulated link; every rank must do so between the same two messages."""
        self.mailbox.latency_s = seconds

    def take_waits(self) -> tuple[float, float]:
        """Seconds waited since last asked: for module partials, and for the head's exchanges."""
        waits = self.mailbox.waited_s - self._head_wait, self._head_wait
        self.mailbox.waited_s = self._head_wait = 0.0
        return waits

    def post(self, module: int, partial_L: Tensor) -> None:
        """Pushes the sums over this rank's lanes to every peer."""
        own = self.tree.own(self.mailbox.rank, partial_L)
        self._sent[module] = (self.mailbox.post(own.numpy().reshape(-1)), own)

    def land(self, module: int) -> Tensor:
        """Waits for every peer's sums of `module`, and finishes the tree."""
        number, own = self._sent.pop(module)
        return self._combine(number, own, lambda: f"the partial of {self._name(module)}")

    def _name(self, module: int) -> str:
        return name_module(module, self.mailbox.status.modules)

    def _combine(self, number: int, own: Tensor, what: Callable[[], str]) -> Tensor:
        sums = []
        for rank in range(self.mailbox.ranks):
            if rank == self.mailbox.rank:
                sums.append(own)
                continue
            shape = (len(self.tree.nodes[rank]), *own.shape[1:])
            sums.append(self._take(number, rank, shape, what))
        return self.tree.finish(sums)

    def _take(self, number: int, peer: int, shape: tuple[int, ...], what: Callable[[], str]) -> Tensor:
        out = np.empty(shape, np.float32)
        try:
            self.mailbox.take(number, peer, out.reshape(-1))
        except WaitTimeout as error:
            raise WaitTimeout(f"{error}; it carries {what()}", error.peer) from None
        return torch.from_numpy(out)

    def sum_lanes(self, x_L: Tensor) -> Tensor:
        """The sum over all lanes, at once, in as many messages as its size needs."""
        own = self.tree.own(self.mailbox.rank, x_L)
        what = "the final sum over lanes"
        parts = self._in_pieces(
            own.flatten(1), self.mailbox.words // self.tree.width, lambda n, x: self._combine(n, x, lambda: what)
        )
        return torch.cat(parts).view(own.shape[1:])

    def gather_lanes(self, x_L: Tensor) -> Tensor:
        """x of all lanes in lane order, in as many messages as its size needs."""

        def gather(number: int, piece: Tensor) -> Tensor:
            ranks = range(self.mailbox.ranks)
            shape = tuple(piece.shape)
            return torch.cat([
                piece if r == self.mailbox.rank else self._take(number, r, shape, lambda: "the logits") for r in ranks
            ])  # fmt: skip

        parts = self._in_pieces(x_L.float().flatten(1), self.mailbox.words // x_L.shape[0], gather)
        return torch.cat(parts, 1).view(-1, *x_L.shape[1:])

    def _in_pieces(self, x: Tensor, width: int, finish: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
        """Posts x [n, ...] in pieces of `width` columns, each finished before the next; its waits are the head's."""
        before = self.mailbox.waited_s
        parts = []
        for i in range(0, x.shape[1], width):
            piece = x[:, i : i + width].contiguous()
            parts.append(finish(self.mailbox.post(piece.numpy().reshape(-1)), piece))
        self._head_wait += self.mailbox.waited_s - before
        return parts


class DistributedExchange:
    """Partials through torch.distributed (gloo or NCCL): asynchronous gathers, waited for where the schedule lands."""

    def __init__(self, lanes: int, modules: int, limit_s: float, status: Status | None = None) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._progress = None if status is None else Progress(status, self.rank)
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
            raise ValueError("an emulated link latency needs the mailbox exchange, not torch.distributed")

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
        # Newer releases of torch have another name for the same collective.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(gathered.flatten(0, 1), own_n.contiguous(), async_op=True)
        assert work is not None
        return work, gathered

    def _finish(self, started: tuple[dist.Work, Tensor], what: str, kind: int) -> Tensor:
        return self.tree.finish(list(self._arrived(started, what, kind).unbind(0)))

    def _arrived(self, started: tuple[dist.Work, Tensor], what: str, kind: int) -> Tensor:
        work, gathered = started
        if not work.is_completed():
            began = time.perf_counter()
            try:
                work.wait(timedelta(seconds=self.limit_s))
            except RuntimeError as error:
                raise WaitTimeout(
                    f"rank {self.rank} at {name_module(self._module, self.modules)} lost a peer while waiting "
                    f"{time.perf_counter() - began:.1f} s for {what}: {error}"
                ) from None
            self._waits[kind] += time.perf_counter() - began
        else:
            work.wait()
        return gathered


def new_exchange(spec: dict[str, Any], block: SharedBlock, status: Status) -> RankExchange:
    """The exchange that a rank's settings ask for (see laneformer.infer.ranks)."""
    rank, ranks, limit_s = spec["rank"], spec["ranks"], spec["limit_s"]
    if ranks == 1:
        return LocalExchange(status)
    if spec["exchange"] == "mailbox":
        mailbox = Mailbox(block, status, rank, ranks, spec["slots"], spec["words"], limit_s)
        return MailboxExchange(mailbox, spec["lanes"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(spec["exchange"], init_method=f"file://{spec['meeting']}", rank=rank, world_size=ranks)
    return DistributedExchange(spec["lanes"], spec["modules"], limit_s, status)
