"""What the steps of the check share: options, sizes for a GPU or for a rehearsal, random weights, launches, JSON.

A rehearsal (--tiny) runs on Triton's interpreter, which TRITON_INTERPRET=1 in the environment chooses.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from golden_cases import CASES as CASES
from golden_cases import GOLDEN as GOLDEN
from torch import Tensor

from laneformer.config import LaneConfig
from laneformer.infer.weights import Packing, RankWeights
from laneformer.terminal import write_json

SCHEDULES = ("tensor-parallel", "delayed:4", "silent")


@dataclass(frozen=True)
class Sizes:
    """What is measured: the model, and how much of everything."""

    config: LaneConfig
    dtype: torch.dtype
    device: torch.device
    programs: int
    tokens: int
    rounds: int
    position: int
    capacity: int
    tiny: bool


def arguments(about: str | None, *more: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    """The command line of a step."""
    parser = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on Triton's interpreter, without times")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--compile-only", action="store_true", help="only fill Triton's cache on disk")
    for name, how in more:
        parser.add_argument(name, **how)
    return parser.parse_args()


def sizes(tiny: bool) -> Sizes:
    """The 2B in float16 on a GPU, or a model of a few hundred weights."""
    if tiny != (os.environ.get("TRITON_INTERPRET") == "1"):
        sys.exit("--tiny and TRITON_INTERPRET=1 in the environment go together")
    if tiny:
        config = LaneConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8, head_dim=4,
            intermediate_size=40, vocab_size=64, num_lanes=8, max_position_embeddings=64, sliding_window=20,
            swa_layers=(0,),
        )  # fmt: skip
        return Sizes(config, torch.float32, torch.device("cpu"), 1, 3, 2, 5, 32, True)
    if not torch.cuda.is_available():
        sys.exit("this check needs a GPU that torch can use; --tiny rehearses it without one")
    device = torch.device("cuda", 0)
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    return Sizes(LaneConfig.preset("2b"), torch.float16, device, programs, 128, 7, 1024, 1280, False)


def random_weights(s: Sizes, lanes: Sequence[int]) -> RankWeights:
    """A rank's packed weights with random values, made where they are used."""
    config = s.config
    hidden, head, total, count = config.hidden_size, config.head_size, config.num_lanes, len(lanes)
    random = torch.Generator(device=s.device).manual_seed(1)

    def matrix(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=random, device=s.device, dtype=torch.float32)
        return (values / shape[-1] ** 0.5).to(s.dtype)

    rows = {
        "wq": config.num_attention_heads * head // total, "wk": config.kv_heads * head // total,
        "wv": config.kv_heads * head // total, "w1": config.intermediate_size // total,
        "w3": config.intermediate_size // total,
    }  # fmt: skip
    columns = {"wo": config.num_attention_heads * head // total, "w2": config.intermediate_size // total}

    def read(name: str) -> Tensor:
        part = name.split(".")[1]
        if part in rows:
            return matrix(count, rows[part], hidden)
        if part in columns:
            return matrix(count, hidden, columns[part])
        return torch.ones(hidden, dtype=s.dtype, device=s.device)

    packing = Packing(config, count, s.dtype, s.device)
    embedding = matrix(config.vocab_size, hidden) * hidden**0.5
    layers = tuple(packing.layer(read) for _ in range(config.num_hidden_layers))
    norm = torch.ones(hidden, dtype=s.dtype, device=s.device).expand(count, hidden)
    parts = matrix(count, -(-config.vocab_size // total), hidden).unbind(0)
    return RankWeights(config, tuple(lanes), embedding, layers, norm, parts)


def run_kernel(kernel: Any, programs: int, args: tuple[Any, ...], constants: dict[str, Any], names: Any = None) -> None:
    """Launches a kernel whose programs wait for each other: all resident on a GPU, else under the simulator."""
    if torch.cuda.is_available() and "--tiny" not in sys.argv:
        kernel[(programs,)](*args, **constants, num_warps=8, num_stages=1, launch_cooperative_grid=True)
        return
    from laneformer.kernels.simulate import Launch, simulate

    simulate([Launch(kernel, (programs,), args, constants)], names=names or {})


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, lowest and highest; None in a rehearsal, whose times mean nothing."""
    if "--tiny" in sys.argv:
        return None
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def speeds(us: dict[str, float] | None, streamed: int, bandwidth: float | None) -> dict[str, float]:
    """Tokens a second, GB/s of weights, and their share of the measured bandwidth (bytes a second)."""
    if us is None or bandwidth is None:
        return {}
    rate = streamed / us["median"] * 1e6
    return {"tokens_per_s": 1e6 / us["median"], "gb_per_s": rate / 1e9, "share_of_bandwidth": rate / bandwidth}


def save(path: Path | None, found: Any) -> None:
    """Writes a step's results, if asked, and says so."""
    if path is not None:
        write_json(found, path)
