"""The `persistent` runner: many tokens a launch of the persistent kernel, drawn on the device.

Prefill is the eager runner's. On a GPU the kernel has one program a multiprocessor and ranks write into each other's
memory. Without one, Triton's interpreter runs the same source with one program a rank: a correctness mode, slow, for
tiny models.

Shape suffixes: S positions, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from laneformer.infer.exchange import RankExchange
from laneformer.infer.mailbox import RunAborted, WaitTimeout
from laneformer.infer.request import RequestError
from laneformer.infer.runners import EagerRunner
from laneformer.infer.sampling import Sampling
from laneformer.infer.weights import RankWeights
from laneformer.kernels.plan import DeviceShape, Plan, PlanError
from laneformer.kernels.plan_phases import check_plan
from laneformer.schedule import Schedule

if TYPE_CHECKING:
    from laneformer.kernels.aborts import Abort
    from laneformer.kernels.launch import RankLaunch

# The interpreter takes about as long for a large tile as for a small one.
INTERPRETED = DeviceShape(programs=1, tile=1 << 16, most_columns=1024, block_positions=64)
# Tokens of a launch: on a GPU enough to forget what starting it costs; interpreted, so that each shows at once.
TOKENS_A_LAUNCH = {"cpu": 1, "cuda": 64}
NOTE = "persistent (Triton's interpreter: the kernel's own code, to check it; its speed means nothing)"

# Gives int32 memory of every rank, own included, of at least so many words each.
PeerWords = Callable[[int], list[Tensor]]


class PersistentError(RuntimeError):
    """The persistent kernel cannot run here; the message says why."""


class PersistentRunner(EagerRunner):
    """Decodes by launches of the persistent kernel; `tokens` of them at most in one.

    peer_words gives the memory that ranks write to each other's; one rank needs none. Raises PersistentError where the
    kernel cannot run, and RequestError for what it refuses.
    """

    name = "persistent"

    def __init__(
        self, weights: RankWeights, exchange: RankExchange, capacity: int, schedules: Sequence[Schedule] = (),
        peer_words: PeerWords | None = None, rank: int = 0, limit_s: float = 60.0, tokens: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(weights, exchange, capacity)
        self._device = weights.device
        check_triton(self._device)
        self.notes = [NOTE] if self._device.type == "cpu" else []
        self.ranks, self.rank, self._limit_s = self.config.num_lanes // len(weights.lanes), rank, limit_s
        self._shape = INTERPRETED if self._device.type == "cpu" else gpu_shape(self._device)
        self._tokens = tokens or TOKENS_A_LAUNCH[self._device.type]
        plans = [self._plan(schedule) for schedule in dict.fromkeys(schedules)]
        words = max([plan.shared_words for plan in plans], default=0)
        self._words = self._memory(words, peer_words)
        self._launches: dict[Schedule, RankLaunch] = {}
        # The schedule whose messages the mailboxes hold, unless a launch left them broken.
        self._ready: Schedule | None = None
        self._seen: list[int] = []
        if self._device.type != "cpu":
            # Compiling takes many seconds, which no other rank should have to wait for in the middle of a request.
            for plan_schedule in dict.fromkeys(schedules):
                self._prepared(plan_schedule)

    def _plan(self, schedule: Schedule) -> Plan:
        try:
            plan = Plan(self.config, schedule, self.ranks, self._shape, self.capacity)
            check_plan(plan, resident=self._shape.programs)
            return plan
        except PlanError as error:
            raise RequestError(str(error)) from None

    def _memory(self, words: int, peer_words: PeerWords | None) -> list[Tensor] | None:
        """Every rank's words; None for a single rank, which makes its own as it goes."""
        if self.ranks == 1:
            return None
        if peer_words is None:
            raise PersistentError("there is no memory that its ranks can write to each other's")
        return peer_words(words)

    def _prepared(self, schedule: Schedule) -> RankLaunch:
        """The launches of a schedule, compiled where there is a compiler."""
        from laneformer.kernels.buffers import new_shared, shared_in
        from laneformer.kernels.launch import RankLaunch

        if schedule not in self._launches:
            plan = self._plan(schedule)
            cache, forward = self.forward.cache, self.forward
            # Requests are served in inference mode, whose tensors could not be written to outside of it.
            with torch.inference_mode(False):
                if self._words is None:
                    shared = [new_shared(plan, self._device)]
                elif plan.shared_words <= len(self._words[self.rank]):
                    shared = [shared_in(plan, words) for words in self._words]
                else:
                    raise RequestError(f"schedule {schedule} was not announced when the ranks started")
                self._launches[schedule] = RankLaunch(
                    plan, self.rank, forward.weights, cache.k, cache.v, shared, forward.cos_TE, forward.sin_TE,
                    self._tokens,
                )  # fmt: skip
            if self._device.type != "cpu":
                for keep in (False, True):
                    self._launches[schedule].compile(keep)
        return self._launches[schedule]

    def _launch(self, schedule: Schedule) -> RankLaunch:
        """The launches of a schedule, with mailboxes that are ready for it on every rank."""
        launch = self._prepared(schedule)
        if self._ready != schedule:
            # Nobody may write into a mailbox before its owner has cleared it, nor clear one that is still read.
            self._meet()
            launch.clear()
            self._meet()
            self._ready = schedule
        return launch

    def _meet(self) -> None:
        """Waits for all ranks."""
        lanes = len(self.forward.weights.lanes)
        self.exchange.sum_lanes(torch.zeros(lanes, 1, 1, device=self._device)).sum().item()

    def reset(self) -> None:
        """Forgets the cache."""
        super().reset()
        self._seen = []

    def prefill(self, tokens_S: Tensor, schedule: Schedule, head: Literal["none", "last", "all"]) -> Tensor:
        """Takes prompt tokens; logits [V] after the last one, [S, V] after each, or an empty tensor."""
        self._seen += tokens_S.tolist()
        return super().prefill(tokens_S, schedule, head)

    def step(self, token: int, schedule: Schedule) -> Tensor:
        """Takes one token by a launch of its own; logits [V] of the next."""
        cache = self.forward.cache
        cache.room_for(1)
        launch = self._launch(schedule)
        self._seen.append(token)
        self._begin(launch, token, 1, keep=True)
        _, abort = launch.finish()
        # Logits that are no numbers are the caller's to judge; the kernel has stopped over them all the same.
        if abort is not None and abort.kind == "logits":
            self._ready = None
        elif abort is not None:
            self._fail(abort)
        cache.advance(1)
        return launch.logits()

    def decode(
        self, token: int, schedule: Schedule, sampling: Sampling, count: int, stop_ids: Sequence[int] = ()
    ) -> Iterator[int]:
        """The `count` tokens after `token`, or up to one of `stop_ids`, drawn on the device."""
        self._seen.append(token)
        left = count
        while left > 0:
            launch = self._launch(schedule)
            if left == count:
                launch.mark_seen(self._seen)
            self.forward.cache.room_for(min(left, self._tokens))
            self._begin(launch, token, min(left, self._tokens), sampling, stop_ids)
            position, abort = self.forward.cache.length, None
            try:
                for token in launch.stream():
                    self.exchange.at(self.forward.modules)
                    self._seen.append(token)
                    yield token
            finally:
                found, abort = self._end(launch)
            if abort is not None:
                self._fail(abort, position)
            left -= found
            if token in stop_ids:
                return

    def _begin(self, launch: RankLaunch, token: int, count: int, *how: Any, keep: bool = False) -> None:
        self.exchange.at(0)
        launch.start(token, self.forward.cache.length, count, self._limit_s, *how, keep=keep)

    def _end(self, launch: RankLaunch) -> tuple[int, Abort | None]:
        """Ends a launch, early if its tokens are no longer wanted; all ranks of a request stop wanting them alike."""
        if launch.running and self.rank == 0:
            launch.cancel()
        found, abort = launch.finish()
        self.forward.cache.advance(found)
        return found, abort

    def _fail(self, abort: Abort, position: int = 0) -> None:
        """Raises what a caller expects for a launch that ended early."""
        self._ready = None
        if abort.kind == "logits":
            at = position + abort.token + 1
            raise ValueError(f"the logits for position {at} are not numbers; the model or its weights are broken")
        if abort.kind == "peer":
            raise RunAborted(f"rank {self.rank} stopped: {abort.text}")
        raise WaitTimeout(f"{abort.text} (limit {self._limit_s:g} s)", abort.culprit)

    def take_waits(self) -> tuple[float, float]:
        """Not known in seconds: the kernel counts polls."""
        self.exchange.take_waits()
        return float("nan"), float("nan")

    def set_latency(self, seconds: float) -> None:
        """Refuses a latency: the kernel's messages are read as soon as they are there."""
        if seconds:
            raise RequestError("an emulated link latency needs the eager or compiled runner, not the persistent one")


def check_triton(device: torch.device) -> None:
    """Chooses triton's interpreter where there is no GPU; raises PersistentError."""
    if device.type == "cpu":
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise PersistentError("triton was imported without its interpreter; set TRITON_INTERPRET=1 before that")
        os.environ["TRITON_INTERPRET"] = "1"
    elif os.environ.get("TRITON_INTERPRET") == "1":
        raise PersistentError("TRITON_INTERPRET=1 is set, and the interpreter cannot reach a GPU's memory; unset it")
    if importlib.util.find_spec("triton") is None:
        raise PersistentError("triton is not installed; pip install 'laneformer[kernels]'")


def gpu_shape(device: torch.device) -> DeviceShape:
    """One program for every multiprocessor of a GPU."""
    return DeviceShape(torch.cuda.get_device_properties(device).multi_processor_count)
