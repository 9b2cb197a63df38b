"""What a training run costs on named hardware, before anything is spent: one document for tables and for machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laneformer.config import LaneConfig
from laneformer.cost import (
    MACHINES,
    Machine,
    Parameters,
    count_parameters,
    lanes_per_rank,
    parse_machine,
    training_flops,
)
from laneformer.model import Laneformer
from laneformer.schedule import Schedule
from laneformer.tools.plan_step import layouts, step_of
from laneformer.tools.recipe import read_recipe, shares, too_often
from laneformer.training_cost import Layout, rank_parameters, streams_held, training_memory

# Kog on the published 2B: 4T + 2T + 210M tokens on 192 H100 in about 21 days.
PUBLISHED_TOKENS, PUBLISHED_MACHINE, PUBLISHED_DAYS = 6.00021e12, "192xh100", 21.0
DAY = 86400.0


@dataclass(frozen=True)
class Run:
    """What planning needs of a training run: the model, when its lanes meet, its layout, length and mixture."""

    experiment: str
    config: LaneConfig
    schedule: Schedule
    layout: Layout
    steps: int
    phases: tuple[tuple[float, Mapping[str, float]], ...]

    @property
    def tokens(self) -> int:
        """Tokens that the whole run learns from."""
        return self.steps * self.layout.tokens_per_step


def read_run(experiment: str, machine: str, lanes_per_rank: int | None = None, overrides: Sequence[str] = ()) -> Run:
    """The run of a packaged experiment on a machine (192xh100); raises ValueError for what does not fit together.

    `lanes_per_rank` replaces parallel.lanes, `overrides` are KEY=VALUE as `train` takes them.
    """
    from laneformer.train.cli import settings_from

    # Planning reads no data and writes no folder: the two keys that every run must be given stand for nothing.
    needed = ["out=plan", "data.folders=[plan]"]
    settings = settings_from([f"experiment={experiment}", *needed, *overrides])
    config = settings.lane_config()
    ranks = settings.parallel.lanes if lanes_per_rank is None else _ranks(config, lanes_per_rank)
    devices = training_machine(machine).count
    layout = Layout(
        devices=devices,
        lane_ranks=ranks,
        shard=settings.parallel.shard,
        batch=settings.data.batch,
        micro_batch=settings.data.micro_batch or max(1, settings.data.batch * ranks // devices),
        sequence=settings.data.sequence_length,
        precision=settings.precision,
        optimizer=settings.optim.name,
        recompute=settings.recompute,
        document_mask=settings.data.document_mask,
        z_loss=settings.optim.z_loss > 0,
    )
    phases = tuple((phase.until, dict(phase.weights)) for phase in settings.data.phases)
    return Run(experiment, config, Schedule.parse(settings.schedule, config), layout, settings.steps, phases)


def training_machine(text: str) -> Machine:
    """The named devices; raises ValueError for unknown ones and for `this`, whose peak is not known."""
    machine = parse_machine(text, measured_bandwidth=1.0)
    if machine.device.peak_flops is None or machine.device.memory is None:
        known = ", ".join(name for name, device in MACHINES.items() if device.peak_flops)
        raise ValueError(f"peak FLOP/s and memory of {text!r} are not known; name one of {known}, as in 192xh100")
    return machine


def _ranks(config: LaneConfig, lanes_per_rank: int) -> int:
    """Devices that share the lanes when each has so many; raises ValueError where that does not come out even."""
    if lanes_per_rank < 1 or config.num_lanes % lanes_per_rank:
        raise ValueError(f"{lanes_per_rank} lanes a rank do not divide the model's {config.num_lanes} lanes")
    return config.num_lanes // lanes_per_rank


def plan(run: Run, machine_text: str, mfu: float = 0.4, gpu_hour: float = 2.5) -> dict[str, Any]:
    """Everything the planner knows of a run on `machine_text` (192xh100) as one JSON-able document.

    `mfu` is the share of the 16-bit peak that the model's own FLOPs reach, `gpu_hour` the price of a device's hour.
    Raises ValueError for an unknown machine, one without a known peak, and numbers that cannot be.
    """
    machine = training_machine(machine_text)
    peak, capacity = machine.device.peak_flops or 0.0, machine.device.memory or 0.0
    if not 0 < mfu <= 1 or gpu_hour < 0:
        raise ValueError(f"mfu must lie in (0, 1] and gpu_hour be at least 0, got {mfu} and {gpu_hour}")
    flops = training_flops(run.config, run.layout.sequence)
    memory = training_memory(run.config, run.schedule, run.layout)
    found = shares(read_recipe(), run.phases, run.tokens)
    rate = machine.count * peak * mfu / flops
    document = {
        "experiment": run.experiment,
        "machine": {"text": machine_text, "count": machine.count, **dataclasses.asdict(machine.device)},
        "schedule": str(run.schedule),
        "steps": run.steps,
        "tokens": run.tokens,
        "layout": _layout(run),
        "parameters": _parameters(run),
        "flops": {
            "per_token": flops,
            "per_token_without_attention": training_flops(run.config, run.layout.sequence, with_attention=False),
            "total": flops * run.tokens,
        },
        "memory": {**dataclasses.asdict(memory), "total": memory.total, "device": capacity,
                   "fits": memory.total <= capacity},
        "speed": _speed(run.tokens, rate, run.layout.tokens_per_step, machine.count, mfu, gpu_hour),
        "step": _steps(run, machine, peak * mfu),
        "layouts": layouts(run.config, run.schedule, run.layout, machine, peak * mfu),
        "published": _published(run, machine, mfu),
        "data": [{**dataclasses.asdict(s.data), "weight": s.weight, "read": s.tokens, "epochs": s.epochs}
                 for s in found],
    }  # fmt: skip
    return {**document, "warnings": _warnings(document, run) + too_often(found)}


def _layout(run: Run) -> dict[str, Any]:
    """The layout's own settings and what follows from them."""
    layout = run.layout
    return {
        **dataclasses.asdict(layout),
        "replicas": layout.replicas,
        "accumulation": layout.accumulation,
        "tokens_per_step": layout.tokens_per_step,
        "lanes_per_rank": lanes_per_rank(run.config, layout.lane_ranks),
        "streams_per_rank": streams_held(run.config, run.schedule, layout.lane_ranks),
    }


def _parameters(run: Run) -> dict[str, Any]:
    """Parameters by part, counted twice: by arithmetic and on a model without storage; both must agree."""
    counted, held = count_parameters(run.config), lanes_per_rank(run.config, run.layout.lane_ranks)
    built = built_parameters(run.config, None)
    if built != counted:
        raise ValueError(f"the model on the meta device has {built}, the arithmetic says {counted}; no plan from that")
    rank, of_rank = built_parameters(run.config, range(held)).total, rank_parameters(run.config, run.layout.lane_ranks)
    if rank != of_rank.total:
        raise ValueError(f"a rank's model on the meta device has {rank:,} parameters, the arithmetic {of_rank.total:,}")
    return {**dataclasses.asdict(counted), "total": counted.total, "a_rank": rank, "checked_on": "meta device"}


def built_parameters(config: LaneConfig, lanes: Sequence[int] | None) -> Parameters:
    """Parameters by part of a model that is built without storage, holding `lanes` (all by default)."""
    parts: dict[str, int] = dict.fromkeys(("embedding", "attention", "feed_forward", "norms", "head"), 0)
    for name, parameter in Laneformer(config, lanes=lanes, device="meta").named_parameters():
        kinds = {"tok_embeddings": "embedding", "norm": "norms", "attention": "attention",
                 "feed_forward": "feed_forward", "lm_head": "head"}  # fmt: skip
        parts[next(part for word, part in kinds.items() if word in name)] += parameter.numel()
    return Parameters(**parts)


def _speed(
    tokens: float, rate: float, tokens_per_step: int, count: int, mfu: float, gpu_hour: float
) -> dict[str, float]:
    """Time and money of a run of `tokens` at `rate` tokens a second on `count` devices."""
    hours = tokens / rate / 3600 * count
    return {"mfu": mfu, "tokens_per_s": rate, "tokens_per_s_and_device": rate / count,
            "step_s": tokens_per_step / rate, "days": tokens / rate / DAY, "gpu_hours": hours,
            "gpu_hour": gpu_hour, "cost": hours * gpu_hour}  # fmt: skip


def _steps(run: Run, machine: Machine, flops_per_s: float) -> dict[str, Any]:
    """One step with the run's schedule and, where lanes lie on several devices, with standard tensor parallelism."""
    schedules = {str(run.schedule): run.schedule}
    if run.layout.lane_ranks > 1:
        blocking = Schedule.tensor_parallel(run.config.num_hidden_layers)
        schedules.setdefault(str(blocking), blocking)
    return {name: step_of(run.config, each, run.layout, machine, flops_per_s) for name, each in schedules.items()}


def _published(run: Run, machine: Machine, mfu: float) -> dict[str, Any] | None:
    """The published run beside this one: the MFU that its days imply, and its days here; None for another model."""
    ours, theirs = (dataclasses.asdict(config) for config in (run.config, LaneConfig.preset("2b")))
    if any(ours[key] != theirs[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")):
        return None
    published = parse_machine(PUBLISHED_MACHINE)
    flops = PUBLISHED_TOKENS * training_flops(run.config, run.layout.sequence)
    peak, here = published.device.peak_flops or 0.0, machine.device.peak_flops or 0.0
    return {
        "tokens": PUBLISHED_TOKENS,
        "machine": PUBLISHED_MACHINE,
        "days": PUBLISHED_DAYS,
        "implied_mfu": flops / (published.count * peak * PUBLISHED_DAYS * DAY),
        "days_here": flops / (machine.count * here * mfu) / DAY,
    }


def _warnings(document: dict[str, Any], run: Run) -> list[str]:
    """What a person must see first: it does not fit, or something is done several times over."""
    found = []
    memory = document["memory"]
    if not memory["fits"]:
        found.append(
            f"does not fit: {memory['total'] / 1e9:.1f} GB on a device of {memory['device'] / 1e9:.0f} GB; lower "
            "data.micro_batch, set recompute=true, parallel.shard=fsdp, or more parallel.lanes"
        )
    step = document["step"][document["schedule"]]
    if step["repeated_head_s"] > 0.05 * step["compute_s"]:
        found.append(
            f"each of {run.layout.lane_ranks} ranks of a replica forms all logits: {step['repeated_head_s']:.2f} s of "
            f"a step beside {step['compute_s']:.2f} s of the model's own"
        )
    return found
