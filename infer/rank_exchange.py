"""What the engine asks of an exchange between ranks, and the exchanges that are not between processes.

Shape suffixes: L lanes (of this rank), S positions, D hidden, C a lane's share of the vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from laneformer.infer.request import RequestError
from laneformer.infer.shared_memory import Progress, Status
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


class ThroughHost(RowsAsTensors):
    """A GPU's partials through an exchange that works in CPU memory, copied there and back."""

    def __init__(self, inner: RankExchange, device: torch.device) -> None:
        self.inner, self.device = inner, device

    def at(self, module: int) -> None:
        """As the exchange in CPU memory."""
        self.inner.at(module)

    def set_latency(self, seconds: float) -> None:
        """As the exchange in CPU memory."""
        self.inner.set_latency(seconds)

    def take_waits(self) -> tuple[float, float]:
        """Seconds waited in CPU memory; the copies are not part of it."""
        return self.inner.take_waits()

    def post(self, module: int, partial_L: Tensor) -> None:
        """Copies the partials to the CPU and sends them."""
        self.inner.post(module, partial_L.cpu())

    def land(self, module: int) -> Tensor:
        """The sum over lanes, back on the GPU."""
        return self.inner.land(module).to(self.device)

    def sum_lanes(self, x_L: Tensor) -> Tensor:
        """The sum over all lanes, back on the GPU."""
        return self.inner.sum_lanes(x_L.cpu()).to(self.device)

    def gather_lanes(self, x_L: Tensor) -> Tensor:
        """x of all lanes, back on the GPU."""
        return self.inner.gather_lanes(x_L.cpu()).to(self.device)
