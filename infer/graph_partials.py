"""How a decode step's partials travel as terms that the step itself adds up; see exchange.StreamExchange for GPUs.

Shape suffixes: M streams of this rank (its lanes, or 1 where they are equal), L lanes of this rank, D hidden,
C columns, n terms of a sum.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from laneformer.infer.rank_exchange import RankExchange


class Partials(Protocol):
    """What a step needs of an exchange; sums come as terms [n, D] that the step adds."""

    def post(self, module: int, partial_MD: Tensor, at_once: bool) -> None:
        """Sends the partials of `module`; `at_once` if its own step lands them."""
        ...

    def terms(self, module: int) -> Tensor:
        """What adds up to the sum of `module`'s partials over all lanes."""
        ...

    def sum_terms(self, x_LD: Tensor) -> Tensor:
        """What adds up to the sum of x over all lanes."""
        ...

    def gather(self, x_LC: Tensor) -> Tensor:
        """x of all lanes in lane order."""
        ...


class LocalPartials:
    """All lanes are here: the partials themselves are the terms."""

    def __init__(self) -> None:
        self._posted: dict[int, Tensor] = {}

    def post(self, module: int, partial_MD: Tensor, at_once: bool) -> None:
        """Keeps them."""
        self._posted[module] = partial_MD

    def terms(self, module: int) -> Tensor:
        """Them."""
        return self._posted.pop(module)

    def sum_terms(self, x_LD: Tensor) -> Tensor:
        """x."""
        return x_LD

    def gather(self, x_LC: Tensor) -> Tensor:
        """x."""
        return x_LC


class HostPartials:
    """Partials through an exchange that the host waits in: one term, already the sum."""

    def __init__(self, exchange: RankExchange, lanes: int) -> None:
        self.exchange, self.lanes = exchange, lanes

    def post(self, module: int, partial_MD: Tensor, at_once: bool) -> None:
        """Sends them; where one stream stands for all lanes, the other lanes send zeros."""
        missing = self.lanes - partial_MD.shape[0]
        if missing:
            partial_MD = torch.cat((partial_MD, partial_MD.new_zeros(missing, partial_MD.shape[1])))
        self.exchange.post(module, partial_MD[:, None])

    def terms(self, module: int) -> Tensor:
        """Waits for the sum, [1, D]."""
        return self.exchange.land(module)

    def sum_terms(self, x_LD: Tensor) -> Tensor:
        """Waits for the sum, [1, D]."""
        return self.exchange.sum_lanes(x_LD[:, None])

    def gather(self, x_LC: Tensor) -> Tensor:
        """Waits for all lanes' x."""
        return self.exchange.gather_lanes(x_LC[:, None]).flatten(0, 1)
