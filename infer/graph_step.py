"""One decode step of a rank under one schedule: from a token in device memory to logits and the likeliest next token.

Every tensor that outlives the step stays in place and nothing depends on a number that the host would have to know, so
the step can be captured in a CUDA graph once and replayed for every token.

Shape suffixes: as in laneformer.infer.graph_math.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laneformer.cache import KVCache
from laneformer.infer import graph_math as math
from laneformer.infer.graph_partials import Partials
from laneformer.infer.weights import LayerWeights, RankWeights
from laneformer.schedule import Own, Schedule

# Compiled for a GPU: kernels are tuned for its bandwidth, and the graph around them is ours.
GPU_OPTIONS: dict[str, Any] = {"coordinate_descent_tuning": True, "triton.cudagraphs": False, "size_asserts": False}


class Kernels:
    """Calls the functions of graph_math: compiled once for each set of shapes where `fused`, as they are otherwise."""

    def __init__(self, fused: bool, options: dict[str, Any] | None = None) -> None:
        self.fused = fused
        self._options = GPU_OPTIONS if options is None else options
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """What `function` gives for tensors and numbers."""
        if not self.fused:
            return function(*args, fused=False)
        key = (function, *(_form(arg) if isinstance(arg, Tensor) else arg for arg in args))
        if key not in self._compiled:
            # Importing the compiler takes as long as importing torch.
            from laneformer.infer.compiled import compile_function

            self._compiled[key] = compile_function(lambda *given: function(*given, fused=True), args, self._options)
        return self._compiled[key](*(arg for arg in args if isinstance(arg, Tensor)))


def _form(x: Tensor) -> tuple[Any, ...]:
    """All of a tensor that compiled code depends on."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0


@dataclass(frozen=True)
class State:
    """What a step reads and leaves behind, in place: the token it takes, that token's position, the logits after it.

    After the step `token_1` holds the likeliest next token, -1 where the logits are not numbers, and `position_1` its
    position.
    """

    token_1: Tensor
    position_1: Tensor
    logits_V: Tensor

    @classmethod
    def new(cls, vocabulary: int, device: torch.device) -> State:
        """Zeros."""
        token_1, position_1 = torch.zeros(2, 1, dtype=torch.int64, device=device)
        return cls(token_1, position_1, torch.zeros(vocabulary, device=device))


def can_merge(schedule: Schedule, weights: RankWeights) -> bool:
    """Whether this rank's lanes compute what one wide lane would: equal streams, read through equal norms."""
    return schedule.streams_stay_equal and weights.config.replicated_rmsn_scale


def merged(weights: LayerWeights) -> LayerWeights:
    """The lanes' matrices as one, [1, O, I]: as a dense model has them. Views where memory allows, copies elsewhere."""

    def rows(x_LOI: Tensor) -> Tensor:
        return x_LOI.flatten(0, 1)[None]

    def columns(x_LOI: Tensor) -> Tensor:
        return x_LOI.transpose(0, 1).flatten(1)[None]

    return LayerWeights(
        weights.attention_norm_LD[:1], rows(weights.qkv_LOI), columns(weights.out_LOI), weights.ffn_norm_LD[:1],
        rows(weights.gate_up_LOI), columns(weights.down_LOI), weights.q_norm_E, weights.k_norm_E,
    )  # fmt: skip


def as_one(head_L: tuple[Tensor, ...]) -> Tensor:
    """The lanes' slices of the head as one tensor [L, C, D]: a view if they lie one after another, else a copy."""
    first = head_L[0]
    step = first.numel() * first.element_size()
    if all(x.is_contiguous() and x.data_ptr() == first.data_ptr() + i * step for i, x in enumerate(head_L)):
        storage = first.untyped_storage().nbytes() - first.storage_offset() * first.element_size()
        if storage >= step * len(head_L):
            return first.as_strided((len(head_L), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(head_L)


class StepParts:
    """What the steps of all schedules and lengths share: weights in both forms, cache, rope tables, state, exchange."""

    def __init__(
        self, weights: RankWeights, cache: KVCache, rope: tuple[Tensor, Tensor], partials: Partials,
        at: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.weights, self.config, self.rope, self.partials, self.at = weights, weights.config, rope, partials, at
        self.keys = [k[:, 0] for k in cache.k]
        self.values = [v[:, 0] for v in cache.v]
        self.head_LCD = as_one(weights.head_L)
        self.state = State.new(weights.config.vocab_size, weights.device)
        self._merged: tuple[LayerWeights, ...] | None = None

    def layers(self, merge: bool) -> tuple[LayerWeights, ...]:
        """The layers' weights lane by lane, or as one wide lane."""
        if not merge:
            return self.weights.layers
        if self._merged is None:
            self._merged = tuple(merged(layer) for layer in self.weights.layers)
        return self._merged


class Step:
    """A schedule's step while at most `length` positions are used."""

    def __init__(self, parts: StepParts, schedule: Schedule, length: int) -> None:
        self.parts, self.schedule, self.length = parts, schedule, length
        self.merge = can_merge(schedule, parts.weights)
        self.layers = parts.layers(self.merge)
        self.lanes = len(parts.weights.lanes)
        self.streams = 1 if self.merge else self.lanes
        self.at_once = [any(la.module == n for la in step.lands) for n, step in enumerate(schedule.steps)]

    def run(self, kernels: Kernels) -> None:
        """Takes the token of the state; leaves its logits, the likeliest next token and the next position there."""
        parts, state = self.parts, self.parts.state
        token_1 = state.token_1.clamp_min(0)
        x_MD, *rope = kernels(
            math.embed, token_1, state.position_1, parts.weights.embedding_VD, *parts.rope, self.streams
        )
        x_MD = self._modules(kernels, x_MD, rope)
        parts.at(len(self.schedule.steps))
        state.logits_V.copy_(self._logits(kernels, x_MD))
        state.token_1.copy_(math.pick(state.logits_V, kernels.fused))
        state.position_1.add_(1)

    def _modules(self, kernels: Kernels, x_MD: Tensor, rope: list[Tensor]) -> Tensor:
        """The streams after all modules; what laneformer.lanes.run_schedule does, each module's sums in one call."""
        partials, steps, total = self.parts.partials, self.schedule.steps, self.parts.config.num_lanes
        own_MD: dict[int, Tensor] = {}
        terms: dict[int, Tensor] = {}
        for n, step in enumerate(steps):
            self.parts.at(n)
            module = self._feed_forward if n % 2 else self._attention
            partial_MD = module(kernels, n // 2, x_MD, rope)
            if step.sends:
                partials.post(n, partial_MD, self.at_once[n])
                own_MD[n] = partial_MD
            arrived: list[Tensor] = []
            for landing in step.lands:
                m = landing.module
                if m not in terms:
                    terms[m] = partials.terms(m)
                arrived += [terms[m]] if landing.with_own else [terms[m], own_MD[m]]
            scale = None if step.own is Own.NONE else step.own.scale(total)
            with_own = tuple(landing.with_own for landing in step.lands)
            if arrived or scale is not None:
                x_MD = kernels(math.land, x_MD, partial_MD, scale, with_own, *arrived)
            for m in [m for m in terms if self.schedule.last_use[m] == n]:
                del terms[m], own_MD[m]
        return x_MD

    def _attention(self, kernels: Kernels, layer: int, x_MD: Tensor, rope: list[Tensor]) -> Tensor:
        parts, weights = self.parts, self.layers[layer]
        keys, values, position_1 = parts.keys[layer], parts.values[layer], parts.state.position_1
        q_LKGE = kernels(
            math.heads, x_MD, *rope, weights.attention_norm_LD, weights.qkv_LOI, weights.q_norm_E, weights.k_norm_E,
            keys, values, position_1, parts.config.norm_eps,
        )  # fmt: skip
        used = slice(0, min(self.length, keys.shape[2]))
        found_MI = kernels(
            math.attend, q_LKGE, keys[:, :, used], values[:, :, used], position_1, self.streams
        )  # fmt: skip
        return kernels(math.matvec, found_MI, weights.out_LOI)

    def _feed_forward(self, kernels: Kernels, layer: int, x_MD: Tensor, rope: list[Tensor]) -> Tensor:
        weights, eps = self.layers[layer], self.parts.config.norm_eps
        gated_MI = kernels(math.gated, x_MD, weights.ffn_norm_LD, weights.gate_up_LOI, self.lanes, eps)
        return kernels(math.matvec, gated_MI, weights.down_LOI)

    def _logits(self, kernels: Kernels, x_MD: Tensor) -> Tensor:
        """Logits [V] from the final streams, by the config's head type; the same bits on every rank."""
        parts, config = self.parts, self.parts.config
        if config.lm_head_type == "replicate":
            read_LD = self._lane_mean(kernels, x_MD).expand(self.lanes, -1)
        else:
            # Every lane has its own norm here, whatever its stream.
            streams_LD = x_MD.expand(self.lanes, -1)
            read_LD = kernels(math.final_norm, streams_LD, parts.weights.norm_LD, config.norm_eps, 1.0)
        slices_LC = kernels(math.matvec, read_LD, parts.head_LCD)
        if config.lm_head_type == "lane":
            return kernels(math.add_terms, parts.partials.sum_terms(slices_LC), 1.0)[0]
        return parts.partials.gather(slices_LC).flatten()[: config.vocab_size]

    def _lane_mean(self, kernels: Kernels, x_MD: Tensor) -> Tensor:
        """What a replicated head reads, [1, D]: the lanes' mean after the norm, or their normalised sum."""
        parts, config, eps = self.parts, self.parts.config, self.parts.config.norm_eps
        lanes, norm_LD = config.num_lanes, parts.weights.norm_LD
        if self.merge:
            factor = float(lanes) if config.pre_norm_lane_agg else 1.0
            return kernels(math.final_norm, x_MD, norm_LD[:1], eps, factor)
        if config.pre_norm_lane_agg:
            total_1D = kernels(math.add_terms, parts.partials.sum_terms(x_MD), 1.0)
            return kernels(math.final_norm, total_1D, norm_LD[:1], eps, 1.0)
        normed_LD = kernels(math.final_norm, x_MD, norm_LD, eps, 1.0)
        return kernels(math.add_terms, parts.partials.sum_terms(normed_LD), float(lanes))
