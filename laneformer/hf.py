"""The lane model as a transformers model: AutoModelForCausalLM, generate, Trainer, and folders that carry their code.

The file works both as `laneformer.hf` and, copied beside the weights by `export`, as a checkpoint's remote code.
Shape suffixes: L lanes, B batch, S new positions, T all positions, D hidden, K key-value heads of a lane, E head size,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import LaneConfig
from .config_json import BOOKKEEPING
from .hf_export import export, rope_parameters
from .lanes import InProcess
from .model import Laneformer, final_streams
from .modules import Head, LaneNorm, LaneWeight
from .view import View, turns

try:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        DynamicCache,
        GenerationConfig,
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
    )
    from transformers.cache_utils import Cache
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.utils import can_return_tuple
except ImportError as error:
    raise ImportError(
        f"laneformer.hf needs transformers 5 or later ({error}); install it with: pip install 'laneformer[hf]'"
    ) from error

__all__ = ["LaneformerConfig", "LaneformerForCausalLM", "export"]

# Keys that transformers gives a meaning of its own; all others must be the architecture's.
THEIRS = BOOKKEEPING | {
    "dtype", "torch_dtype", "num_labels", "experts_implementation", "quantization_config", "per_layer_config",
}  # fmt: skip
# Bytes that PyTorch's own storage on a CPU is aligned to.
ALIGNMENT = 64
# Fields that transformers keeps under names or in forms of its own.
RENAMED = ("rope_theta", "rope_scaling", "torch_dtype")
# transformers is renaming past_key_values to cache: older releases of 5 have the one, newer ones the other.
CACHE_FIELD = "cache" if "cache" in {f.name for f in dataclasses.fields(CausalLMOutputWithPast)} else "past_key_values"


class LaneformerConfig(PreTrainedConfig):
    """The published config.json keys as transformers holds them; `lane_config()` gives them back checked.

    Raises ConfigError (a ValueError) for keys that are missing, unknown or cannot work together.
    """

    model_type = "laneformer"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    # The sizes have no defaults, so transformers must not build an empty config to compare with.
    has_no_defaults_at_init = True

    def __init__(self, **keys: Any) -> None:
        known = THEIRS | set(PreTrainedConfig().to_dict()) | set(GenerationConfig().to_dict())
        known -= {"model_type", "bos_token_id", "eos_token_id", "pad_token_id"}
        theirs = {key: keys.pop(key) for key in list(keys) if key in known or key.startswith("_")}
        lane = LaneConfig.from_dict(keys)
        dtype = theirs.pop("dtype", None) or theirs.pop("torch_dtype", None)
        use_cache = theirs.pop("use_cache", True)
        ours = {f.name: getattr(lane, f.name) for f in dataclasses.fields(lane) if f.name not in RENAMED}
        ours["swa_layers"] = list(lane.swa_layers)
        ours["eos_token_id"] = list(lane.eos_ids) if isinstance(lane.eos_token_id, tuple) else lane.eos_token_id
        ours["rope_parameters"] = rope_parameters(lane)
        super().__init__(**theirs, **ours, dtype=dtype or lane.torch_dtype)
        # Set last: transformers drops what it takes for a parameter of generation.
        self.use_cache = use_cache

    def lane_config(self) -> LaneConfig:
        """The same as a LaneConfig, checked again, since attributes may have been set in between."""
        names = [f.name for f in dataclasses.fields(LaneConfig) if f.name not in RENAMED]
        keys = {name: getattr(self, name) for name in (*names, "rope_parameters")}
        return LaneConfig.from_dict({**keys, "dtype": str(self.dtype).removeprefix("torch.")}, "LaneformerConfig")

    @property
    def layer_types(self) -> list[str]:
        """Each layer's kind of attention, by which transformers sizes its caches; a property, so never saved."""
        kinds = ("full_attention", "sliding_attention")
        return [kinds[i in self.swa_layers] for i in range(self.num_hidden_layers)]


class HFView(View):
    """The view of a forward pass over a transformers cache, which holds the lanes' heads side by side: [B, L*K, T, E].

    mask_BT [B, T] is 1 where a slot holds a token; positions_BS, where given, are what rope turns by.
    """

    def __init__(
        self,
        config: LaneConfig,
        x_BSD: Tensor,
        cache: Cache | None,
        mask_BT: Tensor | None,
        positions_BS: Tensor | None,
    ) -> None:
        batch, count = x_BSD.shape[:2]
        # A static cache counts in a tensor, so that a compiled step is compiled once.
        start: Any = 0 if cache is None else cache.get_seq_length()
        self.config, self.hf_cache, self.documents_BS = config, cache, None
        self.slots_S = torch.arange(count, device=x_BSD.device) + start
        self.valid_BT = None if mask_BT is None else _checked_mask(mask_BT, batch, start, count)
        positions = self.slots_S[None] if positions_BS is None else positions_BS
        if positions_BS is None and self.valid_BT is not None:
            positions = (self.valid_BT.long().cumsum(1) - 1).clamp_min(0)[:, self.slots_S]
        self.cos, self.sin = turns(config, positions, x_BSD.dtype)
        self._masks = {}

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and mask a layer attends to, the new positions stored in the transformers cache."""
        if self.hf_cache is None:
            return k, v, self.mask(layer, self.slots_S)
        lanes = k.shape[0]
        k_BJTE, v_BJTE = self.hf_cache.update(k.movedim(0, 1).flatten(1, 2), v.movedim(0, 1).flatten(1, 2), layer)
        count = k_BJTE.shape[2]
        # Growing and rolling layers end with the newest position; storage not yet full begins with position 0.
        first = (self.slots_S[-1] + 1 - count).clamp_min(0)
        key_T = first + torch.arange(count, device=k.device)
        k, v = (kv_BJTE.unflatten(1, (lanes, -1)).movedim(1, 0) for kv_BJTE in (k_BJTE, v_BJTE))
        return k, v, self.mask(layer, key_T)


def _checked_mask(mask_BT: Tensor, batch: int, start: Any, count: int) -> Tensor:
    """The mask as bool [B, T]; raises ValueError for other shapes (a static cache's T is left to its caller)."""
    wrong = mask_BT.dim() != 2 or mask_BT.shape[0] != batch or mask_BT.shape[1] < count
    if wrong or (isinstance(start, int) and mask_BT.shape[1] != start + count):
        raise ValueError(
            f"attention_mask is {list(mask_BT.shape)}, expected [{batch}, {int(start) + count}]: one row for each "
            f"sequence, one column for each cached position ({int(start)}) and each new one ({count})"
        )
    return mask_BT.bool()


class LaneformerForCausalLM(PreTrainedModel, GenerationMixin):
    """The lane model with transformers' interface; its state dict has the published keys and shapes.

    Config and weights are checked as `Laneformer` checks them. Attention is always
    torch.nn.functional.scaled_dot_product_attention, whatever attn_implementation says.
    """

    config_class = LaneformerConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    # Layers read their weights directly, past the hooks that would carry them between devices.
    _no_split_modules = ["Trunk"]

    def __init__(self, config: LaneformerConfig) -> None:
        super().__init__(config)
        lanes = Laneformer(config.lane_config())
        self.lane_config, self.schedule = lanes.config, lanes.schedule
        self.model, self.lm_head = lanes.model, lanes.lm_head
        if self.lane_config.tie_word_embeddings:
            # The head reads the embedding and has no weight of its own; a file may hold a copy of it.
            self._keys_to_ignore_on_load_unexpected = [r"^lm_head\.weight$"]
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own; on a CPU the weights are then copied out of the mapped file.

        A matrix product's last bits depend on where in memory its operands begin, and in a file that depends on the
        length of the header: the same weights give the same bits only from storage of their own.
        """
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for parameter in model.parameters():
            if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNMENT:
                parameter.data = parameter.data.clone()
        return loaded

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, LaneWeight | LaneNorm | Head):
            module.reset_parameters()

    def get_input_embeddings(self) -> LaneWeight:
        """The module whose `weight` [V, D] is the embedding."""
        return self.model.tok_embeddings

    def set_input_embeddings(self, value: LaneWeight) -> None:
        """Replaces the module whose `weight` [V, D] is the embedding."""
        self.model.tok_embeddings = value

    def get_output_embeddings(self) -> nn.Module:
        """The module whose `weight` is the head's: the embedding's where they are tied."""
        return self.model.tok_embeddings if self.lane_config.tie_word_embeddings else self.lm_head

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The mask [B, T] as it is: each layer's view combines it with its own window and cache."""
        return attention_mask

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, S, V] of input_ids [B, S] (or of inputs_embeds [B, S, D]), and the loss where labels are given.

        attention_mask [B, T] is 1 for tokens and 0 for left padding, over the cached positions and the new ones;
        labels [B, S] are shifted here and -100 is ignored; logits_to_keep counts positions from the end, 0 for all.
        `cache` and `past_key_values` are two names of one argument. Raises ValueError for shapes that do not fit.
        """
        if cache is not None and past_key_values is not None:
            raise ValueError("cache and past_key_values are two names of one argument; give one of them")
        _refuse_intermediates(kwargs)
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=self.config)
        embedding_VD = self.model.tok_embeddings.weight
        x_BSD = _first_rows(input_ids, inputs_embeds, embedding_VD)
        view = HFView(self.lane_config, x_BSD, cache, attention_mask, position_ids)
        lanes, exchange = self.lane_config.num_lanes, InProcess()
        x_LBSD = x_BSD.expand(lanes, *x_BSD.shape)
        x_LBSD = final_streams(self.model, self.schedule, lanes, x_LBSD, view, exchange)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x_LBSD[:, :, kept], self.model.norm, embedding_VD, exchange)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        fields: dict[str, Any] = {"loss": loss, "logits": logits, CACHE_FIELD: cache}
        return CausalLMOutputWithPast(**fields)


def _first_rows(input_ids: Tensor | None, inputs_embeds: Tensor | None, embedding_VD: Tensor) -> Tensor:
    """What every lane's stream begins with, [B, S, D]; raises ValueError unless one of the two is given."""
    if input_ids is not None and inputs_embeds is None:
        return F.embedding(input_ids, embedding_VD)
    if inputs_embeds is not None and input_ids is None:
        return inputs_embeds
    raise ValueError(f"give one of input_ids and inputs_embeds, got {'none' if input_ids is None else 'both'} of them")


def _refuse_intermediates(kwargs: dict[str, Any]) -> None:
    """Raises ValueError where lanes leave nothing of the shape transformers promises."""
    for name in ("output_hidden_states", "output_attentions"):
        if kwargs.pop(name, None):
            raise ValueError(f"{name} is not available: every lane has a stream of its own, none is [B, S, D]")


if __name__ == "laneformer.hf":
    # A copy loaded as remote code is found through its config.json and must not take the installed one's place.
    AutoConfig.register("laneformer", LaneformerConfig, exist_ok=True)
    AutoModelForCausalLM.register(LaneformerConfig, LaneformerForCausalLM, exist_ok=True)
