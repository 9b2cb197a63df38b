"""The key-value cache: full layers keep every position, window layers a ring of the last `window` positions.

Shape suffixes: L lanes (of this process), B batch, K key-value heads of a lane, S new positions, T cached, E head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import LaneConfig


class KVCache:
    """Keys and values of the positions seen so far, for `lanes` lanes and `batch` sequences of equal length.

    `capacity` positions fit in full layers; a window layer holds at most its window. `pad_B` counts left padding per
    sequence, as given to the model with the first tokens. Raises ValueError when more than `capacity` are written.
    """

    def __init__(
        self,
        config: LaneConfig,
        capacity: int,
        batch: int = 1,
        lanes: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        lanes = config.num_lanes if lanes is None else lanes
        self.capacity = capacity
        self.length = 0
        self.valid_BT: Tensor | None = None
        kv_heads = config.kv_heads // config.num_lanes
        self.windows = [config.window(i) for i in range(config.num_hidden_layers)]
        sizes = [capacity if window is None else min(window, capacity) for window in self.windows]
        shape = (lanes, batch, kv_heads)
        self.k = [torch.zeros(*shape, size, config.head_size, dtype=dtype, device=device) for size in sizes]
        self.v = [torch.zeros_like(k) for k in self.k]

    @property
    def batch(self) -> int:
        """Sequences B."""
        return self.k[0].shape[1]

    def room_for(self, count: int) -> None:
        """Raises ValueError when `count` more positions do not fit."""
        if self.length + count > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} positions; {self.length} are used and {count} more came")

    def append(self, layer: int, k_LBKSE: Tensor, v_LBKSE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Stores new positions `length`.. of a layer; returns the keys and values to attend to and their positions.

        `length` itself moves on only with `advance`, once all layers have stored. Key positions are int64 [T],
        negative where a ring slot is still empty.
        """
        count, start, size = k_LBKSE.shape[3], self.length, self.k[layer].shape[3]
        k, v, device = self.k[layer], self.v[layer], k_LBKSE.device
        if size == self.capacity:
            self._write(layer, torch.arange(start, start + count, device=device), k_LBKSE, v_LBKSE)
            end = start + count
            return k[:, :, :, :end], v[:, :, :, :end], torch.arange(end, device=device)
        if count == 1:
            self._write(layer, torch.tensor([start % size], device=device), k_LBKSE, v_LBKSE)
            return k, v, ring_positions(start, size, device)
        before = torch.arange(max(0, start - size), start, device=device)
        new = torch.arange(start, start + count, device=device)
        keys = torch.cat((k[:, :, :, before % size], k_LBKSE), 3)
        values = torch.cat((v[:, :, :, before % size], v_LBKSE), 3)
        kept = new[-size:]
        self._write(layer, kept % size, k_LBKSE[:, :, :, -size:], v_LBKSE[:, :, :, -size:])
        return keys, values, torch.cat((before, new))

    def _write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.k[layer].index_copy_(3, slots, k.to(self.k[layer].dtype))
        self.v[layer].index_copy_(3, slots, v.to(self.v[layer].dtype))

    def advance(self, count: int) -> None:
        """Counts `count` positions as seen."""
        self.length += count

    def reset(self) -> None:
        """Forgets every position; the storage stays. Old values are masked, never read."""
        self.length = 0
        self.valid_BT = None

    def truncate(self, length: int) -> None:
        """Forgets the positions from `length` on; refused where a ring has already overwritten what came before."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot cut the cache to {length} positions, it holds {self.length}")
        ring = min((k.shape[3] for k in self.k), default=self.capacity)
        if length < self.length and ring < self.capacity and self.length > ring:
            raise ValueError(f"a window of {ring} positions has been overwritten; the cache cannot be cut to {length}")
        self.length = length
        if self.valid_BT is not None:
            self.valid_BT = self.valid_BT[:, :length]

    def reorder(self, rows_B: Tensor) -> None:
        """Makes row b hold what row rows_B[b] held (beam search)."""
        for layer in range(len(self.k)):
            self.k[layer] = self.k[layer].index_select(1, rows_B)
            self.v[layer] = self.v[layer].index_select(1, rows_B)
        if self.valid_BT is not None:
            self.valid_BT = self.valid_BT.index_select(0, rows_B)


def ring_positions(newest: int | Tensor, size: int, device: torch.device | None = None) -> Tensor:
    """The position each slot of a full-length ring holds once `newest` is written, negative where empty, int64 [T]."""
    slots = torch.arange(size, device=device)
    return newest - (newest - slots) % size
