"""How forward passes are executed: `eager`, one torch call after another, or `compiled`, with torch.compile's kernels.

Shape suffixes: S positions, V vocabulary.
"""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor

from laneformer.infer.exchange import RankExchange
from laneformer.infer.forward import Forward
from laneformer.infer.ranks import RUNNERS
from laneformer.infer.request import RequestError
from laneformer.infer.weights import RankWeights
from laneformer.schedule import Schedule


class EagerRunner:
    """Every operation as its own torch call."""

    name = "eager"

    def __init__(self, weights: RankWeights, exchange: RankExchange, capacity: int) -> None:
        self.config, self.capacity = weights.config, capacity
        self.forward = Forward(weights, exchange, capacity)
        self.exchange = exchange

    def reset(self) -> None:
        """Forgets the cache."""
        self.forward.cache.reset()

    def prefill(self, tokens_S: Tensor, schedule: Schedule, head: Literal["none", "last", "all"]) -> Tensor:
        """Takes prompt tokens; logits [V] after the last one, [S, V] after each, or an empty tensor."""
        x_LSD = self.forward.streams(tokens_S, schedule)
        if head == "none":
            return torch.empty(0)
        return self.forward.head(x_LSD) if head == "all" else self.forward.head(x_LSD[:, -1:])[0]

    def step(self, token: int, schedule: Schedule) -> Tensor:
        """Takes one token; logits [V] of the next."""
        return self.forward.head(self.forward.streams(torch.tensor([token]), schedule))[0]

    def take_waits(self) -> tuple[float, float]:
        """Seconds waited for partials and for the head's exchanges since last asked."""
        return self.exchange.take_waits()

    def set_latency(self, seconds: float) -> None:
        """Emulates a link between ranks."""
        self.exchange.set_latency(seconds)


def make_runner(name: str, weights: RankWeights, exchange: RankExchange, capacity: int) -> EagerRunner:
    """The runner called `name`; `compiled` falls back to `eager`, with one warning, where nothing can be compiled."""
    if name == "eager":
        return EagerRunner(weights, exchange, capacity)
    if name != "compiled":
        raise RequestError(f"no runner {name!r}; there are {', '.join(RUNNERS)}")
    # Importing the compiler takes as long as importing torch, so only who compiles pays for it.
    from laneformer.infer.compiled import COMPILER_ERRORS, CompiledRunner

    try:
        return CompiledRunner(weights, exchange, capacity)
    except COMPILER_ERRORS as error:
        reason = str(error).strip().splitlines()[0]
        warnings.warn(f"decoding with the eager runner, because nothing can be compiled here: {reason}", stacklevel=2)
        return EagerRunner(weights, exchange, capacity)
