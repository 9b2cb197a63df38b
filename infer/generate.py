"""What `infer generate` does: a prompt in, text out as it comes, and what it took."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from laneformer.config import LaneConfig
from laneformer.infer.ranks import RankSettings
from laneformer.infer.request import Request, RequestError, Token, check_request
from laneformer.infer.session import Session
from laneformer.infer.tokenizer import Text, cut_at_stop
from laneformer.infer.torchrun import TorchrunSession, under_torchrun

CAPACITY_STEP = 64


@dataclass(frozen=True)
class Prompt:
    """The prompt in one of its three forms."""

    text: str | None = None
    file: Path | None = None
    ids: str | None = None

    def read(self) -> str | tuple[int, ...]:
        """The text, or the token ids."""
        if sum(given is not None for given in (self.text, self.file, self.ids)) != 1:
            raise RequestError("give one of --prompt, --prompt-file and --prompt-ids")
        if self.text is not None:
            return self.text
        if self.ids is not None:
            try:
                return tuple(int(item) for item in self.ids.split(","))
            except ValueError:
                raise RequestError(f"--prompt-ids is {self.ids!r}, expected ids with commas, as in 1,2,3") from None
        assert self.file is not None
        try:
            return sys.stdin.read() if str(self.file) == "-" else self.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"the prompt file cannot be read: {error}") from None


def run_generate(
    folder: Path, prompt: Prompt, request: Request, settings: dict[str, Any], stream: bool, messages: Console
) -> dict[str, Any] | None:
    """Decodes and prints; the numbers, or None on a torchrun rank that has nothing to say."""
    config = LaneConfig.from_pretrained(folder)
    given = prompt.read()
    text = None if isinstance(given, tuple) and not request.stop_texts else Text.from_folder(folder)
    ids = given if isinstance(given, tuple) else tuple(text.encode(given)) if text else ()
    request = replace(request, prompt=ids)
    capacity = -(-(len(ids) + request.max_tokens) // CAPACITY_STEP) * CAPACITY_STEP
    rank_settings = RankSettings(str(folder), capacity=min(capacity, config.max_position_embeddings), **settings)
    check_request(request, config, rank_settings.capacity)
    opened = TorchrunSession if under_torchrun() else Session
    with opened(rank_settings) as session:
        for note in session.notes:
            messages.print(f"note: {note}", style="yellow", markup=False)
        tokens = session.generate(request)
        if not session.speaks:
            for _ in tokens:
                pass
            return None
        done, shown = show(tokens, text, request.stop_texts, stream)
        ranks, runner = session.ranks, session.runner
    result = summary(done, shown, request, ranks, runner)
    messages.print(describe(result), style="dim", highlight=False, soft_wrap=True)
    return result


def show(tokens: Iterable[Token], text: Text | None, stops: tuple[str, ...], stream: bool) -> tuple[list[Token], str]:
    """Prints tokens as text (or ids where there is no tokenizer); nothing from a stop string on is shown."""
    done: list[Token] = []
    whole = printed = ""
    complete = text.stream() if text else None
    # Text that could still become a stop string is held back.
    held = max((len(stop) for stop in stops), default=1) - 1
    for token in tokens:
        done.append(token)
        if complete is None:
            whole += (" " if whole else "") + str(token.id)
        elif token.finish != "stop_id":
            whole = cut_at_stop(whole + complete(token.id), stops)
        if stream:
            ready = whole if token.finish else whole[: max(len(printed), len(whole) - held)]
            print(ready[len(printed) :], end="", flush=True)
            printed = ready
    print(whole[len(printed) :], flush=True)
    return done, whole


def summary(tokens: list[Token], text: str, request: Request, ranks: int, runner: str) -> dict[str, Any]:
    """What was decoded and what it took."""
    at_ms = np.array([token.at_s for token in tokens]) * 1e3
    steps = np.diff(at_ms)
    return {
        "prompt_tokens": len(request.prompt),
        "tokens": [token.id for token in tokens],
        "text": text,
        "finish": tokens[-1].finish,
        "schedule": request.schedule,
        "runner": runner,
        "ranks": ranks,
        "ttft_ms": float(at_ms[0]),
        "itl_ms": {f"p{p}": float(np.percentile(steps, p)) for p in (50, 90, 99)} if len(steps) else None,
        "tokens_per_s": float(1e3 / np.median(steps)) if len(steps) else None,
        "wait_us_per_token": median_us([token.wait_s for token in tokens]),
        "head_wait_us_per_token": median_us([token.head_wait_s for token in tokens]),
    }


def median_us(seconds: list[float]) -> float | None:
    """The median in microseconds; None if the runner does not know these times."""
    median = float(np.median(seconds) * 1e6)
    return None if math.isnan(median) else median


def describe(result: dict[str, Any]) -> str:
    """The numbers in one line."""
    waits = result["wait_us_per_token"]
    waited = "" if waits is None else f", {waits:.0f} us a token waiting for partials"
    speed = f", {result['tokens_per_s']:.1f} tokens/s" if result["tokens_per_s"] else ""
    return (
        f"{result['prompt_tokens']} tokens in, {len(result['tokens'])} out ({result['finish']}), first after "
        f"{result['ttft_ms']:.0f} ms{speed}{waited}; "
        f"{result['schedule']}, {result['runner']}, {result['ranks']} rank{'s' if result['ranks'] > 1 else ''}"
    )
