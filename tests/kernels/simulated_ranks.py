"""Several ranks of the persistent kernel, each with several programs, under the simulator; and broken copies of it."""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import laneformer.kernels.decode as true_decode
from laneformer.cache import KVCache
from laneformer.infer.sampling import Sampling
from laneformer.infer.weights import RankWeights
from laneformer.kernels.buffers import RankMemory, Tables, constants, new_shared
from laneformer.kernels.plan import DeviceShape, Plan
from laneformer.kernels.simulate import Launch, Report, simulate
from laneformer.schedule import Schedule
from laneformer.view import turns

KERNELS = Path(true_decode.__file__).parent


class Ranks:
    """Ranks of one model; weights: one RankWeights a rank."""

    def __init__(
        self, weights: Sequence[RankWeights], text: str, capacity: int, programs: int, tile: int = 512, block: int = 4
    ) -> None:
        config, count = weights[0].config, len(weights)
        self.config = config
        shape = DeviceShape(programs, tile=tile, block_positions=block)
        self.plan = Plan(config, Schedule.parse(text, config), count, shape, capacity)
        self.shared = [new_shared(self.plan) for _ in range(count)]
        cos, sin = turns(config, torch.arange(capacity)[None], torch.float32)
        self.memories, self.tables, self.constants, self.caches = [], [], [], []
        for rank, held in enumerate(weights):
            cache = KVCache(config, capacity, 1, len(held.lanes), held.dtype)
            self.caches.append(cache)
            memory = RankMemory(self.plan, rank, held, cache.k, cache.v, self.shared, capacity, capacity)
            self.memories.append(memory)
            self.tables.append(Tables.of(self.plan, rank, cos[0, 0, 0], sin[0, 0, 0]))
            self.constants.append(constants(self.plan, held, True))
        self.weights, self.done = weights, 0

    def names(self) -> dict[str, Tensor]:
        """Every buffer that is written, by name."""
        found = {}
        for rank, (memory, shared, cache) in enumerate(zip(self.memories, self.shared, self.caches, strict=True)):
            skipped = ("BOXES", "LOGIT_BOXES", "ABORTS", "CONTROLS", "HEAD_OFFSETS", "LAYERS")
            found |= {f"{name} of rank {rank}": t for name, t in memory.tensors.items() if name not in skipped}
            found |= {f"{name} of rank {rank}": tensor for name, tensor in vars(shared).items()}
            for layer, (keys, values) in enumerate(zip(cache.k, cache.v, strict=True)):
                found |= {f"keys {layer} of rank {rank}": keys, f"values {layer} of rank {rank}": values}
        return found

    def run(
        self, token: int, position: int, count: int = 1, seed: int = 0, memory: str = "sequential", limit: int = 100000,
        sampling: Sampling | None = None, kernel: Any = None, ranks: Sequence[int] | None = None, **changes: Any,
    ) -> tuple[list[int], Tensor, Report]:  # fmt: skip
        """Rank 0's tokens and logits [tokens, V] after `token`; `changes` replace constants, `ranks` run alone."""
        sampling = sampling or Sampling()
        launch = torch.tensor([count, position, token, self.done, limit, sampling.seed, sampling.top_k, 0])
        knobs = torch.tensor([sampling.temperature, sampling.top_p, sampling.repetition_penalty], dtype=torch.float64)
        stops = torch.zeros(1, dtype=torch.int32)
        launches = []
        for rank in range(len(self.memories)) if ranks is None else ranks:
            table = self.tables[rank]
            args = (self.memories[rank].table, launch, knobs, stops, table.schedule, table.own, table.lane_slot,
                    table.slot_lane, table.cos, table.sin, self.config.norm_eps)  # fmt: skip
            sizes = self.constants[rank] | changes
            launches.append(Launch(kernel or true_decode.decode, (self.plan.programs,), args, sizes, rank))
        patience = 6 if limit >= 100000 else 10 * limit
        report = simulate(launches, seed, memory, self.names(), patience)
        found = int(self.memories[0].tensors["RESULT"][0])
        self.done += found
        logits = self.memories[0].tensors["LOGITS"].view(-1, self.config.vocab_size)[:found]
        return self.memories[0].tensors["TOKENS"][:found].tolist(), logits.clone(), report


@contextmanager
def broken(*changes: tuple[str, str, str]) -> Iterator[ModuleType]:
    """The module `decode` of a copy of the kernels in which (file, text, other text) are replaced."""
    name = f"broken_{uuid.uuid4().hex[:8]}"
    folder = Path(tempfile.mkdtemp())
    package = folder / name
    package.mkdir()
    try:
        for source in KERNELS.glob("*.py"):
            text = source.read_text()
            for file, old, new in changes:
                if file == source.stem:
                    assert text.count(old) >= 1, f"{file}.py holds no {old!r}"
                    text = text.replace(old, new)
            (package / source.name).write_text(text.replace("laneformer.kernels", name))
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        yield importlib.import_module(f"{name}.decode")
    finally:
        sys.path.remove(str(folder))
        for module in [module for module in sys.modules if module.split(".")[0] == name]:
            del sys.modules[module]
        shutil.rmtree(folder)
