"""Decoding a transformers model the two ways its users do, timed: generate(), and a compiled static-cache loop."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Clock:
    """A streamer for generate() that notes when each token came, seconds since `start`."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True
        self._began = time.perf_counter()

    def put(self, value: Tensor) -> None:
        """Called by generate(): first with the prompt, then with every token."""
        if not self._prompt:
            self.times.append(time.perf_counter() - self._began)
        self._prompt = False

    def end(self) -> None:
        """Called by generate() at the end."""


def with_generate(model: Any, prompt: Sequence[int], count: int) -> list[float]:
    """Seconds at which greedy generate(), dynamic cache, gave each of `count` tokens."""
    clock = Clock()
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            streamer=clock,
            pad_token_id=0,
        )
    return clock.times


class CompiledLoop:
    """A greedy loop over a torch.compile'd forward pass with a static cache of `capacity` positions."""

    def __init__(self, model: Any, capacity: int) -> None:
        self.model, self.capacity = model, capacity
        # Newer releases of transformers have another name for the same argument.
        renamed = "cache" in inspect.signature(model.forward).parameters
        self._cache_name = "cache" if renamed else "past_key_values"
        self._step: Callable[..., Any] = torch.compile(model.forward, dynamic=False, fullgraph=True)

    def times(self, prompt: Sequence[int], count: int) -> list[float]:
        """Seconds at which each of `count` tokens came; the prompt runs uncompiled."""
        from transformers import StaticCache

        times = []
        ids = torch.tensor([list(prompt)])
        began = time.perf_counter()
        cache = {self._cache_name: StaticCache(config=self.model.config, max_cache_len=self.capacity)}
        with torch.inference_mode():
            logits = self.model(ids, **cache, use_cache=True, logits_to_keep=1).logits
            token = logits[:, -1:].argmax(-1)
            times.append(time.perf_counter() - began)
            position = torch.tensor([[len(prompt)]])
            for _ in range(count - 1):
                logits = self._step(token, position_ids=position, **cache, use_cache=True).logits
                token = logits[:, -1:].argmax(-1)
                position = position + 1
                times.append(time.perf_counter() - began)
        return times
