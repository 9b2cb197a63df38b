"""What the persistent kernel would do for one token and how long that may take: phases, bytes, syncs, predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from laneformer.config import LaneConfig
from laneformer.cost import (
    Assumptions,
    Machine,
    count_parameters,
    dtype_bytes,
    floor_ms,
    parse_machine,
    partial_bytes,
    schedule_latency,
)
from laneformer.kernels.plan import DeviceShape, Plan
from laneformer.kernels.plan_phases import (
    WORD_BYTES,
    Phase,
    check_plan,
    logit_bytes,
    message_bytes,
    sampling_syncs,
    syncs_per_layer,
    token_phases,
)
from laneformer.phase_cost import Load, PhaseTime, TokenTime, phase_times
from laneformer.schedule import Schedule

SCHEDULES = ("tensor-parallel", "delayed:4", "silent")
# Programs of a rank, one for each multiprocessor or compute unit, and where the count is from.
PROGRAMS = {
    "H100 SXM": (132, "NVIDIA H100 data sheet: 132 SMs (SXM5)"),
    "H200": (132, "NVIDIA H200 data sheet: 132 SMs, as H100 SXM5"),
    "MI300X": (304, "AMD MI300X data sheet: 304 compute units"),
    "A100 80GB SXM": (108, "NVIDIA A100 data sheet: 108 SMs"),
}
# Kog's own figures for their engine and the 2b: 16 bit, batch 1, no speculation. Microseconds a token.
PUBLISHED = {
    ("H200", 8): (476.0, "Kog, 2,100 tokens/s on 8x H200"),
    ("MI300X", 8): (333.0, "Kog, 3,000 tokens/s on 8x MI300X"),
}
PUBLISHED_PARAMETERS = 2_320_069_632
# The last is what Kog names for a grid sync by atomic counters; theirs polls the data itself, in 0.9 us.
SYNCS_US = (0.5, 1.0, 2.0, 3.0, 7.6)
PARTS = ("stream_us", "uneven_us", "sync_us", "wait_us", "fixed_us")


def make_plan(config: LaneConfig, text: str, ranks: int, shape: DeviceShape) -> Plan:
    """The checked plan of a schedule's text form, with a cache as long as the model allows."""
    schedule = Schedule.parse(text, config)
    plan = Plan(config, schedule, ranks, shape, config.max_position_embeddings)
    check_plan(plan)
    return plan


def programs_of(machine: Machine, programs: int | None) -> tuple[int, str]:
    """Programs of a rank and their source; raises ValueError where the machine's are not known and none are given."""
    name = machine.device.name
    if programs is not None:
        return programs, "given"
    if name not in PROGRAMS:
        raise ValueError(f"how many programs {name} runs at once is not known (known: {', '.join(PROGRAMS)}); "
                         "give --programs")  # fmt: skip
    return PROGRAMS[name]


def plan_loads(
    plan: Plan, phases: Sequence[Phase], assumptions: Assumptions, message: int, logits: int | None
) -> list[Load]:
    """What the phases cost; message, logits: bytes of a message to each peer.

    Without `logits` that exchange is left out, as `cost.schedule_latency` leaves it out.
    """
    head, peers = 2 * plan.config.num_hidden_layers, plan.ranks - 1
    loads = []
    for phase in phases:
        module = head if phase.name == "final" else phase.module
        sends = None if phase.sends is None or module is None else (module, peers * message)
        lands = tuple(land.module for land in phase.lands)
        if phase.name == "head":
            if logits is not None:
                sends = (head + 1, peers * logits)
            elif not plan.sends_at_end:
                sends = (head, peers * message)
        if phase.name == "draw" and (logits is not None or not plan.sends_at_end):
            lands = (head + 1 if logits is not None else head,)
        if plan.ranks == 1:
            sends, lands = None, ()
        # The end test reads a control word that rank 0 has sent, one more wait.
        syncs = (phase.waits_for is not None) + (phase.name == "agree")
        fixed = assumptions.head_us if phase.name == "draw" else 0.0
        loads.append(Load(phase.name, phase.module, phase.weight_bytes + phase.cache_bytes, phase.idle_bytes, syncs,
                          fixed, sends, lands))  # fmt: skip
    return loads


def predict(plan: Plan, machine: Machine, dtype: torch.dtype | str, context: int, assumed: Assumptions) -> TokenTime:
    """The phases of the token that attends to `context` positions, as the kernel has them."""
    phases = token_phases(plan, context - 1, dtype_bytes(dtype))
    loads = plan_loads(plan, phases, assumed, message_bytes(plan), logit_bytes(plan))
    return phase_times(loads, machine, plan.ranks, assumed)


def predict_as_cost(
    plan: Plan, machine: Machine, dtype: torch.dtype | str, context: int, assumed: Assumptions
) -> TokenTime:
    """The same with what `cost.schedule_latency` assumes: partials in `dtype`, even work, no exchange of logits."""
    phases = token_phases(plan, context - 1, dtype_bytes(dtype))
    loads = plan_loads(plan, phases, assumed, partial_bytes(plan.config, dtype), None)
    return phase_times(loads, machine, plan.ranks, assumed, uneven=False)


def plan_report(
    config: LaneConfig,
    machine_text: str,
    ranks: int | None = None,
    schedules: Sequence[str] = SCHEDULES,
    programs: int | None = None,
    context: int | None = None,
    dtype: torch.dtype | str = "float16",
    assumptions: Assumptions | None = None,
    tile: int | None = None,
    block_positions: int | None = None,
) -> dict[str, Any]:
    """Phases, bytes, programs, syncs, and predicted times of each schedule, as a JSON-able document.

    ranks: one a device, at most one a lane, unless given. context: positions that the token attends to, itself
    included; 1024 or as many as the model has. tile, block_positions: as in DeviceShape, its own unless given. Raises
    ValueError (PlanError) for what cannot be carried out.
    """
    machine, assumed = parse_machine(machine_text), assumptions or Assumptions()
    ranks = min(machine.count, config.num_lanes) if ranks is None else ranks
    context = min(1024, config.max_position_embeddings) if context is None else context
    count, source = programs_of(machine, programs)
    given = {"tile": tile, "block_positions": block_positions}
    shape = DeviceShape(count, **{name: value for name, value in given.items() if value is not None})
    plans = {text: make_plan(config, text, ranks, shape) for text in schedules}
    published = PUBLISHED.get((machine.device.name, ranks)) if ranks == machine.count else None
    known = count_parameters(config).total == PUBLISHED_PARAMETERS
    return {
        "machine": {"text": machine_text, "count": machine.count, **dataclasses.asdict(machine.device)},
        "ranks": ranks,
        "programs": {"count": count, "source": source},
        "shape": dataclasses.asdict(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "context": context,
        "floor_us": 1e3 * floor_ms(config, machine, ranks, dtype, context),
        "published": {"us": published[0], "source": published[1]} if known and published else None,
        "schedules": {
            text: _schedule(plan, machine, dtype, context, assumed) | {"schedule": str(plan.schedule)}
            for text, plan in plans.items()
        },
        "assumptions": assumed_sentences(machine, assumed, context),
        "measured": False,
    }


def _schedule(
    plan: Plan, machine: Machine, dtype: torch.dtype | str, context: int, assumed: Assumptions
) -> dict[str, Any]:
    """One schedule's facts and predictions."""
    phases, token = token_phases(plan, context - 1, dtype_bytes(dtype)), predict(plan, machine, dtype, context, assumed)
    cost = schedule_latency(plan.config, plan.schedule, machine, plan.ranks, dtype, context, assumed)
    others = {sync: dataclasses.replace(assumed, sync_us=sync) for sync in SYNCS_US}
    return {
        "total_us": token.total_us,
        "even_us": token.total_us - token.part_us("uneven_us"),
        "tokens_per_second": 1e6 / token.total_us,
        "parts_us": {part: token.part_us(part) for part in PARTS},
        "infer_cost_us": cost.total_us,
        "syncs_per_layer": syncs_per_layer(plan),
        "syncs_per_token": sum(phase.waits_for is not None for phase in phases) + 1,
        "messages": len(plan.messages) if plan.ranks > 1 else 0,
        "message_bytes": message_bytes(plan) if plan.ranks > 1 else 0,
        "logit_bytes": logit_bytes(plan) if plan.ranks > 1 else 0,
        "ring_generations": plan.generations,
        "mailbox_bytes": WORD_BYTES * plan.shared_words,
        "phases": [_phase_row(plan, name, phases, token) for name in dict.fromkeys(phase.name for phase in phases)],
        "timeline": [dataclasses.asdict(phase) for phase in middle_layers(token, plan.config.num_hidden_layers)],
        "sensitivity_us": {
            f"{sync:g}": predict(plan, machine, dtype, context, other).total_us for sync, other in others.items()
        },
    }


def _phase_row(plan: Plan, name: str, phases: Sequence[Phase], token: TokenTime) -> dict[str, Any]:
    """A phase by its name: one of them (of the middle layer) in detail, and all of the token added up."""
    found = [phase for phase in phases if phase.name == name]
    one = found[len(found) // 2]
    programs = plan.programs
    streamed = sum(phase.weight_bytes + phase.cache_bytes for phase in found)
    idle = sum(phase.idle_bytes for phase in found)
    return {
        "name": name,
        "per_token": len(found),
        "items": one.items,
        "item": one.item,
        "working_programs": min(one.items or one.waiters, programs),
        "items_of_the_busiest_program": -(-one.items // programs),
        "waits_for": one.waits_for,
        "signals": one.signals,
        "arrivals": one.arrivals,
        "reads": list(one.reads),
        "writes": list(one.writes),
        "sends": sum(phase.sends is not None for phase in found) if plan.ranks > 1 else 0,
        "lands": sum(len(phase.lands) for phase in found) if plan.ranks > 1 else 0,
        "weight_bytes": sum(phase.weight_bytes for phase in found),
        "cache_bytes": sum(phase.cache_bytes for phase in found),
        "even_share": streamed / (streamed + idle) if streamed else None,
        "us": {part: token.part_us(part, name) for part in PARTS},
        "total_us": sum(token.part_us(part, name) for part in PARTS),
    }


def assumed_sentences(machine: Machine, assumed: Assumptions, context: int) -> list[str]:
    """Every assumption behind a prediction, one sentence each."""
    device = machine.device
    latency = device.link_latency_us if assumed.link_latency_us is None else assumed.link_latency_us
    link = "any rate" if device.link_bandwidth is None else f"{device.link_bandwidth / 1e9:,.0f} GB/s"
    return [
        f"Weights and cache stream at {assumed.efficiency:.0%} of {device.bandwidth / 1e9:,.0f} GB/s a device.",
        f"Every wait for a counter costs {assumed.sync_us:g} us, whatever was loaded before it; so does the end test.",
        f"Head and draw cost {assumed.head_us:g} us beyond streaming the head; greedy or temperature only: top-k or "
        f"top-p adds {sampling_syncs(True, False) - 1} waits, both {sampling_syncs(True, True) - 1}.",
        f"A message takes {latency:g} us and its bytes to all peers at {link}; they are float32 words.",
        "Ranks are equally fast and in step; arithmetic hides behind streaming; norms, streams and partials come from "
        "the cache at no cost.",
        "Uneven work: a phase lasts until its busiest program is done, and a program draws no more than its even share "
        "of the bandwidth. A device may give few programs more, so this is the most that uneven work can cost.",
        f"The token attends to {context} positions; layers with a window to no more than that.",
        f"{device.name}: {device.source}.",
    ]


def middle_layers(token: TokenTime, layers: int, count: int = 3) -> list[PhaseTime]:
    """The phases of `count` layers in the middle of a token."""
    first = max(0, (layers - count) // 2)
    inside = range(2 * first, 2 * min(first + count, layers))
    return [phase for phase in token.phases if phase.module in inside]
