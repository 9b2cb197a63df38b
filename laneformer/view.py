"""What the attention of one forward pass sees: positions, rope tables, masks and the cache.

Shape suffixes: B batch, S new positions, T all positions so far, E head size, K key-value heads, L lanes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .cache import KVCache
from .config import LaneConfig


class View:
    """What the attention of one forward pass sees: rope tables, masks, and the cache if there is one."""

    def __init__(
        self,
        config: LaneConfig,
        x_BS: Tensor,
        dtype: torch.dtype,
        cache: KVCache | None,
        mask: Tensor | None,
        documents_BS: Tensor | None = None,
    ):
        if documents_BS is not None and (cache is not None or mask is not None or documents_BS.shape != x_BS.shape):
            raise ValueError(
                f"documents are {list(documents_BS.shape)} for tokens {list(x_BS.shape)}; they must be of one shape, "
                "and are for training: neither cache nor attention_mask goes with them"
            )
        self.documents_BS = documents_BS
        batch, count = x_BS.shape
        device = x_BS.device
        start = 0 if cache is None else cache.length
        self.config, self.cache = config, cache
        self.slots_S = torch.arange(start, start + count, device=device)
        self.valid_BT = self._valid(mask, batch, start, count)
        positions = self.slots_S[None]
        if self.valid_BT is not None:
            positions = (self.valid_BT.long().cumsum(1) - 1).clamp_min(0)[:, start:]
        self.cos, self.sin = turns(config, positions, dtype)
        self._masks: dict[int | None, Tensor] = {}

    def _valid(self, mask: Tensor | None, batch: int, start: int, count: int) -> Tensor | None:
        """Which slots hold real tokens, bool [B, T], from the caller's mask and the cache's; None when all do."""
        known = None if self.cache is None else self.cache.valid_BT
        if mask is None and known is None:
            return None
        device = self.slots_S.device
        if mask is not None and mask.shape == (batch, start + count):
            valid = mask.bool()
        elif mask is not None and mask.shape != (batch, count):
            raise ValueError(
                f"attention_mask is {list(mask.shape)}, expected [{batch}, {start + count}] or [{batch}, {count}]"
            )
        else:
            before = torch.ones(batch, start, dtype=torch.bool, device=device) if known is None else known
            now = torch.ones(batch, count, dtype=torch.bool, device=device) if mask is None else mask.bool()
            valid = torch.cat((before, now), 1)
        if self.cache is not None:
            self.cache.valid_BT = valid
        return valid

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and mask (None for plain causal) a layer attends to, the new positions stored."""
        if self.cache is not None:
            k, v, key_T = self.cache.append(layer, k, v)
            return k, v, self.mask(layer, key_T)
        window = self.config.window(layer)
        everything = window is None or window >= len(self.slots_S)
        if everything and self.valid_BT is None and self.documents_BS is None:
            return k, v, None
        return k, v, self.mask(layer, self.slots_S)

    def mask(self, layer: int, key_T: Tensor) -> Tensor:
        """What the new positions of a layer see of the keys at positions key_T, bool; formed once for each window."""
        window = self.config.window(layer)
        if window not in self._masks:
            self._masks[window] = self._mask(key_T, window)
        return self._masks[window]

    def _mask(self, key_T: Tensor, window: int | None) -> Tensor:
        seen = ops.visible(self.slots_S, key_T, window)
        if self.documents_BS is not None:
            return (seen & (self.documents_BS[:, :, None] == self.documents_BS[:, None, :]))[:, None]
        if self.valid_BT is None:
            return seen
        # A key outside the known slots (an empty ring slot, storage not yet written) is unseen already.
        seen = seen & self.valid_BT[:, key_T.clamp(0, self.valid_BT.shape[1] - 1)][:, None]
        # A padded query sees itself only, so that its row has a defined softmax; nothing reads its result.
        itself = self.slots_S[:, None] == key_T[None, :]
        return (seen | itself)[:, None]


def turns(config: LaneConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [1, B, 1, S, E/2] that turn queries and keys at `positions` [B, S] (or [1, S] for all sequences)."""
    scaling = config.rope_scaling
    freq = ops.rope_frequencies(
        config.head_size,
        config.rope_theta,
        None if scaling is None else (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor,
                                      scaling.original_max_position_embeddings),
        positions.device,
    )  # fmt: skip
    cos, sin = ops.rope_tables(positions, freq, dtype)
    return cos[None, :, None], sin[None, :, None]
