"""The modules of a lane model: attention, feed-forward, norms and heads, weights lane-first.

Shape suffixes: L lanes (of this process), B batch, S positions, T cached positions, D hidden, H query heads of a lane,
K key-value heads of a lane, E head size, F feed-forward width of a lane, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import ops
from .config import LaneConfig
from .lanes import ModelExchange
from .view import View


class LaneWeight(nn.Module):
    """A bare `weight` under the published key names; Kaiming-uniform (a = sqrt 5) on the unsplit matrix."""

    weight: nn.Parameter

    def __init__(self, *shape: int, fan_in: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))
        self.fan_in = fan_in

    def reset_parameters(self) -> None:
        """Draws the weight anew: uniform within 1/sqrt(fan in of the unsplit matrix)."""
        bound = 1 / math.sqrt(self.fan_in)
        nn.init.uniform_(self.weight, -bound, bound)


def rows(weight_LOI: Tensor, streams: int) -> Tensor:
    """The lanes' matrices [L, O, I], or for a single stream of several lanes their rows as one matrix [1, L O, I]."""
    return weight_LOI if weight_LOI.shape[0] == streams else weight_LOI.flatten(0, 1)[None]


def columns(weight_LOI: Tensor, streams: int) -> Tensor:
    """The lanes' matrices [L, O, I], or for a single stream of several lanes their columns as one, [1, O, L I]."""
    return weight_LOI if weight_LOI.shape[0] == streams else weight_LOI.transpose(0, 1).flatten(1)[None]


class LaneNorm(nn.Module):
    """RMSNorm of every lane's stream: one `weight` [D] for all lanes, or a `scale` [L, D] of their own."""

    def __init__(self, size: int, lanes: int | None, eps: float, **factory: Any) -> None:
        super().__init__()
        self.eps = eps
        if lanes is None:
            self.weight = nn.Parameter(torch.ones(size, **factory))
        else:
            self.scale = nn.Parameter(torch.ones(lanes, size, **factory))

    def reset_parameters(self) -> None:
        """Sets every scale to one."""
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x_LBSD: Tensor) -> Tensor:
        """[L, B, S, D] normalised over D."""
        weight = self.weight if hasattr(self, "weight") else self.scale[:, None, None]
        return ops.rms_norm(x_LBSD, weight, self.eps)


class Attention(nn.Module):
    """Each lane's own query and key-value heads."""

    def __init__(self, config: LaneConfig, lanes: int, **factory: Any) -> None:
        super().__init__()
        hidden, head, total = config.hidden_size, config.head_size, config.num_lanes
        rows = config.num_attention_heads * head
        kv_rows = config.kv_heads * head
        self.wq = LaneWeight(lanes, rows // total, hidden, fan_in=hidden, **factory)
        self.wk = LaneWeight(lanes, kv_rows // total, hidden, fan_in=hidden, **factory)
        self.wv = LaneWeight(lanes, kv_rows // total, hidden, fan_in=hidden, **factory)
        self.wo = LaneWeight(lanes, hidden, rows // total, fan_in=rows, **factory)
        if config.head_norms:
            self.q_norm = LaneNorm(head, None, config.norm_eps, **factory)
            self.k_norm = LaneNorm(head, None, config.norm_eps, **factory)
        self.head_size = head

    def forward(self, x_LBSD: Tensor, view: View, layer: int) -> Tensor:
        """The lanes' partials [L, B, S, D] from their normalised streams; of one stream for all lanes, their sum."""
        streams = x_LBSD.shape[0]
        q, k, v = (
            ops.lane_linear(x_LBSD, rows(w.weight, streams)).unflatten(-1, (-1, self.head_size)).transpose(2, 3)
            for w in (self.wq, self.wk, self.wv)
        )
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = ops.rope(q, view.cos, view.sin), ops.rope(k, view.cos, view.sin)
        k, v, mask = view.extend(layer, k, v)
        out_LBHSE = ops.attention(q, k, v, mask)
        return ops.lane_linear(out_LBHSE.transpose(2, 3).flatten(3), columns(self.wo.weight, streams))


class FeedForward(nn.Module):
    """Each lane's own feed-forward units: w1 gate, w3 up, w2 down."""

    def __init__(self, config: LaneConfig, lanes: int, **factory: Any) -> None:
        super().__init__()
        hidden, units = config.hidden_size, config.intermediate_size
        share = units // config.num_lanes
        self.w1 = LaneWeight(lanes, share, hidden, fan_in=hidden, **factory)
        self.w3 = LaneWeight(lanes, share, hidden, fan_in=hidden, **factory)
        self.w2 = LaneWeight(lanes, hidden, share, fan_in=units, **factory)

    def forward(self, x_LBSD: Tensor) -> Tensor:
        """The lanes' partials [L, B, S, D] from their normalised streams; of one stream for all lanes, their sum."""
        streams = x_LBSD.shape[0]
        gate, up = (ops.lane_linear(x_LBSD, rows(w.weight, streams)) for w in (self.w1, self.w3))
        return ops.lane_linear(ops.gated_mlp(gate, up), columns(self.w2.weight, streams))


class Layer(nn.Module):
    """Two modules: attention, then feed-forward, each behind its norm."""

    def __init__(self, config: LaneConfig, lanes: int, **factory: Any) -> None:
        super().__init__()
        norm_lanes = None if config.replicated_rmsn_scale else lanes
        self.attention = Attention(config, lanes, **factory)
        self.feed_forward = FeedForward(config, lanes, **factory)
        self.attention_norm = LaneNorm(config.hidden_size, norm_lanes, config.norm_eps, **factory)
        self.ffn_norm = LaneNorm(config.hidden_size, norm_lanes, config.norm_eps, **factory)


class Trunk(nn.Module):
    """The embedding, the layers and the final norm, under the published names."""

    def __init__(self, config: LaneConfig, lanes: int, **factory: Any) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.tok_embeddings = LaneWeight(config.vocab_size, hidden, fan_in=hidden, **factory)
        self.layers = nn.ModuleList(Layer(config, lanes, **factory) for _ in range(config.num_hidden_layers))
        norm_lanes = None if config.replicated_rmsn_scale or config.pre_norm_lane_agg else lanes
        self.norm = LaneNorm(hidden, norm_lanes, config.norm_eps, **factory)

    def layer(self, index: int) -> Layer:
        """Layer `index`, typed."""
        return cast(Layer, self.layers[index])


class Head(nn.Module):
    """From the lanes' final streams to logits, by the config's head type; tied heads use the embedding."""

    def __init__(self, config: LaneConfig, lanes: Sequence[int], **factory: Any) -> None:
        super().__init__()
        hidden, vocab, total = config.hidden_size, config.vocab_size, config.num_lanes
        self.config, self.lanes = config, tuple(lanes)
        if config.lm_head_type == "lane":
            self.linear = LaneWeight(vocab, total * hidden, fan_in=total * hidden, **factory)
        elif not config.tie_word_embeddings:
            shape = (len(lanes), vocab // total) if config.lm_head_type == "vocab_parallel" else (vocab,)
            self.weight = nn.Parameter(torch.empty(*shape, hidden, **factory))

    def reset_parameters(self) -> None:
        """Draws an untied head anew, as the other matrices are drawn."""
        if hasattr(self, "weight"):
            bound = 1 / math.sqrt(self.config.hidden_size)
            nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x_LBSD: Tensor, norm: LaneNorm, embedding_VD: Tensor, exchange: ModelExchange) -> Tensor:
        """Logits [B, S, V]; one blocking exchange."""
        config, dtype = self.config, x_LBSD.dtype
        if config.lm_head_type == "lane":
            all_LBSD = exchange.gather_lanes(norm(x_LBSD))
            return F.linear(all_LBSD.movedim(0, 2).flatten(2), self.linear.weight)
        if config.lm_head_type == "vocab_parallel":
            slices_LBSV = exchange.gather_lanes(ops.lane_linear(norm(x_LBSD), self._slices(embedding_VD, exchange)))
            return slices_LBSV.movedim(0, 2).flatten(2)
        weight_VD = self.weight if hasattr(self, "weight") else embedding_VD
        if config.pre_norm_lane_agg:
            return F.linear(norm(exchange.sum_lanes(x_LBSD).to(dtype)[None])[0], weight_VD)
        return F.linear((exchange.sum_lanes(norm(x_LBSD)) / config.num_lanes).to(dtype), weight_VD)

    def _slices(self, embedding_VD: Tensor, exchange: ModelExchange) -> Tensor:
        """Each held lane's slice of the vocabulary, [L, V/L, D]."""
        if hasattr(self, "weight"):
            return self.weight
        return exchange.shared(embedding_VD).unflatten(0, (self.config.num_lanes, -1))[list(self.lanes)]
