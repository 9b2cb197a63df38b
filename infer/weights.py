"""One rank's weights, packed for decoding: its lanes only, query/key/value and gate/up fused, the head in lane slices.

Shape suffixes: L lanes of this rank, D hidden, O and I a matrix's output and input, V vocabulary, C a lane's share
of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laneformer.checkpoint import EMBEDDING, HEAD, Checkpoint
from laneformer.config import LaneConfig
from laneformer.model import Laneformer, check_lanes

# Where the memory of a matrix starts decides the order in which the CPU library adds, so all lanes start alike.
ALIGNMENT = 64


@dataclass(frozen=True)
class LayerWeights:
    """A layer's matrices, lane first; head norms where the config has them."""

    attention_norm_LD: Tensor
    qkv_LOI: Tensor
    out_LOI: Tensor
    ffn_norm_LD: Tensor
    gate_up_LOI: Tensor
    down_LOI: Tensor
    q_norm_E: Tensor | None = None
    k_norm_E: Tensor | None = None


@dataclass(frozen=True)
class RankWeights:
    """What a rank holds: the whole embedding, its lanes of every layer, the final norm, its lanes' slices of the head.

    `head_L` has one matrix a lane: [C, D] rows of the vocabulary (C the same for all lanes, zero rows fill the last),
    or [V, D] the lane's columns of a `lane` head. Raises CheckpointError as Checkpoint does.
    """

    config: LaneConfig
    lanes: tuple[int, ...]
    embedding_VD: Tensor
    layers: tuple[LayerWeights, ...]
    norm_LD: Tensor
    head_L: tuple[Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the matrices."""
        return self.embedding_VD.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.embedding_VD.device

    @property
    def num_bytes(self) -> int:
        """Bytes held by this rank, shared storage counted once."""
        tensors = [self.embedding_VD, self.norm_LD, *self.head_L]
        tensors += [t for layer in self.layers for t in vars(layer).values() if t is not None]
        return sum(s.nbytes() for s in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values())

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights that decoding one token reads on this rank: all but the embedding table."""
        tensors = [t for layer in self.layers for t in vars(layer).values() if t is not None]
        # A row that all lanes share (stride 0) is one row.
        own = [t if t.stride(0) else t[0] for t in [*tensors, self.norm_LD, *self.head_L]]
        return sum(t.numel() * t.element_size() for t in own)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike,
        lanes: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> RankWeights:
        """Reads only the bytes of `lanes` from a checkpoint folder, one layer at a time, straight into packed form.

        On a GPU the lanes of an output matrix lie column beside column, so that they are also one matrix of all lanes.
        """
        device = torch.device(device)
        checkpoint = Checkpoint(folder)
        config = checkpoint.config
        held = check_lanes(config, lanes)
        dtype = dtype or checkpoint.dtype
        embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        embedding.copy_(checkpoint.tensor(EMBEDDING))
        # The largest tensors come first: while one is copied, its bytes are resident twice.
        head = tuple(_load_head(checkpoint, lane, dtype, embedding) for lane in held)
        if device.type != "cpu" and not config.tie_word_embeddings:
            head = torch.stack(head).unbind(0)
        packing = Packing(config, len(held), dtype, device)
        layers = tuple(
            packing.layer(lambda name, i=i: checkpoint.tensor(f"model.layers.{i}.{name}", held))
            for i in range(config.num_hidden_layers)
        )
        final = "model.norm.weight" if config.replicated_rmsn_scale or config.pre_norm_lane_agg else "model.norm.scale"
        norm = _per_lane(checkpoint.tensor(final, held).to(device, dtype, copy=True), len(held))
        return cls(config, held, embedding, layers, norm, head)

    @classmethod
    def from_model(cls, model: Laneformer) -> RankWeights:
        """The packed form of a model in memory that holds all its lanes."""
        config = model.config
        state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        embedding = state[EMBEDDING]
        packing = Packing(config, config.num_lanes, embedding.dtype, embedding.device)
        layers = tuple(
            packing.layer(lambda name, i=i: state[f"model.layers.{i}.{name}"]) for i in range(config.num_hidden_layers)
        )
        norm = state["model.norm.weight"] if "model.norm.weight" in state else state["model.norm.scale"]
        every = state.get("lm_head.linear.weight", state.get(HEAD, embedding))
        head = tuple(_head_slice(every, config, lane) for lane in range(config.num_lanes))
        return cls(config, model.lanes, embedding, layers, _per_lane(norm, config.num_lanes), head)


@dataclass(frozen=True)
class Packing:
    """How a layer's weights are packed: of `lanes` lanes, in one type, on one device."""

    config: LaneConfig
    lanes: int
    dtype: torch.dtype
    device: torch.device

    def layer(self, read: Callable[[str], Tensor]) -> LayerWeights:
        """A layer's packed weights; `read` gives a tensor by its name within the layer, let go once copied."""
        config, lanes = self.config, self.lanes

        def copy(name: str) -> Tensor:
            return read(name).to(self.device, self.dtype, copy=True)

        kind = "weight" if config.replicated_rmsn_scale else "scale"
        hidden, units = config.hidden_size, config.intermediate_size // config.num_lanes
        heads = config.num_attention_heads * config.head_size // config.num_lanes
        kv_rows = config.kv_heads * config.head_size // config.num_lanes
        qkv = (read(f"attention.w{n}.weight") for n in "qkv")
        gate_up = (read(f"feed_forward.w{n}.weight") for n in "13")
        return LayerWeights(
            attention_norm_LD=_per_lane(copy(f"attention_norm.{kind}"), lanes),
            qkv_LOI=self.fuse(qkv, heads + 2 * kv_rows, hidden),
            out_LOI=self.output(read("attention.wo.weight"), hidden, heads),
            ffn_norm_LD=_per_lane(copy(f"ffn_norm.{kind}"), lanes),
            gate_up_LOI=self.fuse(gate_up, 2 * units, hidden),
            down_LOI=self.output(read("feed_forward.w2.weight"), hidden, units),
            q_norm_E=copy("attention.q_norm.weight") if config.head_norms else None,
            k_norm_E=copy("attention.k_norm.weight") if config.head_norms else None,
        )

    def fuse(self, tensors: Iterable[Tensor], rows: int, columns: int) -> Tensor:
        """The rows of each tensor below those of the last, lane by lane: [L, rows, columns]."""
        fused, start = empty_lanes((self.lanes, rows, columns), self.dtype, self.device), 0
        for tensor in tensors:
            fused[:, start : start + tensor.shape[1]].copy_(tensor)
            start += tensor.shape[1]
        return fused

    def output(self, tensor_LOI: Tensor, rows: int, columns: int) -> Tensor:
        """An output matrix of every lane: apart from each other on a CPU, column beside column on a GPU."""
        if self.device.type == "cpu":
            return self.fuse([tensor_LOI], rows, columns)
        beside_OLI = torch.empty(rows, self.lanes, columns, dtype=self.dtype, device=self.device)
        return beside_OLI.transpose(0, 1).copy_(tensor_LOI)


def empty_lanes(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An empty [L, ...] whose lanes each start at a multiple of ALIGNMENT bytes, whatever the sizes."""
    lanes, size, step = shape[0], math.prod(shape[1:]), ALIGNMENT // dtype.itemsize
    return torch.empty(lanes, -(-size // step) * step, dtype=dtype, device=device)[:, :size].view(*shape)


def aligned_lanes(x_L: Tensor) -> Tensor:
    """x_L with every lane at a multiple of ALIGNMENT bytes, copied if they lie otherwise."""
    if x_L.stride(0) * x_L.element_size() % ALIGNMENT == 0 and x_L.data_ptr() % ALIGNMENT == 0:
        return x_L
    return empty_lanes(x_L.shape, x_L.dtype).copy_(x_L)


def aligned(x: Tensor) -> Tensor:
    """x at a multiple of ALIGNMENT bytes, copied if it lies elsewhere."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def _per_lane(norm: Tensor, lanes: int) -> Tensor:
    """A norm's scale as [L, D], one row repeated without copying when all lanes share it."""
    return norm if norm.dim() == 2 else norm.expand(lanes, -1)


def lane_share(config: LaneConfig) -> int:
    """Rows of the vocabulary that each lane's slice of the head has, the last one's filled up."""
    return -(-config.vocab_size // config.num_lanes)


def _load_head(checkpoint: Checkpoint, lane: int, dtype: torch.dtype, embedding_VD: Tensor) -> Tensor:
    config = checkpoint.config
    if config.tie_word_embeddings:
        return _head_slice(embedding_VD, config, lane)
    if config.lm_head_type == "lane":
        columns = slice(lane * config.hidden_size, (lane + 1) * config.hidden_size)
        part = checkpoint.tensor("lm_head.linear.weight", columns=columns)
    elif config.lm_head_type == "vocab_parallel":
        part = checkpoint.tensor(HEAD, rows=slice(lane, lane + 1))[0]
    else:
        share = lane_share(config)
        part = checkpoint.tensor(HEAD, rows=slice(lane * share, min((lane + 1) * share, config.vocab_size)))
    return _filled(torch.empty(part.shape, dtype=dtype, device=embedding_VD.device).copy_(part), config)


def _head_slice(every: Tensor, config: LaneConfig, lane: int) -> Tensor:
    if config.lm_head_type == "lane":
        return every[:, lane * config.hidden_size : (lane + 1) * config.hidden_size].contiguous()
    rows = every.flatten(0, -2)
    share = lane_share(config)
    return _filled(rows[lane * share : (lane + 1) * share], config)


def _filled(part: Tensor, config: LaneConfig) -> Tensor:
    """A head slice with zero rows added up to every lane's share, so that all lanes multiply the same shape."""
    missing = lane_share(config) - part.shape[0]
    if config.lm_head_type == "lane" or missing <= 0:
        return aligned(part)
    return torch.cat((part, part.new_zeros(missing, part.shape[1])))
