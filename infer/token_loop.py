"""The loop over a schedule's modules for one token, on flat float32 arrays: what laneformer.lanes.run_schedule does.

After every module the weights just streamed have pushed this code out of the caches, so that what runs between two
modules is paid at several times its warm cost; it is kept to a handful of numpy calls on arrays that stay in place.
Tests hold it equal to run_schedule, bit for bit.

Shape suffixes: L lanes of this rank, D hidden, V vocabulary, C a lane's share of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laneformer.config import LaneConfig
from laneformer.infer.exchange import RankExchange
from laneformer.schedule import Own, Schedule

# A lane's kernel: from its stream [D] (and cos, sin) to its partial [D], or from a vector to logits [C].
Kernel = Callable[..., Tensor]


@dataclass(frozen=True)
class LaneSteps:
    """What computes, a kernel for every lane: each module of (stream, cos, sin), the final norm, the head's product."""

    modules: list[list[Kernel]]
    norms: list[Kernel]
    products: list[Kernel]


def each(kernels: list[Kernel], x_L: Sequence[Tensor], *more: Tensor) -> np.ndarray:
    """The kernels' results, each lane's of its own vector: [L, O], or [O] of a single lane."""
    first = kernels[0](x_L[0], *more).numpy()
    if len(kernels) == 1:
        return first
    out_LO = np.empty((len(kernels), len(first)), np.float32)
    out_LO[0] = first
    for lane in range(1, len(kernels)):
        out_LO[lane] = kernels[lane](x_L[lane], *more).numpy()
    return out_LO


class TokenLoop:
    """A schedule's loop over one token after another; the lanes' streams [L, D] stay in one place."""

    def __init__(self, schedule: Schedule, config: LaneConfig, lanes: int, exchange: RankExchange) -> None:
        self.config, self.exchange = config, exchange
        # A single lane's rows are plain vectors, which saves a view at every step.
        shape = (lanes, config.hidden_size) if lanes > 1 else (config.hidden_size,)
        self._x_LD = np.zeros(shape, np.float32)
        self._streams = torch.from_numpy(self._x_LD)
        self._lane_streams = self._streams.view(lanes, -1).unbind(0)
        self._scratch_LD = np.empty_like(self._x_LD)
        # Per module: the factor on the own partial, whether it is sent, and (module, with own, last use) landing now.
        self._plan = [
            (
                step.own.scale(config.num_lanes) if step.own is not Own.NONE else None,
                step.sends,
                [(la.module, la.with_own, schedule.last_use[la.module] == n) for la in step.lands],
            )
            for n, step in enumerate(schedule.steps)
        ]

    def start(self, embedding_D: Tensor) -> None:
        """Sets every lane's stream to the token's embedding."""
        self._streams[:] = embedding_D

    def run(self, steps: LaneSteps, cos_E: Tensor, sin_E: Tensor) -> np.ndarray:
        """The logits [V] after all modules and the head."""
        x_LD, scratch_LD, exchange = self._x_LD, self._scratch_LD, self.exchange
        own_LD: dict[int, np.ndarray] = {}
        totals: dict[int, np.ndarray] = {}
        for n, (scale, sends, lands) in enumerate(self._plan):
            exchange.at(n)
            partial_LD = each(steps.modules[n], self._lane_streams, cos_E, sin_E)
            if sends:
                exchange.post_rows(n, partial_LD)
                own_LD[n] = partial_LD
            if scale == 1.0:
                np.add(x_LD, partial_LD, x_LD)
            elif scale is not None:
                np.multiply(partial_LD, np.float32(scale), scratch_LD)
                np.add(x_LD, scratch_LD, x_LD)
            for m, with_own, last in lands:
                if m not in totals:
                    totals[m] = exchange.land_rows(m)
                if with_own:
                    np.add(x_LD, totals[m], x_LD)
                else:
                    np.subtract(totals[m], own_LD[m], scratch_LD)
                    np.add(x_LD, scratch_LD, x_LD)
                if last:
                    del totals[m], own_LD[m]
        return self._head(steps)

    def _head(self, steps: LaneSteps) -> np.ndarray:
        """The logits [V] from the final streams, by the config's head type."""
        config, exchange = self.config, self.exchange
        exchange.at(2 * config.num_hidden_layers)
        if config.lm_head_type in ("lane", "vocab_parallel"):
            normed_LD = torch.from_numpy(each(steps.norms, self._lane_streams)).view(len(steps.norms), -1)
            logits = each(steps.products, normed_LD.unbind(0))
            gather = exchange.sum_rows if config.lm_head_type == "lane" else exchange.gather_rows
            return gather(logits)
        if config.pre_norm_lane_agg:
            read_D = steps.norms[0](torch.from_numpy(exchange.sum_rows(self._x_LD)))
        else:
            read_D = torch.from_numpy(exchange.sum_rows(each(steps.norms, self._lane_streams)) / config.num_lanes)
        slices_LC = each(steps.products, [read_D] * len(steps.products))
        return exchange.gather_rows(slices_LC)[: config.vocab_size]
