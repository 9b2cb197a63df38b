"""How partials travel between the processes that decode one model together.

Every exchange sums lanes in the one order of laneformer.infer.sum_tree, so all of them give the same bits.

Shape suffixes: L lanes (of this rank), S positions, D hidden, n tree nodes of a rank.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from laneformer.infer.mailbox import Mailbox, WaitTimeout
from laneformer.infer.mailbox_exchange import MailboxExchange
from laneformer.infer.request import RequestError
from laneformer.infer.shared_memory import WAITING_FOR, Progress, SharedBlock, Status, name_module
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

    def post_rows(self, module: int, partial_LD: np.ndarray) -> None:
        """`post` for one token's partials, float32 [L, D], or [D] of a single lane."""
        ...

    def land_rows(self, module: int) -> np.ndarray:
        """`land` for one token, float32 [D]."""
        ...

    def sum_rows(self, x_LD: np.ndarray) -> np.ndarray:
        """`sum_lanes` for one token, float32 [D]."""
        ...

    def gather_rows(self, x_LC: np.ndarray) -> np.ndarray:
        """`gather_lanes` for one token, float32 [all lanes * C]."""
        ...


class RowsAsTensors:
    """The calls for one token in terms of those for tensors, where speed does not hang on them."""

    def post_rows(self: Any, module: int, partial_LD: np.ndarray) -> None:
        """`post` for one token's partials, float32 [L, D], or [D] of a single lane."""
        self.post(module, lanes_first(partial_LD))

    def land_rows(self: Any, module: int) -> np.ndarray:
        """`land` for one token, float32 [D]."""
        return self.land(module).numpy()

    def sum_rows(self: Any, x_LD: np.ndarray) -> np.ndarray:
        """`sum_lanes` for one token, float32 [D]."""
        return self.sum_lanes(lanes_first(x_LD)).numpy()

    def gather_rows(self: Any, x_LC: np.ndarray) -> np.ndarray:
        """`gather_lanes` for one token, float32 [all lanes * C]."""
        return self.gather_lanes(lanes_first(x_LC)).flatten().numpy()


def lanes_first(x_LD: np.ndarray) -> Tensor:
    """A tensor [L, D] of rows [L, D], or of a single lane's [D]."""
    return torch.from_numpy(np.atleast_2d(x_LD))


class LocalExchange(RowsAsTensors, InProcess):
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
            raise RequestError("a link latency needs at least 2 ranks")


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
