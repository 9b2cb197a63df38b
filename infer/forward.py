"""One rank's forward pass while decoding: lane by lane, so that any number of ranks computes the same bits.

Every lane's matrices have the same shape whatever the number of ranks, and each is multiplied on its own; the residual
streams are kept in float32. Batch is one.

Shape suffixes: L lanes of this rank, S new positions, T cached positions, D hidden, H query heads of a lane,
K key-value heads of a lane, E head size, V vocabulary, C a lane's share of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from laneformer import ops
from laneformer.cache import KVCache
from laneformer.infer.exchange import RankExchange
from laneformer.infer.weights import RankWeights, aligned, aligned_lanes
from laneformer.lanes import run_schedule
from laneformer.schedule import Schedule
from laneformer.view import turns

# From this many rows on, widening 16-bit weights first makes a product on a CPU several times faster.
WIDEN_ROWS = 8


def each_lane(x_LSI: Tensor, weight_LOI: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Every lane's rows times its own matrix, one product a lane: [L, S, O] in the weights' type or float32."""
    dtype = weight_LOI[0].dtype
    if x_LSI.shape[1] >= WIDEN_ROWS and x_LSI.device.type == "cpu":
        dtype = torch.float32
    return torch.stack([F.linear(aligned(x.to(dtype)), w.to(dtype)) for x, w in zip(x_LSI, weight_LOI, strict=True)])


class Forward:
    """A rank's lanes, its cache of `capacity` positions, and the exchange with the other ranks."""

    def __init__(self, weights: RankWeights, exchange: RankExchange, capacity: int) -> None:
        config = weights.config
        self.config, self.weights, self.exchange = config, weights, exchange
        self.device = weights.device
        self.cache = KVCache(config, capacity, 1, len(weights.lanes), weights.dtype, self.device)
        self.modules = 2 * config.num_hidden_layers
        cos, sin = turns(config, torch.arange(capacity, device=self.device)[None], torch.float32)
        self.cos_TE, self.sin_TE = cos[0, 0, 0], sin[0, 0, 0]

    def streams(self, tokens_S: Tensor, schedule: Schedule) -> Tensor:
        """The lanes' streams [L, S, D] after all modules for new tokens; the cache takes their positions."""
        count, start = len(tokens_S), self.cache.length
        self.cache.room_for(count)
        x_LSD = (
            F.embedding(tokens_S.to(self.device), self.weights.embedding_VD)
            .float()
            .expand(len(self.weights.lanes), count, -1)
        )
        query_S = torch.arange(start, start + count, device=self.device)
        rope = self.cos_TE[start : start + count], self.sin_TE[start : start + count]
        masks: dict[int | None, Tensor] = {}

        def module(n: int, x_LSD: Tensor) -> Tensor:
            self.exchange.at(n)
            if n % 2 == 0:
                return self.attention(n // 2, x_LSD, query_S, rope, masks)
            return self.feed_forward(n // 2, x_LSD)

        x_LSD = run_schedule(schedule, self.config.num_lanes, x_LSD, module, self.exchange)
        self.cache.advance(count)
        return x_LSD

    def attention(
        self, layer: int, x_LSD: Tensor, query_S: Tensor, rope: tuple[Tensor, Tensor], masks: dict[int | None, Tensor]
    ) -> Tensor:
        """The lanes' partials [L, S, D] of a layer's attention, float32."""
        config, weights = self.config, self.weights.layers[layer]
        head, total, dtype = config.head_size, config.num_lanes, self.weights.dtype
        qkv = each_lane(self.norm(x_LSD, weights.attention_norm_LD), weights.qkv_LOI).to(dtype)
        split = [config.num_attention_heads // total, config.kv_heads // total, config.kv_heads // total]
        q, k, v = qkv.unflatten(-1, (-1, head)).transpose(1, 2).split(split, 1)
        if weights.q_norm_E is not None and weights.k_norm_E is not None:
            q = ops.rms_norm(q, weights.q_norm_E, config.norm_eps)
            k = ops.rms_norm(k, weights.k_norm_E, config.norm_eps)
        q, k = ops.rope(q, *rope), ops.rope(k, *rope)
        keys, values, key_T = self.cache.append(layer, k[:, None], v[:, None])
        window = config.window(layer)
        if window not in masks:
            masks[window] = ops.visible(query_S, key_T, window)
        q, keys, values = aligned_lanes(q[:, None]), aligned_lanes(keys), aligned_lanes(values)
        out = ops.attention(q, keys, values, masks[window])[:, 0]
        return each_lane(out.transpose(1, 2).flatten(2), weights.out_LOI).float()

    def feed_forward(self, layer: int, x_LSD: Tensor) -> Tensor:
        """The lanes' partials [L, S, D] of a layer's feed-forward block, float32."""
        weights = self.weights.layers[layer]
        normed = self.norm(x_LSD, weights.ffn_norm_LD)
        gate, up = each_lane(normed, weights.gate_up_LOI).chunk(2, -1)
        return each_lane(ops.gated_mlp(gate, up), weights.down_LOI).float()

    def norm(self, x_LSD: Tensor, weight_LD: Tensor) -> Tensor:
        """The streams normalised, float32 as they are."""
        return ops.rms_norm(x_LSD, weight_LD[:, None], self.config.norm_eps)

    def head(self, x_LSD: Tensor) -> Tensor:
        """Logits [S, V] in float32 from the lanes' final streams; the same bits on every rank."""
        config, weights, exchange = self.config, self.weights, self.exchange
        exchange.at(self.modules)
        if config.lm_head_type == "lane":
            return exchange.sum_lanes(self.head_product(self.norm(x_LSD, weights.norm_LD)))
        if config.lm_head_type == "vocab_parallel":
            normed_LSD = self.norm(x_LSD, weights.norm_LD)
        else:
            normed_LSD = self.lane_mean(x_LSD).expand(len(weights.lanes), *x_LSD.shape[1:])
        return exchange.gather_lanes(self.head_product(normed_LSD)).movedim(0, 1).flatten(1)[:, : config.vocab_size]

    def head_product(self, x_LSD: Tensor) -> Tensor:
        """Each lane's rows times its slice of the head, float32 [L, S, C]."""
        return each_lane(x_LSD, self.weights.head_L).float()

    def lane_mean(self, x_LSD: Tensor) -> Tensor:
        """What a replicated head reads, float32 [S, D]: the lanes' mean after the norm, or their normalised sum."""
        weights, exchange = self.weights, self.exchange
        if self.config.pre_norm_lane_agg:
            return self.norm(exchange.sum_lanes(x_LSD)[None], weights.norm_LD[:1])[0]
        return exchange.sum_lanes(self.norm(x_LSD, weights.norm_LD)) / self.config.num_lanes
