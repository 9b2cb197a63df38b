"""The lane model: a for-loop over the schedule, weights in the published lane-first layout.

Shape suffixes: L lanes (of this process), B batch, S positions, T cached positions, D hidden, H query heads of a lane,
K key-value heads of a lane, E head size, F feed-forward width of a lane, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .cache import KVCache
from .config import LaneConfig
from .lanes import InProcess, ModelExchange, run_schedule
from .modules import Head, LaneNorm, LaneWeight, Trunk
from .schedule import Schedule
from .view import View


class Laneformer(nn.Module):
    """A lane model; `lanes` names the lanes held here (all by default), `schedule` when their partials meet.

    `model(tokens_BS, cache=None) -> logits_BSV`. The state dict has the published keys and shapes.
    """

    def __init__(
        self,
        config: LaneConfig,
        schedule: Schedule | str | None = None,
        lanes: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.lanes = check_lanes(config, lanes)
        self.schedule = resolve_schedule(config, schedule)
        # Whether training keeps the modules' inputs only and computes what lies inside anew in the backward pass.
        self.recompute = False
        held = len(self.lanes)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.model = Trunk(config, held, **factory)
        self.lm_head = Head(config, self.lanes, **factory)
        if self.model.tok_embeddings.weight.device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all weights anew (Kaiming-uniform on the unsplit matrices, norms one)."""
        for module in self.modules():
            if isinstance(module, LaneWeight | LaneNorm | Head):
                module.reset_parameters()

    def forward(
        self,
        tokens_BS: Tensor,
        cache: KVCache | None = None,
        attention_mask: Tensor | None = None,
        exchange: ModelExchange | None = None,
        documents_BS: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, S, V] of the new tokens, in the weights' type.

        `cache` holds what came before and takes the new positions. `attention_mask` (1 = token, 0 = left padding) is
        [B, S] for the new tokens or [B, T] for all. `exchange` is needed when other processes hold the other lanes.
        `documents_BS` numbers the document of each token: attention stays within a document.
        """
        if tokens_BS.dim() != 2 or tokens_BS.numel() == 0:
            raise ValueError(f"tokens must be [B, S] with at least one token, got {list(tokens_BS.shape)}")
        if exchange is None:
            if len(self.lanes) < self.config.num_lanes:
                raise ValueError(
                    f"this model holds lanes {list(self.lanes)} of {self.config.num_lanes}; give an exchange"
                )
            exchange = InProcess()
        if cache is not None:
            cache.room_for(tokens_BS.shape[1])
        embedding_VD = self.model.tok_embeddings.weight
        x_BSD = F.embedding(tokens_BS, embedding_VD)
        view = View(self.config, tokens_BS, x_BSD.dtype, cache, attention_mask, documents_BS)
        streams = 1 if cache is None and self.one_stream else len(self.lanes)
        x_LBSD = exchange.shared(x_BSD).expand(streams, *x_BSD.shape)
        x_LBSD = final_streams(
            self.model, self.schedule, self.config.num_lanes, x_LBSD, view, exchange, self.recompute and self.training
        )
        if cache is not None:
            cache.advance(tokens_BS.shape[1])
        x_LBSD = x_LBSD.expand(len(self.lanes), *x_BSD.shape)
        return self.lm_head(x_LBSD, self.model.norm, embedding_VD, exchange)

    @property
    def one_stream(self) -> bool:
        """Whether the lanes' streams are all equal, and all here, so that one is enough until the head."""
        everything = len(self.lanes) == self.config.num_lanes
        return everything and self.schedule.streams_stay_equal and self.config.replicated_rmsn_scale

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """An empty cache for `capacity` positions of `batch` sequences, in this model's type and place."""
        weight = self.model.tok_embeddings.weight
        return KVCache(self.config, capacity, batch, len(self.lanes), weight.dtype, weight.device)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike,
        dtype: torch.dtype | None = None,
        schedule: Schedule | str | None = None,
        lanes: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> Laneformer:
        """The model of a checkpoint folder; reads only the bytes of `lanes` (all by default).

        dtype: the file's own unless given. schedule: the checkpoint's unless given. Raises CheckpointError or
        ConfigError (both ValueErrors) naming file, key, found and expected.
        """
        from .checkpoint import load_model

        return load_model(cls, folder, dtype, schedule, lanes, device)

    def save_pretrained(self, folder: str | os.PathLike, max_shard_size: int | str = "5GB") -> None:
        """Writes config.json and safetensors (sharded past `max_shard_size`); nothing half-written is left."""
        from .checkpoint import save_model

        save_model(self, folder, max_shard_size)


def final_streams(
    trunk: Trunk,
    schedule: Schedule,
    num_lanes: int,
    x_LBSD: Tensor,
    view: View,
    exchange: ModelExchange,
    recompute: bool = False,
) -> Tensor:
    """The lanes' streams [L, B, S, D] after every layer, from their first ones."""

    def module(n: int, x_LBSD: Tensor) -> Tensor:
        layer = trunk.layer(n // 2)
        if n % 2 == 0:
            return layer.attention(layer.attention_norm(x_LBSD), view, n // 2)
        return layer.feed_forward(layer.ffn_norm(x_LBSD))

    def recomputed(n: int, x_LBSD: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(module, n, x_LBSD, use_reentrant=False, preserve_rng_state=False))

    if recompute:
        return run_schedule(schedule, num_lanes, x_LBSD, recomputed, exchange)
    return run_schedule(schedule, num_lanes, x_LBSD, module, exchange)


def check_lanes(config: LaneConfig, lanes: Sequence[int] | None) -> tuple[int, ...]:
    """The lanes as a tuple, all by default; raises ValueError for ones that do not exist or repeat."""
    every = tuple(range(config.num_lanes))
    if lanes is None:
        return every
    chosen = tuple(lanes)
    if not chosen or len(set(chosen)) != len(chosen) or any(lane not in every for lane in chosen):
        raise ValueError(f"lanes must be distinct and among 0..{config.num_lanes - 1}, got {list(lanes)}")
    return chosen


def resolve_schedule(config: LaneConfig, schedule: Schedule | str | None) -> Schedule:
    """A schedule object from None (the checkpoint's own), a text form or a schedule; checks its layer count."""
    if schedule is None:
        return Schedule.from_config(config)
    if isinstance(schedule, str):
        return Schedule.parse(schedule, config)
    if schedule.num_layers != config.num_hidden_layers:
        raise ValueError(f"the schedule has {schedule.num_layers} layers, the model {config.num_hidden_layers}")
    return schedule
