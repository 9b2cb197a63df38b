"""What a training step sends between devices, how long that takes, and how much of it computing hides.

Arithmetic and one small simulation; nothing is measured. Seconds and bytes of one device. Collectives are rings: an
all-reduce over R ranks moves 2 (R - 1) / R of its bytes through each device's link, a gather or a scatter half of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import LaneConfig
from .cost import lanes_per_rank, positions_seen
from .machines import Machine
from .schedule import Schedule
from .training_cost import FLOAT32, Layout, rank_parameters


@dataclass(frozen=True)
class LaneExchange:
    """The lanes' partials of one micro-batch: bytes through a device's link, time on it, and time waited for it."""

    messages: int
    message_bytes: float
    message_s: float
    forward_compute_s: float
    backward_compute_s: float
    forward_wait_s: float
    backward_wait_s: float

    @property
    def bytes(self) -> float:
        """Through a device's link, both passes."""
        return self.messages * self.message_bytes

    @property
    def link_s(self) -> float:
        """Time on the link, both passes."""
        return self.messages * self.message_s

    @property
    def wait_s(self) -> float:
        """Time that computing stands still, both passes."""
        return self.forward_wait_s + self.backward_wait_s

    @property
    def hidden(self) -> float | None:
        """Share of the time on the link that computing covers; None where nothing is sent."""
        return 1 - self.wait_s / self.link_s if self.link_s else None


@dataclass(frozen=True)
class WeightTraffic:
    """What replicas exchange of weights and gradients in one step: bytes of one device, time, and time not hidden."""

    gradient_bytes: float
    gradient_s: float
    gather_bytes: float
    gather_s: float
    shared_bytes: float
    shared_s: float
    exposed_s: float


def module_flops(config: LaneConfig, sequence: int) -> tuple[float, float]:
    """Forward FLOPs a token of one attention module (at its mean span over the layers) and of one feed-forward one."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    spans = 0.0
    for layer in range(layers):
        reach = positions_seen(config, layer, sequence)
        spans += (reach * (reach + 1) / 2 + (sequence - reach) * reach) / sequence
    matrices = 2 * hidden * config.head_size * (config.num_attention_heads + config.kv_heads)
    attention = 2 * matrices + 4 * config.num_attention_heads * config.head_size * spans / layers
    return attention, 6.0 * hidden * config.intermediate_size


def ring_s(nbytes: float, ranks: int, bandwidth: float, latency_us: float, passes: int = 2) -> float:
    """Seconds of an all-reduce (2 passes) or of a gather or scatter (1) of `nbytes` over `ranks` ranks."""
    if ranks == 1:
        return 0.0
    return passes * (ranks - 1) / ranks * nbytes / bandwidth + 1e-6 * latency_us


def lane_exchange(
    config: LaneConfig, schedule: Schedule, layout: Layout, machine: Machine, flops_per_s: float
) -> LaneExchange:
    """Plays one micro-batch forward and backward on one rank that computes at `flops_per_s`.

    Forward, a partial is sent after its module and landed by the step that the schedule says. Backward, the gradient
    of a landing is sent when that step is reached and needed before the module whose partial had landed. Messages are
    float32 sums, share one link and follow each other. The streams before the head meet in one more blocking message
    forward, the embedding's gradient in one backward. Raises ValueError where the machine's links are not known.
    """
    tokens, share = layout.micro_batch * layout.sequence, lanes_per_rank(config, layout.lane_ranks) / config.num_lanes
    seconds = [tokens * share * flops / flops_per_s for flops in module_flops(config, layout.sequence)]
    backward = 3 if layout.recompute else 2
    ranks = layout.lane_ranks
    nbytes = FLOAT32 * tokens * config.hidden_size
    through = 2 * (ranks - 1) / ranks * nbytes
    message = 0.0
    if ranks > 1:
        message = ring_s(nbytes, ranks, machine.group_bandwidth(ranks, 1), machine.group_latency_us(ranks))
    sent = 2 * schedule.num_messages + 2 if ranks > 1 else 0
    layers = config.num_hidden_layers
    return LaneExchange(
        messages=sent,
        message_bytes=through,
        message_s=message,
        forward_compute_s=layers * sum(seconds),
        backward_compute_s=layers * sum(seconds) * backward,
        forward_wait_s=forward_wait(schedule, seconds, message) + message,
        backward_wait_s=backward_wait(schedule, [backward * s for s in seconds], message) + message,
    )


def forward_wait(schedule: Schedule, seconds: list[float], message_s: float) -> float:
    """Seconds that the forward pass stands still; `seconds` are those of an attention and a feed-forward module."""
    now = link = waited = 0.0
    arrives: dict[int, float] = {}
    for n, step in enumerate(schedule.steps):
        now += seconds[n % 2]
        if step.sends:
            arrives[n] = link = max(now, link) + message_s
        for landing in step.lands:
            late = max(0.0, arrives[landing.module] - now)
            waited, now = waited + late, now + late
    return waited


def backward_wait(schedule: Schedule, seconds: list[float], message_s: float) -> float:
    """Seconds that the backward pass stands still: steps in reverse, gradients of landings sent, awaited by modules."""
    now = link = waited = 0.0
    arrives: dict[int, float] = {}
    first = {landing.module: n for n, step in reversed(list(enumerate(schedule.steps))) for landing in step.lands}
    for n in reversed(range(len(schedule.steps))):
        for module in sorted((m for m, landed in first.items() if landed == n), reverse=True):
            arrives[module] = link = max(now, link) + message_s
        late = max(0.0, arrives.get(n, 0.0) - now)
        waited, now = waited + late, now + late + seconds[n % 2]
    return waited


def weight_traffic(config: LaneConfig, layout: Layout, machine: Machine, backward_s: float) -> WeightTraffic:
    """Gradients (float32) and, with fsdp, weights of one step; `backward_s` is one micro-batch's backward pass.

    ddp reduces once a step, behind the last backward pass. fsdp gathers weights in the computing type, modules in both
    passes of every micro-batch and the rest in one, behind the pass, and scatters gradients behind the last one. Norms
    that all lanes use are summed over the ranks of a replica once a step.
    """
    rank, copies = rank_parameters(config, layout.lane_ranks), layout.replicas
    whole = FLOAT32 * rank.norms if layout.lane_ranks > 1 and config.replicated_rmsn_scale else 0
    lane_link = (machine.group_bandwidth(layout.lane_ranks, 1), machine.group_latency_us(layout.lane_ranks))
    shared_s = ring_s(whole, layout.lane_ranks, *lane_link) if whole else 0.0
    if copies == 1:
        return WeightTraffic(0, 0, 0, 0, whole, shared_s, shared_s)
    link = (machine.group_bandwidth(copies, layout.lane_ranks), machine.group_latency_us(layout.devices))
    part, nbytes = (copies - 1) / copies, FLOAT32 * rank.total
    if layout.shard == "ddp":
        gradient_s = ring_s(nbytes, copies, *link)
        exposed = max(0.0, gradient_s - backward_s) + shared_s
        return WeightTraffic(2 * part * nbytes, gradient_s, 0, 0, whole, shared_s, exposed)
    gathered = layout.width * (2 * rank.modules + rank.ends + rank.norms)
    gather_s, gradient_s = (ring_s(n, copies, *link, passes=1) for n in (gathered, nbytes))
    # A forward pass takes half as long as a backward one; gathering goes on in both.
    late = layout.accumulation * max(0.0, gather_s - 1.5 * backward_s) + max(0.0, gradient_s - backward_s)
    return WeightTraffic(part * nbytes, gradient_s, layout.accumulation * part * gathered,
                         layout.accumulation * gather_s, whole, shared_s, late + shared_s)  # fmt: skip
