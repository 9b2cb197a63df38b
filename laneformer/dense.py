"""Standard tensor parallelism is an ordinary transformer: exact translation to and from transformers' Llama and Qwen3.

Only the layout differs. Lanes are folded side by side (heads and units are lane-major), and within a head rope turns
neighbouring pairs (2i, 2i+1) here but the halves (i, i + E/2) there, so rows of queries and keys change places.
Shape suffixes: L lanes, D hidden, R rows or columns of one lane (heads times head size, or units), J those of all
lanes, E head size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

try:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        LlamaConfig,
        PreTrainedConfig,
        PreTrainedModel,
        Qwen3Config,
    )
except ImportError as error:
    raise ImportError(
        f"laneformer.dense needs transformers 5 or later ({error}); install it with: pip install 'laneformer[hf]'"
    ) from error

from .checkpoint import EMBEDDING, HEAD, Checkpoint
from .config import LaneConfig, RopeScaling
from .hf_export import rope_parameters
from .model import Laneformer
from .ops import tree_sum
from .schedule import Landing, Own, Schedule

# Keys that both configs have under one name.
SAME_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "bos_token_id",
    "pad_token_id",
)  # fmt: skip
# What must hold in a transformers config, because lanes have no other.
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}


def to_llama(source: Laneformer | str | os.PathLike) -> PreTrainedModel:
    """The transformers model that computes the same function as a lane model or a checkpoint folder.

    A LlamaForCausalLM, or a Qwen3ForCausalLM where the config has head_norms, in the weights' type on the CPU; the
    lane and vocab_parallel heads become a plain one. Raises ValueError where no such model exists: lanes whose streams
    differ (any schedule but tensor-parallel), lanes with norms of their own, a sum before the norm, and, for Llama,
    sliding windows. transformers computes norms and rope in float32 whatever the weights' type.
    """
    config, schedule, dtype, tensor = _opened(source)
    if not _is_dense(schedule, config.num_lanes):
        raise ValueError(
            f"the schedule is {schedule} over {config.num_lanes} lanes, whose streams differ; only tensor-parallel "
            "(broadcast_delay 0) is the function of an ordinary transformer"
        )
    dense = _dense_config(config, dtype)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(dense, dtype=dtype)
    model.to_empty(device="cpu")
    # The rope tables are computed, not loaded, and the meta device had none.
    model.model.rotary_emb = type(model.model.rotary_emb)(dense)
    model.tie_weights()
    for weight in _layout(config):
        model.get_parameter(weight.theirs).data.copy_(weight.fold(tensor(weight.ours)))
    return model.eval()


def from_llama(
    source: PreTrainedModel | str | os.PathLike,
    num_lanes: int,
    dtype: torch.dtype | None = None,
    broadcast_delay: int = 0,
    use_early_comm: bool = False,
) -> Laneformer:
    """The lane model, cut into num_lanes lanes, that computes the same function as a Llama or Qwen3 model or folder.

    dtype: the source's unless given. A broadcast_delay above 0 (layers) makes it another function, to be trained from
    these weights. Raises ValueError for what lanes cannot express: other architectures, biases, other activations or
    rope types, quantized weights, and counts that num_lanes does not divide.
    """
    opened = not isinstance(source, PreTrainedModel)
    # The config comes first: what cannot be translated is refused before its weights are read.
    config = _lane_config(AutoConfig.from_pretrained(source) if opened else source.config, num_lanes)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto") if opened else source
    theirs = _parameters(model)
    dtype = dtype or theirs["model.embed_tokens.weight"].dtype
    config = config.replace(
        torch_dtype=str(dtype).removeprefix("torch."), broadcast_delay=broadcast_delay, use_early_comm=use_early_comm
    )
    lanes = Laneformer(config, device="meta", dtype=dtype)
    for weight in _layout(config):
        found = theirs.pop(weight.theirs)
        owner, _, leaf = weight.ours.rpartition(".")
        ours = torch.empty(lanes.get_parameter(weight.ours).shape, dtype=dtype).copy_(weight.cut(found.detach()))
        setattr(lanes.get_submodule(owner), leaf, nn.Parameter(ours))
        if opened:
            # A model opened here is let go of as it is read, so that two copies never exist.
            found.data = torch.empty(0)
    if theirs:
        raise ValueError(f"{len(theirs)} parameters have no place in a lane model, first {next(iter(theirs))}")
    return lanes


def _parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """A dense model's parameters by name; raises ValueError for a head that is tied in name only."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if model.config.tie_word_embeddings:
        head, embedding = parameters.pop(HEAD), parameters["model.embed_tokens.weight"]
        if head is not embedding and not torch.equal(head, embedding):
            raise ValueError("tie_word_embeddings is true but lm_head.weight differs from the embedding; set it false")
    return parameters


class Weight(NamedTuple):
    """One matrix under both names, and how it goes there (fold) and comes back (cut)."""

    theirs: str
    ours: str
    fold: Callable[[Tensor], Tensor]
    cut: Callable[[Tensor], Tensor]


def _layout(config: LaneConfig) -> Iterator[Weight]:
    """Every weight of a model, layer by layer."""
    yield Weight("model.embed_tokens.weight", EMBEDDING, _same, _same)
    for i in range(config.num_hidden_layers):
        yield from _layer_layout(config, f"model.layers.{i}.")
    yield _norm("model.norm", "model.norm", config.replicated_rmsn_scale or config.pre_norm_lane_agg)
    if config.lm_head_type == "lane":
        # Equal streams meet the sum of the lanes' blocks of columns.
        blocks = partial(_cut_columns, config.num_lanes)
        yield Weight(HEAD, "lm_head.linear.weight", lambda x_VJ: tree_sum(blocks(x_VJ)), _same)
    elif not config.tie_word_embeddings:
        yield Weight(HEAD, HEAD, _fold_rows if config.lm_head_type == "vocab_parallel" else _same, _same)


def _layer_layout(config: LaneConfig, at: str) -> Iterator[Weight]:
    lanes, head = config.num_lanes, config.head_size
    cut_rows, cut_columns = partial(_cut_rows, lanes), partial(_cut_columns, lanes)
    halves, pairs = partial(_pairs_to_halves, head), partial(_halves_to_pairs, head)
    for a in "qk":
        weight = (f"{at}self_attn.{a}_proj.weight", f"{at}attention.w{a}.weight")
        yield Weight(*weight, lambda x_LRD: halves(_fold_rows(x_LRD)), lambda x_JD: cut_rows(pairs(x_JD)))
        if config.head_norms:
            yield Weight(f"{at}self_attn.{a}_norm.weight", f"{at}attention.{a}_norm.weight", halves, pairs)
    yield Weight(f"{at}self_attn.v_proj.weight", f"{at}attention.wv.weight", _fold_rows, cut_rows)
    yield Weight(f"{at}self_attn.o_proj.weight", f"{at}attention.wo.weight", _fold_columns, cut_columns)
    yield Weight(f"{at}mlp.gate_proj.weight", f"{at}feed_forward.w1.weight", _fold_rows, cut_rows)
    yield Weight(f"{at}mlp.up_proj.weight", f"{at}feed_forward.w3.weight", _fold_rows, cut_rows)
    yield Weight(f"{at}mlp.down_proj.weight", f"{at}feed_forward.w2.weight", _fold_columns, cut_columns)
    yield _norm(f"{at}input_layernorm", f"{at}attention_norm", config.replicated_rmsn_scale)
    yield _norm(f"{at}post_attention_layernorm", f"{at}ffn_norm", config.replicated_rmsn_scale)


def _norm(theirs: str, ours: str, shared: bool) -> Weight:
    return Weight(f"{theirs}.weight", *((f"{ours}.weight", _same) if shared else (f"{ours}.scale", _one_scale)), _same)


def _same(x: Tensor) -> Tensor:
    return x


def _fold_rows(x_LRD: Tensor) -> Tensor:
    return x_LRD.flatten(0, 1)


def _cut_rows(lanes: int, x_JD: Tensor) -> Tensor:
    return x_JD.unflatten(0, (lanes, -1))


def _fold_columns(x_LDR: Tensor) -> Tensor:
    return x_LDR.movedim(0, 1).flatten(1)


def _cut_columns(lanes: int, x_DJ: Tensor) -> Tensor:
    return x_DJ.unflatten(1, (lanes, -1)).movedim(1, 0)


def _pairs_to_halves(head: int, x_J: Tensor) -> Tensor:
    return x_J.unflatten(0, (-1, head // 2, 2)).transpose(1, 2).flatten(0, 2)


def _halves_to_pairs(head: int, x_J: Tensor) -> Tensor:
    return x_J.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).flatten(0, 2)


def _one_scale(scale_LD: Tensor) -> Tensor:
    """The one scale that all lanes have; raises ValueError when they differ."""
    if not (scale_LD == scale_LD[0]).all():
        gap = (scale_LD - scale_LD[0]).abs().max().item()
        raise ValueError(f"the lanes' norms differ by up to {gap:.3g}; an ordinary transformer has one norm for all")
    return scale_LD[0]


def _opened(
    source: Laneformer | str | os.PathLike,
) -> tuple[LaneConfig, Schedule, torch.dtype, Callable[[str], Tensor]]:
    """Config, schedule, type and a reader of tensors by published name."""
    if not isinstance(source, Laneformer):
        checkpoint = Checkpoint(source)
        return checkpoint.config, Schedule.from_config(checkpoint.config), checkpoint.dtype, checkpoint.tensor
    if len(source.lanes) < source.config.num_lanes:
        raise ValueError(f"this model holds lanes {list(source.lanes)} of {source.config.num_lanes}; give a whole one")
    dtype = source.model.tok_embeddings.weight.dtype
    return source.config, source.schedule, dtype, lambda name: source.get_parameter(name).detach()


def _is_dense(schedule: Schedule, lanes: int) -> bool:
    """Whether every module reads a stream to which all earlier ones have added their whole output, once."""
    if schedule == Schedule.tensor_parallel(schedule.num_layers):
        return True
    # A single lane hears nothing from others, and sqrt(1) is 1: whatever adds its own partial at once is dense.
    return lanes == 1 and all(
        (step.own is not Own.NONE) + step.lands.count(Landing(n, True)) == 1
        and all(landing.module == n for landing in step.lands if landing.with_own)
        for n, step in enumerate(schedule.steps)
    )


def _dense_config(config: LaneConfig, dtype: torch.dtype) -> PreTrainedConfig:
    """The config of the Llama or Qwen3 model; raises ValueError for what neither expresses."""
    if config.pre_norm_lane_agg and config.num_lanes > 1:
        raise ValueError(
            f"pre_norm_lane_agg normalises the sum of {config.num_lanes} lanes, which weighs norm_eps "
            f"{config.norm_eps} otherwise than the norm of one stream does; an ordinary transformer has no such norm"
        )
    keys: dict[str, Any] = {name: getattr(config, name) for name in SAME_KEYS}
    keys |= {"rms_norm_eps": config.norm_eps, "rope_parameters": rope_parameters(config), "dtype": dtype}
    keys["eos_token_id"] = list(config.eos_ids) if isinstance(config.eos_token_id, tuple) else config.eos_token_id
    if config.head_norms:
        windows = [config.window(i) for i in range(config.num_hidden_layers)]
        kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
        any_window = any(window is not None for window in windows)
        return Qwen3Config(
            **keys, use_sliding_window=any_window, sliding_window=config.sliding_window, layer_types=kinds
        )
    if config.swa_layers:
        raise ValueError(
            f"layers {list(config.swa_layers)} see {config.sliding_window} positions only; Llama has no sliding windows"
        )
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"num_attention_heads {config.num_attention_heads} does not divide hidden_size {config.hidden_size}, which "
            "transformers asks of a Llama even where head_dim is given"
        )
    return LlamaConfig(**keys)


def _lane_config(config: PreTrainedConfig, num_lanes: int) -> LaneConfig:
    """The lane config of a Llama's or Qwen3's; raises ValueError for what lanes cannot express."""
    if config.model_type not in ("llama", "qwen3"):
        raise ValueError(f"the model is a {config.model_type}, expected a llama or a qwen3")
    for name, value in FIXED.items():
        if getattr(config, name, value) != value:
            raise ValueError(f"{name} is {getattr(config, name)!r}, lanes have {value!r} only")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("the weights are quantized; convert the model they were made from")
    keys: dict[str, Any] = {name: getattr(config, name) for name in SAME_KEYS}
    eos = config.eos_token_id
    kinds = getattr(config, "layer_types", None) or []
    windows = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    return LaneConfig(
        **keys,
        **_rope_fields(config.rope_parameters),
        eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        norm_eps=config.rms_norm_eps,
        num_lanes=num_lanes,
        broadcast_delay=0,
        sliding_window=config.sliding_window if windows else None,
        swa_layers=windows,
        head_norms=config.model_type == "qwen3",
    )


def _rope_fields(block: dict[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling from the rope block of transformers 5."""
    kind, part = block.get("rope_type", "default"), block.get("partial_rotary_factor", 1.0)
    if kind not in ("default", "llama3") or part != 1.0:
        raise ValueError(f"rope type is {kind!r} over {part} of a head, expected 'default' or 'llama3' over all of it")
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    scaling = RopeScaling(**{name: block[name] for name in names}) if kind == "llama3" else None
    return {"rope_theta": float(block["rope_theta"]), "rope_scaling": scaling}
