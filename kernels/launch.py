"""One rank's end of the persistent kernel under one schedule: its buffers, its launches, what came of them.

A launch decodes up to as many tokens as its buffers hold. On a GPU it returns at once, and the host reads tokens from
pinned memory while the kernel runs; under Triton's interpreter (TRITON_INTERPRET=1 before triton is imported) it
returns when all is done.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from laneformer.kernels.aborts import Abort, read_abort
from laneformer.kernels.buffers import RankMemory, Shared, Tables, Weights, constants
from laneformer.kernels.decode import decode
from laneformer.kernels.interpreted import mended
from laneformer.kernels.plan import Plan

# One warp group less than fills a register file: a program has a GPU's multiprocessor to itself.
WARPS = 8
# Counters are zeroed before they reach what an int32 holds.
COUNTER_LIMIT = 1 << 30
# Polls a second that a wait makes at most (on GPUs estimated, not measured); a limit in seconds is as many polls.
POLLS_PER_S = {"cpu": 2000, "cuda": 4_000_000}
# Seconds that the host naps between looks at a running kernel.
NAP_S = 20e-6


class Settings(Protocol):
    """How tokens are drawn (laneformer.infer.sampling.Sampling has it)."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def seed(self) -> int: ...


class RankLaunch:
    """A rank's buffers and launches; every rank must launch alike.

    peers: Shared of all ranks, as this one reaches them; keys, values: the cache of each layer, [lanes, 1, KV heads,
    positions, E]; cos, sin: float32 [positions, E / 2]; tokens: the most of a launch. Logits are kept by launches of a
    single token. `decoded` counts tokens since `clear`.
    """

    def __init__(
        self, plan: Plan, rank: int, weights: Weights, keys: list[Tensor], values: list[Tensor], peers: list[Shared],
        cos: Tensor, sin: Tensor, tokens: int,
    ) -> None:  # fmt: skip
        self.plan, self.rank, self.tokens = plan, rank, tokens
        self.device = weights.embedding_VD.device
        self.memory = RankMemory(plan, rank, weights, keys, values, peers, tokens, 1)
        self.tables = Tables.of(plan, rank, cos, sin, self.device)
        amd = torch.version.hip is not None and self.device.type != "cpu"
        self._constants = {keep: constants(plan, weights, keep, amd) for keep in (False, True)}
        self._amd = amd
        self.decoded = 0
        self._counted = 0
        self._began: torch.cuda.Event | None = None
        self._done: torch.cuda.Event | None = None

    def clear(self) -> None:
        """As before the first token; all ranks must have done so before any launches again."""
        self.memory.clear()
        self.decoded = self._counted = 0
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)

    def mark_seen(self, tokens: Sequence[int]) -> None:
        """Exactly these tokens, and those decoded from now on, are what a repetition penalty applies to."""
        seen = self.memory.tensors["SEEN"]
        seen.zero_()
        seen[torch.tensor(sorted(set(tokens)), dtype=torch.int64, device=self.device)] = 1

    def start(
        self, token: int, position: int, count: int, limit_s: float, sampling: Settings | None = None,
        stops: Sequence[int] = (), keep: bool = False,
    ) -> None:  # fmt: skip
        """Decodes `count` tokens after `token` at `position`, at most up to one of `stops`; a GPU goes on by itself."""
        if not 1 <= count <= (1 if keep else self.tokens):
            raise ValueError(f"a launch decodes 1..{1 if keep else self.tokens} tokens, got {count}")
        if self._counted * self.plan.signals_per_token > COUNTER_LIMIT:
            self._restart_counters()
        device = self.device
        self.memory.tensors["TOKENS"].fill_(-1)
        self.memory.tensors["CANCEL"].zero_()
        told = told_words(token, position, count, self.decoded, limit_s, sampling, stops, device)
        arguments = (self.memory.table, *told, *shared_arguments(self.tables, self.plan))
        if device.type != "cpu":
            self._began, self._done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._began.record()
        with compiled_for(self._amd) if device.type != "cpu" else mended():
            decode[(self.plan.programs,)](*arguments, **self._constants[keep], **options_of(device))
        if self._done is not None:
            self._done.record()

    def compile(self, keep: bool = False) -> None:
        """Compiles for the GPU without launching; later launches find it in Triton's cache on disk."""
        told = told_words(0, 0, 1, 0, 1.0, None, (), self.device)
        arguments = (self.memory.table, *told, *shared_arguments(self.tables, self.plan))
        # As Any: only a compiled kernel has it.
        kernel: Any = decode
        with compiled_for(self._amd):
            kernel.warmup(*arguments, grid=(self.plan.programs,), **self._constants[keep], **options_of(self.device))

    def _restart_counters(self) -> None:
        """Zeroes what only this rank counts; its programs are all gone between launches."""
        self.memory.tensors["COUNTERS"].zero_()
        self.memory.tensors["TARGETS"].zero_()
        self._counted = 0

    @property
    def running(self) -> bool:
        """Whether the device is still at it."""
        return self._done is not None and not self._done.query()

    def cancel(self) -> None:
        """Asks all ranks to end after the token they are at; of rank 0's host only, the others may ask in vain."""
        self.memory.tensors["CANCEL"].fill_(1)

    def stream(self) -> Iterator[int]:
        """The tokens of the launch, as they come."""
        tokens = self.memory.tensors["TOKENS"].numpy()
        for number in range(self.tokens):
            while tokens[number] < 0 and self.running:
                time.sleep(NAP_S)
            if tokens[number] < 0:
                return
            yield int(tokens[number])

    def finish(self) -> tuple[int, Abort | None]:
        """Waits for the launch to end: how many tokens it decoded, and why it ended early, if something went wrong."""
        if self._done is not None:
            self._done.synchronize()
        found = int(self.memory.tensors["RESULT"][0])
        self.decoded += found
        self._counted += found
        return found, read_abort(self.memory.peers[self.rank].abort.tolist(), self.plan, self.rank)

    def elapsed_us(self) -> float | None:
        """Microseconds that the device took for the last launch, once it has ended; None without a GPU."""
        if self._began is None or self._done is None:
            return None
        return self._began.elapsed_time(self._done) * 1e3

    def logits(self) -> Tensor:
        """Logits [V] of the last launch that kept them."""
        return self.memory.tensors["LOGITS"].clone()

    def polls(self) -> tuple[int, int]:
        """Polls beyond the first in the last launch, all programs together: for the rank's own, and for messages."""
        own, messages = self.memory.tensors["WAITS"].view(-1, 2).sum(0).tolist()
        return own, messages


def told_words(
    token: int, position: int, count: int, decoded: int, limit_s: float, sampling: Settings | None,
    stops: Sequence[int], device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What a launch is told: int64 words and float64 knobs in the order of kernels/memory.py, then stop ids."""
    polls = min(int(limit_s * POLLS_PER_S["cpu" if device.type == "cpu" else "cuda"]), 2**31 - 1)
    seed, top_k = (signed(sampling.seed), sampling.top_k) if sampling else (0, 0)
    knobs = [sampling.temperature, sampling.top_p, sampling.repetition_penalty] if sampling else [0.0, 1.0, 1.0]
    return (
        torch.tensor([count, position, token, decoded, polls, seed, top_k, len(stops)], device=device),
        torch.tensor(knobs, dtype=torch.float64, device=device),
        torch.tensor([*stops, 0], dtype=torch.int32, device=device),
    )


def shared_arguments(tables: Tables, plan: Plan) -> tuple[Any, ...]:
    """What all launches of a plan are given alike."""
    return (
        tables.schedule, tables.own, tables.lane_slot, tables.slot_lane, tables.cos, tables.sin, plan.config.norm_eps,
    )  # fmt: skip


def options_of(device: torch.device) -> dict[str, Any]:
    """Launch options: on a GPU a grid too large to be resident is an error, not a hang."""
    if device.type == "cpu":
        return {}
    return {"num_warps": WARPS, "num_stages": 1, "launch_cooperative_grid": True}


def signed(seed: int) -> int:
    """A 64-bit seed as the int64 with the same bits."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


@contextmanager
def compiled_for(amd: bool) -> Iterator[None]:
    """Compiler settings that the kernel's polls need: AMD's buffer operations lose what makes a load volatile."""
    # As Any: the typed attributes differ between triton's releases.
    knobs: Any = importlib.import_module("triton.knobs")
    with knobs.amd.scope():
        if amd:
            knobs.amd.use_buffer_ops = False
        yield
