"""What a lane model is made of: sizes, lanes, windows, rope, head (config.json in and out)."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config_json import ConfigError, fields_from_json, reject_unknown_keys

HEAD_TYPES = ("replicate", "lane", "vocab_parallel")


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3.1-style frequency scaling of the rotary embedding (arXiv 2407.21783, Hugging Face `llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.factor <= 0 or self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope scaling needs factor > 0 and high_freq_factor > low_freq_factor, got factor={self.factor}, "
                f"low_freq_factor={self.low_freq_factor}, high_freq_factor={self.high_freq_factor}"
            )


@dataclass(frozen=True)
class LaneConfig:
    """Sizes and switches of a lane model, under the key names of the published config.json.

    Sizes count elements; `broadcast_delay` counts layers; `sliding_window` counts positions and holds on the layers
    that `swa_layers` lists. `head_norms` (query/key head norms, as Qwen3 has them) is this project's own addition.
    Raises ConfigError (a ValueError) for sizes that cannot work, naming both numbers.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    num_lanes: int = 1
    broadcast_delay: int = 2
    use_early_comm: bool = False
    use_attention_comm: bool = True
    use_mlp_comm: bool = True
    lm_head_type: str = "replicate"
    pre_norm_lane_agg: bool = False
    replicated_rmsn_scale: bool = True
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    swa_layers: tuple[int, ...] = ()
    head_norms: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    torch_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            if self.hidden_size % max(self.num_attention_heads, 1):
                raise ConfigError(
                    f"num_attention_heads {self.num_attention_heads} does not divide hidden_size {self.hidden_size}; "
                    "give head_dim explicitly"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        object.__setattr__(self, "swa_layers", tuple(sorted(set(self.swa_layers))))
        if isinstance(self.eos_token_id, list):
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        self._check_sizes()
        self._check_switches()

    def _check_sizes(self) -> None:
        for name in (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "vocab_size", "max_position_embeddings", "num_lanes",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if getattr(self, name) % self.num_lanes:
                raise ConfigError(f"num_lanes {self.num_lanes} does not divide {name} {getattr(self, name)}")
        if self.num_attention_heads % self.kv_heads:
            raise ConfigError(
                f"num_key_value_heads {self.kv_heads} does not divide num_attention_heads {self.num_attention_heads}"
            )
        if self.head_size % 2:
            raise ConfigError(f"head size must be even for rotary pairs, got {self.head_size}")

    def _check_switches(self) -> None:
        for name in (
            "use_early_comm", "use_attention_comm", "use_mlp_comm", "pre_norm_lane_agg", "replicated_rmsn_scale",
            "tie_word_embeddings", "head_norms",
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.lm_head_type not in HEAD_TYPES:
            raise ConfigError(f"lm_head_type is {self.lm_head_type!r}, expected one of {', '.join(HEAD_TYPES)}")
        if self.lm_head_type == "vocab_parallel" and self.vocab_size % self.num_lanes:
            raise ConfigError(f"num_lanes {self.num_lanes} does not divide vocab_size {self.vocab_size}")
        if self.pre_norm_lane_agg and self.lm_head_type != "replicate":
            raise ConfigError(f"pre_norm_lane_agg needs lm_head_type replicate, got {self.lm_head_type}")
        if self.tie_word_embeddings and self.lm_head_type == "lane":
            raise ConfigError("tie_word_embeddings cannot hold with lm_head_type lane: the head is [V, L*D]")
        if not isinstance(self.broadcast_delay, int) or self.broadcast_delay < 0:
            raise ConfigError(f"broadcast_delay must be a whole number of layers >= 0, got {self.broadcast_delay!r}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window must be at least 1 position, got {self.sliding_window}")
        outside = [i for i in self.swa_layers if not 0 <= i < self.num_hidden_layers]
        if outside:
            raise ConfigError(f"swa_layers {outside} lie outside the layers 0..{self.num_hidden_layers - 1}")
        if self.swa_layers and self.sliding_window is None:
            raise ConfigError(f"swa_layers lists {list(self.swa_layers)} but sliding_window is not given")
        if not (self.rope_theta > 0 and math.isfinite(self.rope_theta)):
            raise ConfigError(f"rope_theta must be positive, got {self.rope_theta}")
        if not (self.norm_eps >= 0 and math.isfinite(self.norm_eps)):
            raise ConfigError(f"norm_eps must be a finite number >= 0, got {self.norm_eps}")

    @property
    def kv_heads(self) -> int:
        """Key-value heads over all lanes."""
        assert self.num_key_value_heads is not None
        return self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """Size E of one attention head."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a sequence, possibly none."""
        if self.eos_token_id is None:
            return ()
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else self.eos_token_id

    def window(self, layer: int) -> int | None:
        """Positions that layer `layer` may look back over (itself included), or None for full attention."""
        return self.sliding_window if layer in self.swa_layers else None

    @classmethod
    def preset(cls, name: str, **changes: Any) -> LaneConfig:
        """A named size: `2b`, `small` (about 150 M) or `demo` (about 1.5 M), with fields replaced by `changes`."""
        from .presets import PRESETS

        if name not in PRESETS:
            raise ConfigError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
        reject_unknown_keys(changes, [f.name for f in dataclasses.fields(cls)], f"preset {name}")
        return cls(**{**PRESETS[name], **changes})

    @classmethod
    def from_dict(cls, keys: dict[str, Any], source: str = "config.json") -> LaneConfig:
        """A config from config.json keys: the published family, its older one, and the three names of rope scaling."""
        fields = fields_from_json(keys, source, [f.name for f in dataclasses.fields(cls)])
        try:
            if fields.get("rope_scaling") is not None:
                fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
            return cls(**fields)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        except TypeError as error:
            raise ConfigError(f"{source}: a value has the wrong type: {error}") from None

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike) -> LaneConfig:
        """Reads `folder`/config.json; raises ConfigError naming the file and the key at fault."""
        path = Path(folder) / "config.json"
        try:
            keys = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist; a checkpoint folder holds config.json and safetensors") from None
        except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        if not isinstance(keys, dict):
            raise ConfigError(f"{path} holds a {type(keys).__name__}, expected an object of keys")
        return cls.from_dict(keys, str(path))

    def to_dict(self) -> dict[str, Any]:
        """The published config.json keys, loadable by `from_dict`."""
        keys: dict[str, Any] = {"architectures": ["LaneformerForCausalLM"], "model_type": "laneformer"}
        keys |= dataclasses.asdict(self)
        keys["swa_layers"] = list(self.swa_layers)
        if isinstance(self.eos_token_id, tuple):
            keys["eos_token_id"] = list(self.eos_token_id)
        if self.rope_scaling is not None:
            keys["rope_scaling"] = {"rope_type": "llama3", **dataclasses.asdict(self.rope_scaling)}
        if not self.head_norms:
            del keys["head_norms"]
        if self.head_dim == self.hidden_size / self.num_attention_heads:
            del keys["head_dim"]
        return keys

    def replace(self, **changes: Any) -> LaneConfig:
        """A copy with fields replaced, checked again."""
        return dataclasses.replace(self, **changes)
