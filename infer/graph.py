"""The `graph` runner: a decode step over static buffers, captured in a CUDA graph and replayed for every token.

A graph belongs to a schedule and a bucket of cache lengths, so that attention reads no more than twice what is used.
Where nothing can be captured (no GPU, or partials that pass through the host) the same step runs call by call.

Shape suffixes: S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from laneformer.infer.exchange import DistributedExchange, LocalExchange, RankExchange, StreamExchange
from laneformer.infer.graph_partials import HostPartials, LocalPartials, Partials
from laneformer.infer.graph_step import Kernels, Step, StepParts
from laneformer.infer.runners import EagerRunner
from laneformer.infer.sampling import Sampling
from laneformer.infer.weights import RankWeights
from laneformer.schedule import Schedule

# Attention over fewer slots than this takes no longer than over one.
SMALLEST_BUCKET = 128
# Times a step runs before it is captured: libraries set themselves up in the first ones.
WARM_UPS = 3
# Errors that say that something cannot be compiled, linked or captured here.
CAPTURE_ERRORS = (RuntimeError, ImportError, NotImplementedError, OSError, AssertionError)


class CaptureError(RuntimeError):
    """A decode step cannot be captured in a CUDA graph on this device."""


class GraphRunner(EagerRunner):
    """Prefill as the eager runner does it; each decode step a replay of a captured one.

    `schedules` are captured at once for every bucket, others when they first come. Raises CaptureError where a GPU
    captures nothing, on every rank alike. `notes` says what is not as fast as it might be.
    """

    name = "graph"

    def __init__(
        self, weights: RankWeights, exchange: RankExchange, capacity: int, schedules: Sequence[Schedule] = (),
        smallest_bucket: int = SMALLEST_BUCKET,
    ) -> None:  # fmt: skip
        super().__init__(weights, exchange, capacity)
        self.notes: list[str] = []
        self._gpu = weights.device.type != "cpu"
        self._buckets = buckets(capacity, smallest_bucket)
        partials = self._partials(weights)
        forward = self.forward
        self._parts = StepParts(weights, forward.cache, (forward.cos_TE, forward.sin_TE), partials, exchange.at)
        self._steps: dict[tuple[Schedule, int], Callable[[], None]] = {}
        self._captures = self._gpu and not isinstance(partials, HostPartials)
        self._kernels = Kernels(fused=False)
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        # The position that the device is at; None where it must be told.
        self._device_at: int | None = None
        if self._captures:
            self._prepare(schedules)
        else:
            self.notes.append(f"graph (uncaptured: {'partials pass through the host' if self._gpu else 'no GPU'})")

    def _partials(self, weights: RankWeights) -> Partials:
        if isinstance(self.exchange, LocalExchange):
            return LocalPartials()
        if isinstance(self.exchange, DistributedExchange):
            largest = max(self.config.hidden_size, self.config.vocab_size)
            stream = StreamExchange(largest, weights.device)
            self.notes += stream.notes
            return stream
        return HostPartials(self.exchange, len(weights.lanes))

    def _prepare(self, schedules: Sequence[Schedule]) -> None:
        """Captures the schedules with compiled kernels, else with torch's own; raises CaptureError without either."""
        reasons = []
        for fused in (True, False):
            self._kernels = Kernels(fused)
            self._steps.clear()
            reason = self._try(schedules)
            if reason is None:
                if reasons:
                    self.notes.append(f"graph (without compiled kernels, so slower: {reasons[0]})")
                return
            reasons.append(reason)
        raise CaptureError(reasons[-1])

    def _try(self, schedules: Sequence[Schedule]) -> str | None:
        """Captures every schedule and bucket; why that fails, if it does on any rank."""
        reason = None
        try:
            with torch.inference_mode():
                for schedule in schedules:
                    for length in self._buckets:
                        self._step(schedule, length)
        except CAPTURE_ERRORS as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        partials = self._parts.partials
        if isinstance(partials, StreamExchange) and not partials.agreed(reason is None, self.forward.device):
            return reason or "another rank cannot"
        return reason

    def _step(self, schedule: Schedule, length: int) -> Callable[[], None]:
        """The step of a schedule while at most `length` positions are used, ready to be called."""
        if (schedule, length) not in self._steps:
            step = Step(self._parts, schedule, length)
            self._steps[schedule, length] = self._capture(step) if self._captures else lambda: step.run(self._kernels)
        return self._steps[schedule, length]

    def _capture(self, step: Step) -> Callable[[], None]:
        """A replay of the step. It runs a few times before, each time from the same state, so nothing is changed."""
        state = self._parts.state
        before = state.token_1.clone(), state.position_1.clone()

        def restore() -> None:
            state.token_1.copy_(before[0])
            state.position_1.copy_(before[1])

        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(WARM_UPS):
                step.run(self._kernels)
                restore()
        torch.cuda.current_stream().wait_stream(beside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Threads of the communication library may ask the device for things meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step.run(self._kernels)
        return graph.replay

    def reset(self) -> None:
        """Forgets the cache, once the device has finished."""
        super().reset()
        self._device_at = None
        if self._gpu:
            torch.cuda.synchronize()

    def step(self, token: int, schedule: Schedule) -> Tensor:
        """Takes one token; logits [V] of the next."""
        self._parts.state.token_1.fill_(token)
        self._advance(schedule)
        return self._parts.state.logits_V.clone()

    def _advance(self, schedule: Schedule) -> None:
        """Lets the device take the token of the state; returns before it has."""
        cache = self.forward.cache
        cache.room_for(1)
        if self._device_at != cache.length:
            self._parts.state.position_1.fill_(cache.length)
        if self._captures:
            self.exchange.at(self.forward.modules)
        length = next(length for length in self._buckets if length > cache.length)
        self._step(schedule, length)()
        cache.advance(1)
        self._device_at = cache.length

    def decode(
        self, token: int, schedule: Schedule, sampling: Sampling, count: int, stop_ids: Sequence[int] = ()
    ) -> Iterator[int] | None:
        """The `count` tokens after `token`, greedy ones; None for settings that need the logits on the host."""
        if sampling.temperature != 0 or sampling.repetition_penalty != 1.0:
            return None
        return self._greedy(token, schedule, count)

    def _greedy(self, token: int, schedule: Schedule, count: int) -> Iterator[int]:
        state = self._parts.state
        state.token_1.fill_(token)
        first = self.forward.cache.length + 1
        # A GPU begins the next step before the host has seen the token of the last one.
        ahead = 1 if self._gpu else 0
        slots = torch.zeros(ahead + 1, dtype=torch.int64, pin_memory=self._gpu)
        ready: list[torch.cuda.Event] = []
        launched = 0
        for number in range(count):
            while launched < min(number + 1 + ahead, count):
                self._advance(schedule)
                slots[launched % len(slots)].copy_(state.token_1[0], non_blocking=True)
                if self._gpu:
                    done = torch.cuda.Event()
                    done.record()
                    ready.append(done)
                launched += 1
            if self._gpu:
                ready.pop(0).synchronize()
            found = int(slots[number % len(slots)])
            if found < 0:
                raise ValueError(
                    f"the logits for position {first + number} are not numbers; the model or its weights are broken"
                )
            yield found


def buckets(capacity: int, smallest: int = SMALLEST_BUCKET) -> list[int]:
    """Cache lengths to have a step for: powers of two times `smallest`, and the capacity."""
    lengths = []
    while smallest < capacity:
        lengths.append(smallest)
        smallest *= 2
    return [*lengths, capacity]
