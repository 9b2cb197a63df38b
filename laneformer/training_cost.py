"""What a training step keeps in a device's memory, term by term, for a layout of devices.

Everything is arithmetic on a config, a schedule and a layout; nothing is measured. Bytes are bytes (1 GB = 1e9). What
autograd keeps follows the operations of modules.py and ops.py one by one; tests compare it with the tensors that
PyTorch really saves. Letters: L lanes, l lanes of one rank, s streams of one rank (l, or 1 where all are equal).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .config import LaneConfig
from .cost import count_parameters, lanes_per_rank
from .schedule import Schedule

SHARDS = ("ddp", "fsdp")
OPTIMIZERS = ("adamw", "muon")
# The last is not offered for training: weights, gradients and all arithmetic in bfloat16.
PRECISIONS = ("float32", "bfloat16", "bfloat16-weights")
FLOAT32 = 4


@dataclass(frozen=True)
class Layout:
    """How one training step is laid over devices; raises ValueError where it does not come out even.

    `lane_ranks` devices share the lanes of one replica, `shard` says what the replicas do with their weights, `batch`
    sequences make one step, of which a replica takes `micro_batch` at a time. `precision` bfloat16 computes under
    autocast over float32 weights.
    """

    devices: int
    lane_ranks: int
    shard: str
    batch: int
    micro_batch: int
    sequence: int
    precision: str = "bfloat16"
    optimizer: str = "adamw"
    recompute: bool = False
    document_mask: bool = True
    z_loss: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("shard", SHARDS), ("precision", PRECISIONS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(choices)}")
        for name in ("devices", "lane_ranks", "batch", "micro_batch", "sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.devices % self.lane_ranks:
            raise ValueError(
                f"{self.lane_ranks} devices share the lanes of a replica, which does not divide {self.devices} devices"
            )
        if self.batch % (self.micro_batch * self.replicas):
            raise ValueError(
                f"a batch of {self.batch} sequences does not divide into {self.replicas} replicas of micro-batches of "
                f"{self.micro_batch}; the nearest that does is "
                f"{max(1, round(self.batch / self.micro_batch / self.replicas)) * self.micro_batch * self.replicas}"
            )

    @property
    def replicas(self) -> int:
        """Copies of the model that learn from different sequences."""
        return self.devices // self.lane_ranks

    @property
    def accumulation(self) -> int:
        """Micro-batches of one replica in one step."""
        return self.batch // (self.micro_batch * self.replicas)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step learns from."""
        return self.batch * self.sequence

    @property
    def width(self) -> int:
        """Bytes of an element that is computed with."""
        return FLOAT32 if self.precision == "float32" else 2


@dataclass(frozen=True)
class RankParameters:
    """Parameters of the fullest rank: its lanes' matrices, the norms, and what every rank has whole."""

    modules: int
    ends: int
    norms: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.modules + self.ends + self.norms


@dataclass(frozen=True)
class Saved:
    """Bytes that autograd keeps of one micro-batch from the forward to the backward pass."""

    streams: float
    attention: float
    feed_forward: float
    masks: float
    head: float
    logits: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device at the peak of a step, by term."""

    weights: float
    compute_copy: float
    gradients: float
    optimizer: float
    activations: float
    masks: float
    working: float
    logits: float
    messages: float
    reserve: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(dataclasses.astuple(self))


def rank_parameters(config: LaneConfig, lane_ranks: int) -> RankParameters:
    """What the fullest of `lane_ranks` ranks holds; embedding and head are whole on each unless cut by lane."""
    parts, held = count_parameters(config), lanes_per_rank(config, lane_ranks)
    by_lane = parts.attention + parts.feed_forward
    own_norms = not config.replicated_rmsn_scale
    final = config.hidden_size * (config.num_lanes if own_norms and not config.pre_norm_lane_agg else 1)
    head_norms = 2 * config.head_size * config.num_hidden_layers if config.head_norms else 0
    cut_norms = parts.norms - head_norms - (final if config.pre_norm_lane_agg else 0) if own_norms else 0
    head = parts.head * held // config.num_lanes if config.lm_head_type == "vocab_parallel" else parts.head
    return RankParameters(
        modules=by_lane * held // config.num_lanes,
        ends=parts.embedding + head,
        norms=parts.norms - cut_norms + cut_norms * held // config.num_lanes,
    )


def streams_held(config: LaneConfig, schedule: Schedule, lane_ranks: int) -> int:
    """Residual streams of the fullest rank: one a lane, or one where all lanes are here and their streams equal."""
    alike = lane_ranks == 1 and schedule.streams_stay_equal and config.replicated_rmsn_scale
    return 1 if alike else lanes_per_rank(config, lane_ranks)


def saved_bytes(config: LaneConfig, schedule: Schedule, layout: Layout) -> Saved:
    """What autograd keeps of one micro-batch on one rank, in bytes, without the weights and their bfloat16 copies.

    With `recompute` that is each module's input; else also: the normalised input (under autocast once for every
    matrix that reads it), queries, keys, values, the attention's output and log-sum, and gate, its silu, up and their
    product. The attention keeps no scores. The head keeps its input, the loss the log-probabilities in float32, and
    the z-loss the logits.
    """
    modules, tokens = 2 * config.num_hidden_layers, layout.micro_batch * layout.sequence
    row = streams_held(config, schedule, layout.lane_ranks) * config.hidden_size
    streams = row // config.hidden_size
    # Norms work in float32 and keep the scaled input and one factor a row; the last one, over all lanes held, is never
    # computed anew.
    a_norm = FLOAT32 * (row + streams)
    last_norm = FLOAT32 * lanes_per_rank(config, layout.lane_ranks) * (config.hidden_size + 1)
    kept_width = layout.width if layout.precision == "bfloat16-weights" else FLOAT32
    # The first module's input is the embedding, once for all streams.
    inputs = ((modules - 1) * row + config.hidden_size) * kept_width if layout.recompute else modules * a_norm
    logits = FLOAT32 * config.vocab_size * (2 if layout.z_loss else 1)
    attention, feed_forward, masks = inner_bytes(config, schedule, layout)
    layers = 0 if layout.recompute else config.num_hidden_layers
    return Saved(
        streams=tokens * inputs,
        attention=layers * attention,
        feed_forward=layers * feed_forward,
        masks=sum(masks) if layers else 0,
        head=tokens * (last_norm + config.hidden_size * layout.width),
        logits=tokens * logits,
    )


def inner_bytes(config: LaneConfig, schedule: Schedule, layout: Layout) -> tuple[float, float, list[float]]:
    """What one attention and one feed-forward module keep inside of one micro-batch, and each layer's mask."""
    tokens, width, held = layout.micro_batch * layout.sequence, layout.width, lanes_per_rank(config, layout.lane_ranks)
    row = streams_held(config, schedule, layout.lane_ranks) * config.hidden_size
    share = held / config.num_lanes
    copies = (3, 2) if layout.precision == "bfloat16" else (1, 1)
    heads, size = config.num_attention_heads * share, config.head_size
    matrices = 2 * (heads + config.kv_heads * share) * size
    # Two rotation tables for queries and two for keys, the same for all sequences.
    rotations = 4 * FLOAT32 * size * layout.sequence
    attention = tokens * (copies[0] * row * width + matrices * width + FLOAT32 * heads) + rotations
    feed_forward = tokens * (copies[1] * row + 4 * config.intermediate_size * share) * width
    streams = row // config.hidden_size
    return attention, feed_forward, [_mask_bytes(config, layout, i, streams) for i in range(config.num_hidden_layers)]


def _mask_bytes(config: LaneConfig, layout: Layout, layer: int, streams: int) -> float:
    """A layer's mask as the attention kernel takes it: a number for each pair, of every stream and sequence."""
    square = layout.sequence**2 * layout.width
    if layout.document_mask:
        return streams * layout.micro_batch * square
    window = config.window(layer)
    return 0 if window is None or window >= layout.sequence else square


def training_memory(config: LaneConfig, schedule: Schedule, layout: Layout, reserve: float = 2e9) -> Memory:
    """Bytes on the fullest device at the peak of a step.

    Weights, gradients and optimizer state in float32 (bfloat16-weights: bfloat16), cut over the replicas with fsdp,
    where gradients are whole until the last micro-batch. The copy that is computed with is all weights in bfloat16
    (autocast keeps it), with fsdp the ends and two layers, the one at work and the next. Working memory is one
    module's inside, twice where it is computed anew. Logits are there in the computing type and twice in float32,
    four times with a z-loss. `reserve` is for the runtime and fragmentation.
    """
    rank = rank_parameters(config, layout.lane_ranks)
    held = 2 if layout.precision == "bfloat16-weights" else FLOAT32
    cut = layout.replicas if layout.shard == "fsdp" else 1
    by_muon = rank.modules if layout.optimizer == "muon" else 0
    saved = saved_bytes(config, schedule, layout)
    attention, feed_forward, masks = inner_bytes(config, schedule, layout)
    tokens = layout.micro_batch * layout.sequence
    copies = FLOAT32 * (4 if layout.z_loss else 2) + (0 if layout.width == FLOAT32 else layout.width)
    whole_gradients = held * rank.total if cut > 1 and layout.accumulation > 1 else 0
    working = max(attention + max(masks), feed_forward)
    return Memory(
        weights=held * rank.total / cut,
        compute_copy=_computed_with(config, schedule, layout, rank),
        gradients=held * rank.total / cut + whole_gradients,
        optimizer=held * (2 * rank.total - by_muon) / cut,
        activations=saved.total - saved.masks - saved.logits,
        masks=saved.masks,
        working=working * (2 if layout.recompute else 1),
        logits=tokens * config.vocab_size * copies,
        messages=_in_flight(config, schedule, layout),
        reserve=reserve,
    )


def _computed_with(config: LaneConfig, schedule: Schedule, layout: Layout, rank: RankParameters) -> float:
    """Bytes of the weights that products read, beyond the weights that are kept."""
    if layout.shard == "fsdp":
        return layout.width * (rank.ends + min(2, config.num_hidden_layers) * rank.modules / config.num_hidden_layers)
    if layout.precision == "bfloat16":
        return 2 * rank.total
    # A single stream of several lanes reads their columns side by side, which are copied.
    if streams_held(config, schedule, layout.lane_ranks) == lanes_per_rank(config, layout.lane_ranks):
        return 0
    columns = config.num_attention_heads * config.head_size + config.intermediate_size
    return layout.width * config.num_hidden_layers * config.hidden_size * columns


def _in_flight(config: LaneConfig, schedule: Schedule, layout: Layout) -> float:
    """Bytes of partials sent and not yet landed: each lane's own, and between ranks a float32 sum to receive into."""
    own = streams_held(config, schedule, layout.lane_ranks) * config.hidden_size * layout.width
    received = FLOAT32 * config.hidden_size if layout.lane_ranks > 1 else 0
    return schedule.max_outstanding * layout.micro_batch * layout.sequence * (own + received)
