"""What a token costs on a machine, as a JSON-able dict and as tables: sizes, floors, predicted times."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from laneformer.config import LaneConfig
from laneformer.cost import (
    Assumptions,
    Latency,
    Machine,
    count_parameters,
    decode_bytes,
    decode_flops,
    floor_ms,
    kv_bytes,
    kv_bytes_per_token,
    lanes_per_rank,
    parse_machine,
    partial_bytes,
    schedule_latency,
    training_flops,
)
from laneformer.schedule import Schedule

SCHEDULES = ("tensor-parallel", "ladder", "checkpoint", "silent")


def cost_report(
    config: LaneConfig,
    machine_text: str,
    ranks: int | None = None,
    schedules: Sequence[str] = SCHEDULES,
    dtype: torch.dtype | str = "float16",
    context: int | None = None,
    measured_bandwidth: float | None = None,
    assumptions: Assumptions | None = None,
) -> dict[str, Any]:
    """Sizes, bytes, FLOPs, floors and predicted latencies of `config` on `machine_text` (8xh200, this, ...).

    `ranks` is one per device, at most one per lane, and `context` 1024 positions or as many as the model has, unless
    given. `measured_bandwidth` in bytes a second is for the machine `this`, where streaming is then assumed to reach
    it and barriers and sampling to be free. Raises ValueError for an unknown machine, schedule or type, and for ranks
    or a context that cannot be.
    """
    machine = parse_machine(machine_text, measured_bandwidth)
    if context is None:
        context = min(1024, config.max_position_embeddings)
    if not 0 <= context <= config.max_position_embeddings:
        raise ValueError(f"context is {context}, expected 0..{config.max_position_embeddings} positions")
    if ranks is None:
        ranks = min(machine.count, config.num_lanes)
    if assumptions is None and machine.device.peak_flops is None:
        assumptions = Assumptions(efficiency=1.0, sync_us=0.0, head_us=0.0)
    parameters = count_parameters(config)
    floor_us = 1e3 * floor_ms(config, machine, ranks, dtype, context)
    plans = {text: Schedule.parse(text, config) for text in schedules}
    return {
        "parameters": {**dataclasses.asdict(parameters), "total": parameters.total},
        "machine": {"text": machine_text, "count": machine.count, **dataclasses.asdict(machine.device)},
        "ranks": ranks,
        "lanes_per_rank": lanes_per_rank(config, ranks),
        "dtype": str(dtype).removeprefix("torch."),
        "context": context,
        "bytes": _bytes(config, machine, ranks, dtype, context),
        "flops_per_token": {
            "decode": decode_flops(config, context),
            "training": training_flops(config, config.max_position_embeddings),
            "training_without_attention": training_flops(config, config.max_position_embeddings, with_attention=False),
        },
        "floor_us": {
            "weights_only": 1e3 * floor_ms(config, machine, ranks, dtype),
            "at_context": floor_us,
        },
        "schedules": {
            text: _latency(plan, schedule_latency(config, plan, machine, ranks, dtype, context, assumptions), floor_us)
            for text, plan in plans.items()
        },
        "assumptions": dataclasses.asdict(assumptions or Assumptions()),
    }


def _bytes(
    config: LaneConfig, machine: Machine, ranks: int, dtype: torch.dtype | str, context: int
) -> dict[str, int | bool | None]:
    """What is read, kept and sent for one token; `fits` says whether weights and cache fit in a device's memory."""
    rank = decode_bytes(config, dtype, context, ranks)
    table = config.vocab_size * rank.embedding_row
    kept = sum(rank.weights) + sum(rank.cache) + table + (0 if config.tie_word_embeddings else rank.head)
    sharing = -(-ranks // machine.count)
    memory = machine.device.memory
    return {
        "weights_per_token": decode_bytes(config, dtype).total,
        "weights_per_token_and_rank": decode_bytes(config, dtype, ranks=ranks).total,
        "cache_per_position": kv_bytes_per_token(config, dtype),
        "cache_at_context": kv_bytes(config, context, dtype),
        "partial": partial_bytes(config, dtype),
        "kept_per_rank": kept,
        "fits": None if memory is None else kept * sharing <= memory,
    }


def _latency(schedule: Schedule, latency: Latency, floor_us: float) -> dict[str, Any]:
    """One schedule's row: its own name, messages, where the time goes, and its share of the floor."""
    return {
        "schedule": str(schedule),
        "messages": schedule.num_messages,
        "total_us": latency.total_us,
        "tokens_per_second": 1e6 / latency.total_us,
        "share_of_floor": floor_us / latency.total_us,
        "stream_us": latency.stream_us,
        "sync_us": latency.sync_us,
        "head_us": latency.head_us,
        "message_us": latency.message_us,
        "wait_us": latency.wait_us,
        "head_wait_us": latency.head_wait_us,
        "module_waits_us": list(latency.waits_us),
    }


def print_cost(report: dict[str, Any], console: Console) -> None:
    """Prints a `cost_report`: sizes and floors first, then the schedules, then what was assumed."""
    machine, sizes, floor = report["machine"], report["bytes"], report["floor_us"]
    title = f"One token on {machine['count']} x {machine['name']}, {report['ranks']} ranks, {report['dtype']}"
    facts = Table(title=title, show_header=False)
    for name, value in _facts(report, sizes, floor):
        facts.add_row(name, value)
    console.print(facts)
    table = Table(title=f"Predicted decode at context {report['context']}, batch 1 (a model, not a measurement)")
    for column in (
        "schedule",
        "messages",
        "us/token",
        "tokens/s",
        "of floor",
        "streaming",
        "barriers",
        "head",
        "waiting",
    ):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for text, row in report["schedules"].items():
        name = text if row["schedule"] == text else f"{text} ({row['schedule']})"
        times = (f"{row[key]:,.1f}" for key in ("stream_us", "sync_us", "head_us", "wait_us"))
        speed = (f"{row['total_us']:,.0f}", f"{row['tokens_per_second']:,.0f}", f"{row['share_of_floor']:.0%}")
        table.add_row(name, str(row["messages"]), *speed, *times)
    console.print(table)
    assumed = ", ".join(f"{name} {value}" for name, value in report["assumptions"].items() if value is not None)
    console.print(f"Assumed: {assumed}. {machine['name']}: {machine['source']}.", highlight=False)


def _facts(report: dict[str, Any], sizes: dict[str, Any], floor: dict[str, float]) -> list[tuple[str, str]]:
    """The first table's rows."""
    parameters, flops, machine = report["parameters"], report["flops_per_token"], report["machine"]
    parts = ", ".join(f"{name.replace('_', '-')} {count:,}" for name, count in parameters.items() if name != "total")
    fits = {True: "fits", False: "does not fit", None: "memory not known"}[sizes["fits"]]
    return [
        ("parameters", f"{parameters['total']:,} ({parts})"),
        ("weights read", f"{_size(sizes['weights_per_token'])}, {_size(sizes['weights_per_token_and_rank'])} a rank"),
        ("KV cache", f"{sizes['cache_per_position']:,} bytes a token, {_size(sizes['cache_at_context'])} at context"),
        ("one partial", f"{sizes['partial']:,} bytes"),
        ("kept by a rank", f"{_size(sizes['kept_per_rank'])} ({fits})"),
        ("FLOPs", f"{flops['decode'] / 1e9:.2f} G to decode, {flops['training'] / 1e9:.2f} G to train"),
        ("bandwidth", f"{machine['bandwidth'] / 1e9:,.0f} GB/s a device"),
        ("floor, weights only", f"{floor['weights_only']:,.0f} us"),
        ("floor at context", f"{floor['at_context']:,.0f} us"),
    ]


def _size(count: float) -> str:
    """Bytes in a unit that reads well."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} bytes"
