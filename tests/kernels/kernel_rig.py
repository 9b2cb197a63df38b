"""One rank of the persistent kernel under the interpreter, one program, as the tests drive it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from laneformer.cache import KVCache
from laneformer.infer.sampling import Sampling
from laneformer.infer.weights import RankWeights
from laneformer.kernels.buffers import RankMemory, Tables, constants, new_shared
from laneformer.kernels.decode import decode
from laneformer.kernels.interpreted import mended
from laneformer.kernels.plan import DeviceShape, Plan
from laneformer.schedule import Schedule
from laneformer.view import turns

GOLDEN = Path(__file__).parents[1] / "golden"
WAIT_POLLS = 1000


class Rig:
    """A kernel with room for `capacity` positions, whose cache starts out poisoned."""

    def __init__(self, weights: RankWeights, schedule: Schedule, capacity: int, block: int = 16, tile: int = 32768):
        config = weights.config
        self.config = config
        self.plan = Plan(config, schedule, 1, DeviceShape(1, tile=tile, block_positions=block), capacity)
        cache = KVCache(config, capacity, 1, config.num_lanes, weights.dtype)
        for tensor in (*cache.k, *cache.v):
            tensor.fill_(torch.nan)
        self.shared = new_shared(self.plan)
        self.memory = RankMemory(self.plan, 0, weights, cache.k, cache.v, [self.shared], capacity, capacity)
        cos, sin = turns(config, torch.arange(capacity)[None], torch.float32)
        self.tables = Tables.of(self.plan, 0, cos[0, 0, 0], sin[0, 0, 0])
        self.constants = constants(self.plan, weights, True)
        self.weights, self.done = weights, 0

    @classmethod
    def golden(cls, name: str, text: str, capacity: int, dtype: torch.dtype = torch.float32, **shape: int) -> Rig:
        """A rig of a golden checkpoint under a schedule's text form."""
        weights = RankWeights.load(GOLDEN / name, None, dtype)
        return cls(weights, Schedule.parse(text, weights.config), capacity, **shape)

    def run(
        self, token: int, position: int, count: int = 1, sampling: Sampling | None = None, stops: tuple[int, ...] = ()
    ) -> tuple[list[int], Tensor]:
        """Decodes after `token` at `position`: the tokens, and the logits [tokens, V] they were drawn from."""
        sampling = sampling or Sampling()
        launch = torch.tensor(
            [count, position, token, self.done, WAIT_POLLS, sampling.seed, sampling.top_k, len(stops)]
        )
        knobs = torch.tensor([sampling.temperature, sampling.top_p, sampling.repetition_penalty], dtype=torch.float64)
        tables = self.tables
        arguments = (
            self.memory.table, launch, knobs, torch.tensor([*stops, 0], dtype=torch.int32), tables.schedule, tables.own,
            tables.lane_slot, tables.slot_lane, tables.cos, tables.sin, self.config.norm_eps,
        )  # fmt: skip
        with mended():
            decode[(1,)](*arguments, **self.constants)
        found = int(self.memory.tensors["RESULT"][0])
        self.done += found
        logits = self.memory.tensors["LOGITS"].view(-1, self.config.vocab_size)[:found]
        return self.memory.tensors["TOKENS"][:found].tolist(), logits.clone()
