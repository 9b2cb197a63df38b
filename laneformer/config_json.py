"""How config.json keys become LaneConfig fields: required keys, older names, rope blocks, what is refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

# Never assumed, because the published class's defaults are not known: a file without one of these is refused.
REQUIRED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings", "rope_theta", "norm_eps", "num_lanes", "broadcast_delay", "use_early_comm",
    "lm_head_type",
)  # fmt: skip

# Keys other tools write that say nothing about this architecture.
BOOKKEEPING = frozenset({
    "architectures", "auto_map", "transformers_version", "use_cache", "_name_or_path", "initializer_range",
    "return_dict", "output_hidden_states", "output_attentions", "is_encoder_decoder", "chunk_size_feed_forward",
    "id2label", "label2id", "problem_type", "name_or_path", "_attn_implementation_autoset", "attn_implementation",
})  # fmt: skip

# Keys that are fine at one value only, because the architecture has no other.
FIXED = {
    "model_type": "laneformer",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
}
ROPE_NAMES = ("rope_scaling", "rope_scaling_args", "rope_parameters")
ROPE_ALIASES = {"scale_factor": "factor", "old_context_len": "original_max_position_embeddings"}
ROPE_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class ConfigError(ValueError):
    """A configuration that cannot work; the message says what was given, what was expected and where."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`, did you mean X?` for the closest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def reject_unknown_keys(keys: Iterable[str], known: Iterable[str], source: str) -> None:
    """Raises ConfigError for the first key that is not known, naming the nearest one."""
    known = list(known)
    for key in keys:
        if key not in known:
            raise ConfigError(f"{source}: unknown key {key!r}{nearest(key, known)}")


def fields_from_json(keys: dict[str, Any], source: str, names: list[str]) -> dict[str, Any]:
    """The constructor arguments of LaneConfig that config.json keys stand for."""
    keys = dict(keys)
    for key, value in FIXED.items():
        if keys.pop(key, value) != value:
            raise ConfigError(f"{source}: {key} must be {value!r} for this architecture")
    for key in BOOKKEEPING:
        keys.pop(key, None)
    if "dtype" in keys:
        keys.setdefault("torch_dtype", keys.pop("dtype"))
    if keys.get("torch_dtype", "") is None:
        del keys["torch_dtype"]
    _rope(keys, source)
    _older_family(keys, source)
    reject_unknown_keys(keys, names, source)
    missing = [key for key in REQUIRED if keys.get(key) is None]
    if missing:
        raise ConfigError(f"{source}: missing {', '.join(missing)}; nothing is assumed for them, so add them")
    if keys.get("sliding_window") is not None and keys.get("swa_layers") is None:
        raise ConfigError(
            f"{source}: sliding_window is {keys['sliding_window']} but swa_layers does not say on which layers; "
            "add swa_layers (an empty list for none)"
        )
    return {key: value for key, value in keys.items() if value is not None}


def _rope(keys: dict[str, Any], source: str) -> None:
    """Folds the three names of the rope block into rope_theta and rope_scaling."""
    given = {name: keys.pop(name) for name in ROPE_NAMES if keys.get(name) is not None}
    for name in ROPE_NAMES:
        keys.pop(name, None)
    blocks = []
    for name, given_block in given.items():
        if not isinstance(given_block, dict):
            raise ConfigError(f"{source}: {name} is {given_block!r}, expected an object or null")
        block = {ROPE_ALIASES.get(str(key), str(key)): value for key, value in given_block.items()}
        theta = block.pop("rope_theta", None)
        if theta is not None:
            if keys.get("rope_theta", theta) != theta:
                raise ConfigError(f"{source}: rope_theta is {keys['rope_theta']} but {name} says {theta}")
            keys["rope_theta"] = theta
        kinds = {block.pop(key) for key in ("rope_type", "type") if key in block} or {"llama3" if block else "default"}
        if kinds - {"llama3", "default"}:
            raise ConfigError(f"{source}: {name} has rope type {'/'.join(sorted(kinds))}, expected llama3 or default")
        if "llama3" in kinds:
            reject_unknown_keys(block, ROPE_FIELDS, f"{source}: {name}")
            missing = [key for key in ROPE_FIELDS if block.get(key) is None]
            if missing:
                raise ConfigError(f"{source}: {name} lacks {', '.join(missing)}")
            blocks.append(block)
    if blocks and any(block != blocks[0] for block in blocks):
        raise ConfigError(f"{source}: {' and '.join(given)} disagree; keep one of them")
    if blocks:
        keys["rope_scaling"] = blocks[0]


def _older_family(keys: dict[str, Any], source: str) -> None:
    """Rewrites `use_comm` and `sliding_window_n_layers` into today's keys."""
    use_comm = keys.pop("use_comm", None)
    if use_comm is not None:
        for key in ("use_attention_comm", "use_mlp_comm"):
            if keys.get(key, use_comm) != use_comm:
                raise ConfigError(f"{source}: use_comm is {use_comm} but {key} is {keys[key]}; keep the latter alone")
            keys[key] = use_comm
    count = keys.pop("sliding_window_n_layers", None)
    if count is None:
        return
    layers = keys.get("num_hidden_layers")
    if not isinstance(count, int) or not isinstance(layers, int) or abs(count) > layers:
        raise ConfigError(f"{source}: sliding_window_n_layers is {count!r}, expected -{layers}..{layers}")
    listed = list(range(layers))[:count] if count > 0 else list(range(layers))[layers + count :]
    if keys.get("swa_layers") not in (None, listed):
        raise ConfigError(f"{source}: sliding_window_n_layers {count} and swa_layers {keys['swa_layers']} disagree")
    keys["swa_layers"] = listed if keys.get("sliding_window") is not None else []
