"""How fast this machine reads memory: the same weights that decoding streams, read and nothing else."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from laneformer.infer.weights import RankWeights

# Far more than any last-level cache of a GPU.
GPU_READ_BYTES = 2 << 30


def streamed(weights: RankWeights) -> list[Tensor]:
    """The matrices that decoding one token reads on this rank."""
    layers = [t for w in weights.layers for t in (w.qkv_LOI, w.out_LOI, w.gate_up_LOI, w.down_LOI)]
    return [*layers, *weights.head_L]


def read_weights(weights: RankWeights) -> float:
    """Seconds to read every streamed matrix once, as a sum of 64-bit integers (the cheapest thing to do with it).

    On a GPU, whose small sums would measure how fast they start, it is the same bytes at the bandwidth of a large sum.
    """
    if weights.device.type != "cpu":
        return weights.streamed_bytes / device_bandwidth(weights.device)
    tensors = [t.view(torch.int64) if t.element_size() * t.shape[-1] % 8 == 0 else t for t in streamed(weights)]
    began = time.perf_counter()
    for tensor in tensors:
        tensor.sum()
    return time.perf_counter() - began


def device_bandwidth(device: torch.device, size: int = GPU_READ_BYTES, rounds: int = 5) -> float:
    """Bytes a second that a GPU reads from its memory, the best of some sums over `size` bytes (less if it is full)."""
    free, _ = torch.cuda.mem_get_info(device)
    data = torch.ones(min(size, free // 2) // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        data.sum()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e-3)
    return data.numel() * data.element_size() / best


def measure_bandwidth(size: int = 512 << 20, rounds: int = 5) -> float:
    """Bytes a second that this process reads from memory, the best of some rounds over `size` bytes."""
    data = torch.ones(size // 8, dtype=torch.int64)
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - began)
    return size / best
