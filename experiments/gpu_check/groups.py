"""Do 1, 2, 4 and 8 ranks, emulated as groups of programs on one device, give the same bits?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from common import arguments, random_weights, run_kernel, save, sizes, spread
from torch import Tensor

from laneformer.cache import KVCache
from laneformer.config import LaneConfig
from laneformer.infer.weights import LayerWeights, RankWeights
from laneformer.kernels.aborts import read_abort
from laneformer.kernels.buffers import RankMemory, Tables, constants, new_shared
from laneformer.kernels.launch import shared_arguments, told_words
from laneformer.kernels.plan import DeviceShape, Plan
from laneformer.schedule import Schedule
from laneformer.view import turns

WIDTH = 8


def share(weights: RankWeights, lanes: range) -> RankWeights:
    """The weights of some lanes out of those of all."""
    part = slice(lanes.start, lanes.stop)

    def of(layer: LayerWeights) -> LayerWeights:
        return LayerWeights(**{
            name: value if value is None or name in ("q_norm_E", "k_norm_E") else value[part]
            for name, value in vars(layer).items()
        })  # fmt: skip

    layers = tuple(of(layer) for layer in weights.layers)
    return RankWeights(
        weights.config, tuple(lanes), weights.embedding_VD, layers, weights.norm_LD[part], weights.head_L[part]
    )


class Groups:
    """All ranks of a plan in one launch."""

    def __init__(self, s: Any, weights: RankWeights, ranks: int, text: str, tokens: int) -> None:
        config = weights.config
        shape = DeviceShape(max(1, s.programs // WIDTH) if not s.tiny else 1, block_positions=32)
        self.plan = Plan(config, Schedule.parse(text, config), ranks, shape, s.capacity)
        self.ranks, self.s, self.tokens, self.us = ranks, s, tokens, 0.0
        shared = [new_shared(self.plan, s.device) for _ in range(ranks)]
        cos, sin = turns(config, torch.arange(s.capacity, device=s.device)[None], torch.float32)
        self.memories, tables, self.caches = [], [], []
        for rank in range(ranks):
            lanes = range(rank * self.plan.lanes, (rank + 1) * self.plan.lanes)
            held = share(weights, lanes)
            cache = KVCache(config, s.capacity, 1, len(lanes), s.dtype, s.device)
            self.caches.append(cache)
            self.memories.append(RankMemory(self.plan, rank, held, cache.k, cache.v, shared, tokens, tokens))
            tables.append(Tables.of(self.plan, rank, cos[0, 0, 0], sin[0, 0, 0], s.device))
            self.constants = constants(self.plan, held, True, torch.version.hip is not None)
        # Held: the kernel reaches the weights through addresses only.
        self.weights = weights
        self.tables = replace(tables[0], lane_slot=torch.cat([table.lane_slot for table in tables]))
        self.table = torch.cat([memory.table for memory in self.memories])

    def run(self, token: int, position: int, decoded: int) -> tuple[list[int], Tensor]:
        """Tokens and logits [tokens, V] of rank 0, once all ranks agree on the tokens."""
        told = told_words(token, position, self.tokens, decoded, 5.0, None, (), self.s.device)
        names = {f"{name} of rank {memory.rank}": tensor for memory in self.memories
                 for name, tensor in memory.tensors.items()}  # fmt: skip
        names |= {f"{name} of rank {r}": tensor for r, shared in enumerate(self.memories[0].peers)
                  for name, tensor in vars(shared).items()}  # fmt: skip
        from laneformer.kernels.decode import decode

        arguments = (self.table, *told, *shared_arguments(self.tables, self.plan))
        events = None if self.s.tiny else [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        if events:
            events[0].record()
        run_kernel(decode, self.ranks * self.plan.programs, arguments, self.constants, names)
        if events:
            events[1].record()
            events[1].synchronize()
            self.us = events[0].elapsed_time(events[1]) * 1e3
        found = []
        for rank, memory in enumerate(self.memories):
            abort = read_abort(memory.peers[rank].abort.tolist(), self.plan, rank)
            if abort is not None:
                raise RuntimeError(f"rank {rank} of {self.ranks}: {abort.text}")
            found.append(memory.tensors["TOKENS"].tolist())
        if any(tokens != found[0] for tokens in found):
            raise RuntimeError(f"the ranks drew different tokens: {found}")
        return found[0], self.memories[0].tensors["LOGITS"].view(self.tokens, -1).cpu().clone()


def middle_sized(config: LaneConfig) -> LaneConfig:
    """Four layers of the 2B: enough to see all buffers used again, little enough to be quick."""
    return config.replace(num_hidden_layers=4, swa_layers=(0, 1))


def main() -> None:
    """The step."""
    options = arguments(__doc__)
    s = sizes(options.tiny)
    s = s if s.tiny else replace(s, config=middle_sized(s.config), capacity=256, tokens=16)
    weights = random_weights(s, range(s.config.num_lanes))
    rows = []
    for text in ("tensor-parallel", "delayed:1") if s.tiny else ("tensor-parallel", "delayed:4", "ladder", "silent"):
        wanted = None
        for ranks in (1, 2, 8) if s.tiny else (1, 2, 4, 8):
            groups = Groups(s, weights, ranks, text, s.tokens)
            tokens, logits = groups.run(5, 0, 0)
            wanted = (tokens, logits) if wanted is None else wanted
            same = wanted[0] == tokens and torch.equal(wanted[1], logits)
            row = {"schedule": text, "ranks": ranks, "programs": groups.plan.programs, "bit_equal": same}
            if not s.tiny:
                row["us_per_token"] = timed(groups, tokens[-1])
            rows.append(row)
            print(row, flush=True)
    save(options.json, {"rows": rows, "passed": all(row["bit_equal"] for row in rows)})


def timed(groups: Groups, token: int) -> dict[str, float] | None:
    """Microseconds a token of launches that follow each other; a group has an eighth of the device."""
    times = []
    for number in range(1, 5):
        groups.run(token, number * groups.tokens, number * groups.tokens)
        times.append(groups.us / groups.tokens)
    return spread(times)


if __name__ == "__main__":
    main()
