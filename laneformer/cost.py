"""What a token costs: parameters, bytes, FLOPs, the roofline floor of a machine, and the latency of a schedule.

Everything here is arithmetic on a config and a schedule; nothing is measured. Bytes are bytes (1 GB = 1e9), times say
their unit in the name. A rank holds ceil(L / R) of the L lanes, and the slowest rank is the one that counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .config import LaneConfig
from .machines import MACHINES as MACHINES
from .machines import Device, Machine
from .machines import parse_machine as parse_machine
from .schedule import Schedule

DType = torch.dtype | str


@dataclass(frozen=True)
class Parameters:
    """Elements of each part of a model; a tied head counts as embedding, head norms count as norms."""

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.attention + self.feed_forward + self.norms + self.head


@dataclass(frozen=True)
class DecodeBytes:
    """Bytes one rank reads to decode one token: weights and cache of each of the 2N modules, then the two ends."""

    weights: tuple[int, ...]
    cache: tuple[int, ...]
    head: int
    embedding_row: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.weights) + sum(self.cache) + self.head + self.embedding_row


@dataclass(frozen=True)
class Assumptions:
    """What `schedule_latency` takes for granted beyond the machine's figures.

    efficiency: share of bandwidth that streaming reaches. sync_us: one barrier between phases inside a rank, of which
    there are so many per attention module, per feed-forward module and after the last layer (final norm, head,
    sampling, end test). head_us: what head and sampling cost beyond streaming the head. link_latency_us: overrides
    the device's when given.
    """

    efficiency: float = 0.8
    sync_us: float = 1.0
    attention_syncs: int = 3
    feed_forward_syncs: int = 2
    final_syncs: int = 4
    head_us: float = 10.0
    link_latency_us: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is a share of bandwidth in (0, 1], got {self.efficiency}")
        for name in ("sync_us", "head_us", "link_latency_us"):
            if (getattr(self, name) or 0.0) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True)
class Latency:
    """A predicted token in microseconds: where its time goes, and how long each module's landing waits."""

    stream_us: float
    sync_us: float
    head_us: float
    message_us: float
    waits_us: tuple[float, ...]
    head_wait_us: float
    assumptions: Assumptions

    @property
    def wait_us(self) -> float:
        """Time spent waiting for partials: all modules and the exchange before the head."""
        return sum(self.waits_us) + self.head_wait_us

    @property
    def total_us(self) -> float:
        """The whole token."""
        return self.stream_us + self.sync_us + self.head_us + self.wait_us


def dtype_bytes(dtype: DType) -> int:
    """Bytes of one element; `dtype` may be a name such as float16. Raises ValueError for what is no float type."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype is {dtype!r}, expected a floating-point type such as float16, bfloat16 or float32")
    return found.itemsize


def count_parameters(config: LaneConfig) -> Parameters:
    """Parameters by part, exactly as the model has them."""
    hidden, layers, head = config.hidden_size, config.num_hidden_layers, config.head_size
    norm_lanes = 1 if config.replicated_rmsn_scale else config.num_lanes
    final_lanes = 1 if config.pre_norm_lane_agg else norm_lanes
    head_norms = 2 * head if config.head_norms else 0
    return Parameters(
        embedding=config.vocab_size * hidden,
        attention=layers * _module_weights(config)[0],
        feed_forward=layers * _module_weights(config)[1],
        norms=layers * (2 * norm_lanes * hidden + head_norms) + final_lanes * hidden,
        head=0 if config.tie_word_embeddings else _head_weights(config),
    )


def _module_weights(config: LaneConfig) -> tuple[int, int]:
    """Matrix elements of one attention and one feed-forward module, over all lanes."""
    attention = 2 * config.hidden_size * config.head_size * (config.num_attention_heads + config.kv_heads)
    return attention, 3 * config.hidden_size * config.intermediate_size


def _head_weights(config: LaneConfig) -> int:
    """The matrix that makes logits, tied or not."""
    width = config.hidden_size * (config.num_lanes if config.lm_head_type == "lane" else 1)
    return config.vocab_size * width


def positions_seen(config: LaneConfig, layer: int, context: int) -> int:
    """Positions that the token at `context` (itself included) attends to in a layer."""
    window = config.window(layer)
    return context if window is None else min(window, context)


def kv_bytes_per_token(config: LaneConfig, dtype: DType = torch.float16) -> int:
    """Bytes that one position adds to the key-value cache of all layers and lanes."""
    return 2 * config.num_hidden_layers * config.kv_heads * config.head_size * dtype_bytes(dtype)


def kv_bytes(config: LaneConfig, context: int, dtype: DType = torch.float16) -> int:
    """Bytes of the cache of `context` positions; layers with a window keep the window only."""
    a_layer = kv_bytes_per_token(config, dtype) // config.num_hidden_layers
    return sum(a_layer * positions_seen(config, i, context) for i in range(config.num_hidden_layers))


def partial_bytes(config: LaneConfig, dtype: DType = torch.float16) -> int:
    """Bytes of one partial of one token: what a rank sends to each peer for a module."""
    return config.hidden_size * dtype_bytes(dtype)


def lanes_per_rank(config: LaneConfig, ranks: int) -> int:
    """Lanes of the fullest rank; raises ValueError when there are more ranks than lanes."""
    if not 1 <= ranks <= config.num_lanes:
        raise ValueError(f"ranks must be 1..{config.num_lanes}, one lane each at most, got {ranks}")
    return -(-config.num_lanes // ranks)


def decode_bytes(config: LaneConfig, dtype: DType = torch.float16, context: int = 0, ranks: int = 1) -> DecodeBytes:
    """What the fullest of `ranks` ranks reads for one token whose attention spans `context` positions.

    Everything but the embedding table, of which one row is read. Norm weights that lanes share are read by every
    rank; a replicated or lane head is split by vocabulary over the ranks.
    """
    width, lanes, held = dtype_bytes(dtype), config.num_lanes, lanes_per_rank(config, ranks)
    norm = config.hidden_size * (1 if config.replicated_rmsn_scale else held)
    attention, feed_forward = (weights * held // lanes + norm for weights in _module_weights(config))
    attention += 2 * config.head_size if config.head_norms else 0
    a_position = 2 * config.kv_heads // lanes * held * config.head_size * width
    cache: list[int] = []
    for layer in range(config.num_hidden_layers):
        cache += [a_position * positions_seen(config, layer, context), 0]
    rows = -(-config.vocab_size // ranks)
    if config.lm_head_type == "vocab_parallel":
        rows = config.vocab_size // lanes * held
    head = _head_weights(config) // config.vocab_size * rows
    final_norm = config.hidden_size if config.pre_norm_lane_agg else norm
    return DecodeBytes(
        weights=(attention * width, feed_forward * width) * config.num_hidden_layers,
        cache=tuple(cache),
        head=(head + final_norm) * width,
        embedding_row=config.hidden_size * width,
    )


def decode_flops(config: LaneConfig, context: int = 0) -> float:
    """Forward FLOPs of one token that attends to `context` positions, itself included."""
    return _flops(config, sum(positions_seen(config, i, context) for i in range(config.num_hidden_layers)))


def training_flops(config: LaneConfig, sequence: int, with_attention: bool = True) -> float:
    """FLOPs to train on one token of `sequence`-long rows: 3 times the forward pass, attention at its mean span."""
    spans = 0.0
    for layer in range(config.num_hidden_layers if with_attention else 0):
        reach = positions_seen(config, layer, sequence)
        spans += (reach * (reach + 1) / 2 + (sequence - reach) * reach) / sequence
    return 3 * _flops(config, spans)


def _flops(config: LaneConfig, spans: float) -> float:
    """FLOPs of one token that attends to `spans` positions over all layers: 2 a weight, 4 H E a position."""
    weights = config.num_hidden_layers * sum(_module_weights(config)) + _head_weights(config)
    return 2 * weights + 4 * config.num_attention_heads * config.head_size * spans


def floor_ms(config: LaneConfig, machine: Machine, ranks: int, dtype: DType = torch.float16, context: int = 0) -> float:
    """The roofline: the longer of streaming a rank's bytes at full bandwidth and doing its FLOPs at peak."""
    memory = decode_bytes(config, dtype, context, ranks).total / machine.rank_bandwidth(ranks)
    peak = machine.device.peak_flops
    share = decode_flops(config, context) * lanes_per_rank(config, ranks) / config.num_lanes
    compute = 0.0 if peak is None else share / (peak * min(machine.count, ranks) / ranks)
    return 1e3 * max(memory, compute)


def schedule_latency(
    config: LaneConfig,
    schedule: Schedule,
    machine: Machine,
    ranks: int,
    dtype: DType = torch.float16,
    context: int = 0,
    assumptions: Assumptions | None = None,
) -> Latency:
    """Plays one token module by module on one of `ranks` equal ranks, and says where it waits for partials.

    A module streams its bytes, pays its barriers, and posts its partial if the schedule says so. The message arrives
    a link latency and its transfer time later; whoever lands it earlier waits. One rank alone never waits.
    """
    assumed = assumptions or Assumptions()
    moved = decode_bytes(config, dtype, context, ranks)
    rate = machine.rank_bandwidth(ranks) * assumed.efficiency / 1e6
    syncs = (assumed.attention_syncs * assumed.sync_us, assumed.feed_forward_syncs * assumed.sync_us)
    message = 0.0 if ranks == 1 else _message_us(machine.device, (ranks - 1) * partial_bytes(config, dtype), assumed)
    posted: dict[int, float] = {}
    waits: list[float] = []
    now = moved.embedding_row / rate
    for n, step in enumerate(schedule.steps):
        now += (moved.weights[n] + moved.cache[n]) / rate + syncs[n % 2]
        if step.sends:
            posted[n] = now
        waits.append(max([0.0, *(posted[landing.module] + message - now for landing in step.lands)]))
        now += waits[-1]
    return Latency(
        stream_us=moved.total / rate,
        sync_us=sum(syncs) * schedule.num_layers + assumed.final_syncs * assumed.sync_us,
        head_us=assumed.head_us,
        message_us=message,
        waits_us=tuple(waits),
        head_wait_us=message,
        assumptions=assumed,
    )


def _message_us(device: Device, sent: int, assumed: Assumptions) -> float:
    """How long `sent` bytes take to reach the peers."""
    latency = device.link_latency_us if assumed.link_latency_us is None else assumed.link_latency_us
    return latency + (0.0 if device.link_bandwidth is None else 1e6 * sent / device.link_bandwidth)
