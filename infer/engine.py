"""Prefill and decode of one request. The engine knows tokens, not text; text comes in only as a stop test.

Shape suffixes: S positions, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from laneformer.config import LaneConfig
from laneformer.infer.limits import PREFILL_CHUNK
from laneformer.infer.request import Request, Token, check_request, check_tokens
from laneformer.infer.sampling import Sampling, draw
from laneformer.schedule import Schedule


class Runner(Protocol):
    """Executes forward passes of one rank; position and cache are its own. Logits may be on any device.

    A runner that draws tokens itself also has `decode`, see Decoder.
    """

    name: str
    config: LaneConfig
    capacity: int

    def reset(self) -> None:
        """Forgets the cache."""
        ...

    def prefill(self, tokens_S: Tensor, schedule: Schedule, head: Literal["none", "last", "all"]) -> Tensor:
        """Takes prompt tokens; logits [V] after the last one, [S, V] after each, or an empty tensor."""
        ...

    def step(self, token: int, schedule: Schedule) -> Tensor:
        """Takes one token; logits [V] of the next."""
        ...

    def take_waits(self) -> tuple[float, float]:
        """Seconds waited for partials and for the head's exchanges since last asked."""
        ...

    def set_latency(self, seconds: float) -> None:
        """Emulates a link between ranks."""
        ...


@runtime_checkable
class Decoder(Protocol):
    """A runner that draws on its device, and may be many tokens ahead of who asks for them."""

    def decode(
        self, token: int, schedule: Schedule, sampling: Sampling, count: int, stop_ids: Sequence[int] = ()
    ) -> Iterator[int] | None:
        """Takes `token`, then yields the `count` tokens that follow it, each drawn as `sampling.draw` would.

        It may end after one of `stop_ids`.

        None for settings that it cannot draw by. Who leaves the iterator early resets the runner before using it again.
        """
        ...


def generate(
    runner: Runner, request: Request, stopped: Callable[[int], bool] | None = None, chunk: int = PREFILL_CHUNK
) -> Iterator[Token]:
    """Decodes a request token by token; the last token says why it finished.

    finish: `stop_id`, `stop_text`, `length` (max_tokens reached) or `context` (no room for another position). `stopped`
    takes each token and says whether a stop string is complete.
    """
    config = runner.config
    check_request(request, config, runner.capacity)
    schedule = Schedule.parse(request.schedule, config)
    stop_ids = set() if request.ignore_end else {*config.eos_ids, *request.stop_ids}
    room = min(runner.capacity, config.max_position_embeddings)
    seen = list(request.prompt)
    runner.reset()
    began = time.perf_counter()
    runner.set_latency(request.link_latency_us * 1e-6)
    runner.take_waits()
    with torch.inference_mode():
        limit = min(request.max_tokens, room - len(seen))
        for count, token in enumerate(drawn(runner, request, schedule, seen, limit, chunk), 1):
            position = len(seen)
            seen.append(token)
            finish = None
            if token in stop_ids:
                finish = "stop_id"
            elif stopped is not None and stopped(token):
                finish = "stop_text"
            elif count == request.max_tokens:
                finish = "length"
            elif position + 1 >= room:
                finish = "context"
            yield Token(token, position, time.perf_counter() - began, *runner.take_waits(), finish)
            if finish:
                return


def drawn(
    runner: Runner, request: Request, schedule: Schedule, seen: list[int], limit: int, chunk: int
) -> Iterator[int]:
    """At most `limit` tokens one after another; `seen` must grow by each before the next is asked for."""
    token = draw(host(prefill(runner, request.prompt, schedule, chunk)), request.sampling, len(seen), seen)
    yield token
    rest = None
    if isinstance(runner, Decoder) and limit > 1:
        stops = () if request.ignore_end else (*runner.config.eos_ids, *request.stop_ids)
        rest = runner.decode(token, schedule, request.sampling, limit - 1, stops)
    if rest is not None:
        yield from rest
        return
    for _ in range(limit - 1):
        token = draw(host(runner.step(token, schedule)), request.sampling, len(seen), seen)
        yield token


def host(logits: Tensor) -> np.ndarray:
    """Logits as an array in this process's memory."""
    return logits.cpu().numpy()


def prefill(runner: Runner, prompt: Sequence[int], schedule: Schedule, chunk: int = PREFILL_CHUNK) -> Tensor:
    """Takes the prompt in chunks; logits [V] after its last token."""
    tokens_S = torch.tensor(prompt)
    *earlier, last = tokens_S.split(chunk)
    for part in earlier:
        runner.prefill(part, schedule, head="none")
    return runner.prefill(last, schedule, head="last")


def all_logits(
    runner: Runner, tokens: Sequence[int], schedule: Schedule, prefill_count: int, chunk: int = PREFILL_CHUNK
) -> Tensor:
    """Logits [S, V] at every position, on the CPU; the first `prefill_count` by prefill in chunks."""
    check_tokens(tokens, runner.config, min(runner.capacity, runner.config.max_position_embeddings))
    runner.reset()
    with torch.inference_mode():
        parts = [
            runner.prefill(part, schedule, head="all").cpu()
            for part in torch.tensor(tokens[:prefill_count]).split(chunk)
        ]
        parts += [runner.step(token, schedule)[None].cpu() for token in tokens[prefill_count:]]
        return torch.cat(parts)
