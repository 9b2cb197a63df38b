"""What is asked of the ranks and what comes back, without torch, so that the parent process stays light."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from laneformer.config import LaneConfig
from laneformer.infer.sampling import Sampling


class RequestError(ValueError):
    """A request the model cannot serve; the message says what was given and what fits."""


@dataclass(frozen=True)
class Request:
    """What to decode: token ids in, how many out at most, how to draw, when to stop, and the sync schedule's text form.

    `link_latency_us` emulates a slower link between ranks. `ignore_end` decodes `max_tokens` whatever comes.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    schedule: str = "checkpoint"
    link_latency_us: float = 0.0
    ignore_end: bool = False


@dataclass(frozen=True)
class Token:
    """A decoded token: its id and position, seconds since the request came, and seconds this rank waited for it.

    `wait_s` is the time spent waiting for module partials, `head_wait_s` for the two exchanges at the head;
    not a number where the runner does not know.
    """

    id: int
    position: int
    at_s: float
    wait_s: float
    head_wait_s: float
    finish: str | None = None


def request_from(keys: dict[str, Any]) -> Request:
    """A request from its JSON form."""
    lists = {name: tuple(keys[name]) for name in ("prompt", "stop_ids", "stop_texts")}
    return Request(**{**keys, **lists, "sampling": Sampling(**keys["sampling"])})


def check_request(request: Request, config: LaneConfig, capacity: int) -> None:
    """Raises RequestError for a request that cannot be served."""
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, got {request.max_tokens}")
    if not 0 <= request.link_latency_us < math.inf:
        raise RequestError(f"a link latency must be 0 us or above, got {request.link_latency_us}")
    # One position is for the token to decode.
    check_tokens(request.prompt, config, min(capacity, config.max_position_embeddings) - 1)


def check_tokens(tokens: Sequence[int], config: LaneConfig, limit: int) -> None:
    """Raises RequestError unless there are 1..`limit` tokens, all in the vocabulary."""
    if not tokens:
        raise RequestError("the prompt is empty; give at least one token")
    unknown = [i for i in tokens if not 0 <= i < config.vocab_size]
    if unknown:
        raise RequestError(f"the prompt holds ids {unknown[:5]} outside the vocabulary 0..{config.vocab_size - 1}")
    if len(tokens) > limit:
        raise RequestError(f"the prompt has {len(tokens)} tokens, but at most {limit} fit")
