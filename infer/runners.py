"""How forward passes are executed: `eager`, `compiled` with torch.compile's kernels, `graph` replayed, or `persistent`.

Shape suffixes: S positions, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from laneformer.infer.exchange import RankExchange
from laneformer.infer.forward import Forward
from laneformer.infer.limits import RUNNERS, WAIT_LIMIT_S
from laneformer.infer.request import RequestError
from laneformer.infer.weights import RankWeights
from laneformer.schedule import Schedule

if TYPE_CHECKING:
    from laneformer.infer.persistent import PeerWords


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


def make_runner(
    name: str, weights: RankWeights, exchange: RankExchange, capacity: int, schedules: Sequence[Schedule] = (),
    rank: int = 0, peer_words: PeerWords | None = None, limit_s: float = WAIT_LIMIT_S,
) -> EagerRunner:  # fmt: skip
    """The runner called `name`, made ready for `schedules`; what follows them is for `persistent` (PersistentRunner).

    Where that runner cannot be had another stands in for it, with one warning: `eager` for `compiled` without a
    compiler, `graph` for `compiled` on a GPU, `eager` for `graph` where nothing can be captured, `graph` for
    `persistent` on GPUs that cannot run it, `eager` without a GPU.
    """
    if name not in RUNNERS:
        raise RequestError(f"no runner {name!r}; there are {', '.join(RUNNERS)}")
    if name == "compiled" and weights.device.type != "cpu":
        warnings.warn("the compiled runner is for CPUs; decoding with the graph runner", stacklevel=2)
        name = "graph"
    if name == "persistent":
        runner, notes = persistent_runner(weights, exchange, capacity, schedules, rank, peer_words, limit_s)
    elif name == "graph":
        runner, notes = graph_runner(weights, exchange, capacity, schedules)
    elif name == "compiled":
        runner, notes = compiled_runner(weights, exchange, capacity)
    else:
        runner, notes = EagerRunner(weights, exchange, capacity), []
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return runner


def compiled_runner(weights: RankWeights, exchange: RankExchange, capacity: int) -> tuple[EagerRunner, list[str]]:
    """The compiled runner, or the eager one and why."""
    # Importing the compiler takes as long as importing torch, so only who compiles pays for it.
    from laneformer.infer.compiled import COMPILER_ERRORS, CompiledRunner

    try:
        return CompiledRunner(weights, exchange, capacity), []
    except COMPILER_ERRORS as error:
        reason = str(error).strip().splitlines()[0]
    note = f"decoding with the eager runner, because nothing can be compiled here: {reason}"
    return EagerRunner(weights, exchange, capacity), [note]


def graph_runner(
    weights: RankWeights, exchange: RankExchange, capacity: int, schedules: Sequence[Schedule]
) -> tuple[EagerRunner, list[str]]:
    """The graph runner and what it has to say, or the eager one and why."""
    from laneformer.infer.graph import CaptureError, GraphRunner

    try:
        runner = GraphRunner(weights, exchange, capacity, schedules)
        return runner, runner.notes
    except CaptureError as error:
        note = f"decoding with the eager runner, because a decode step cannot be captured here: {error}"
    return EagerRunner(weights, exchange, capacity), [note]


def persistent_runner(
    weights: RankWeights, exchange: RankExchange, capacity: int, schedules: Sequence[Schedule], rank: int,
    peer_words: PeerWords | None, limit_s: float,
) -> tuple[EagerRunner, list[str]]:  # fmt: skip
    """The persistent runner and what it has to say, or the next best and why."""
    from laneformer.infer.peer_memory import PeerMemoryError
    from laneformer.infer.persistent import PersistentError, PersistentRunner

    try:
        runner = PersistentRunner(weights, exchange, capacity, schedules, peer_words, rank, limit_s)
        return runner, runner.notes
    except (PersistentError, PeerMemoryError) as error:
        reason = str(error)
    kind = "eager" if weights.device.type == "cpu" else "graph"
    note = f"decoding with the {kind} runner, because the persistent kernel cannot run here: {reason}"
    if kind == "eager":
        return EagerRunner(weights, exchange, capacity), [note]
    other, notes = graph_runner(weights, exchange, capacity, schedules)
    return other, [note, *notes]
