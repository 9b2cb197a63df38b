"""Where one training step's time goes, with the planned layout and with every other that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from laneformer.config import LaneConfig
from laneformer.cost import Machine, lanes_per_rank, training_flops
from laneformer.schedule import Schedule
from laneformer.training_cost import SHARDS, Layout, training_memory
from laneformer.training_traffic import lane_exchange, module_flops, weight_traffic


def step_of(
    config: LaneConfig, schedule: Schedule, layout: Layout, machine: Machine, flops_per_s: float
) -> dict[str, Any]:
    """Seconds of one step by what they are spent on, computing at `flops_per_s`, and what passes through the links."""
    lanes = lane_exchange(config, schedule, layout, machine, flops_per_s)
    weights = weight_traffic(config, layout, machine, lanes.backward_compute_s)
    tokens = layout.tokens_per_step / (layout.devices * flops_per_s)
    forward = config.num_hidden_layers * sum(module_flops(config, layout.sequence))
    spent = {
        "compute_s": tokens * training_flops(config, layout.sequence),
        "recompute_s": tokens * forward if layout.recompute else 0.0,
        "repeated_head_s": tokens * repeated_head_flops(config, layout),
        "lane_wait_s": layout.accumulation * lanes.wait_s,
        "weights_exposed_s": weights.exposed_s,
    }
    total = sum(spent.values())
    a_step = {
        "bytes_a_step": layout.accumulation * lanes.bytes,
        "link_s_a_step": layout.accumulation * lanes.link_s,
        "hidden": lanes.hidden,
    }
    return {
        **spent,
        "total_s": total,
        "tokens_per_s": layout.tokens_per_step / total,
        "lanes": {**dataclasses.asdict(lanes), **a_step},
        "weights": dataclasses.asdict(weights),
    }


def repeated_head_flops(config: LaneConfig, layout: Layout) -> float:
    """FLOPs a token, over all ranks, that the ranks of a replica spend on logits that another rank forms too."""
    if config.lm_head_type == "vocab_parallel":
        return 0.0
    width = config.hidden_size * (config.num_lanes if config.lm_head_type == "lane" else 1)
    return 3 * 2.0 * config.vocab_size * width * (layout.lane_ranks - 1)


def layouts(
    config: LaneConfig, schedule: Schedule, layout: Layout, machine: Machine, flops_per_s: float
) -> list[dict[str, Any]]:
    """For each number of lanes on a device the fastest layout that fits, beside the same with standard TP.

    Of equally fast ones the first, in the order: nothing recomputed, ddp, the largest micro-batch.
    """
    blocking, found = Schedule.tensor_parallel(config.num_hidden_layers), []
    for ranks in (n for n in range(1, config.num_lanes + 1) if config.num_lanes % n == 0):
        fitting = [
            (step_of(config, schedule, other, machine, flops_per_s), other)
            for other in variants(layout, ranks)
            if training_memory(config, schedule, other).total <= (machine.device.memory or 0.0)
        ]
        if fitting:
            step, other = min(fitting, key=lambda pair: pair[0]["total_s"])
            found.append(_row(config, schedule, other, step, step_of(config, blocking, other, machine, flops_per_s)))
    return found


def variants(layout: Layout, lane_ranks: int) -> Iterator[Layout]:
    """The ways to lay the same batch out over the same devices, so many of them to a replica."""
    if layout.devices % lane_ranks or layout.batch % (layout.devices // lane_ranks):
        return
    sequences = layout.batch * lane_ranks // layout.devices
    for recompute in (False, True):
        for shard in SHARDS:
            for micro in (n for n in range(sequences, 0, -1) if sequences % n == 0):
                yield dataclasses.replace(
                    layout, lane_ranks=lane_ranks, shard=shard, recompute=recompute, micro_batch=micro
                )


def _row(
    config: LaneConfig, schedule: Schedule, layout: Layout, step: dict[str, Any], blocking: dict[str, Any]
) -> dict[str, Any]:
    """One layout in numbers: memory, time, and what the lanes' exchange costs with and without the delay."""
    return {
        "lanes_per_rank": lanes_per_rank(config, layout.lane_ranks),
        "shard": layout.shard,
        "recompute": layout.recompute,
        "micro_batch": layout.micro_batch,
        "memory": training_memory(config, schedule, layout).total,
        "step_s": step["total_s"],
        "recompute_s": step["recompute_s"],
        "repeated_head_s": step["repeated_head_s"],
        "lane_bytes": step["lanes"]["bytes_a_step"],
        "lane_link_s": step["lanes"]["link_s_a_step"],
        "lane_wait_s": step["lane_wait_s"],
        "blocking_wait_s": blocking["lane_wait_s"],
        "blocking_step_s": blocking["total_s"],
    }
