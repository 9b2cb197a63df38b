"""Which kernels are there, and at which sizes are they compiled for the table of registers and spills?

ENTRIES is the whole list; experiments/005_compiled_code writes the table. Sizes are a rank's share of the 2b
preset.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from laneformer.config import LaneConfig
from laneformer.kernels.compiled import Entry
from laneformer.kernels.plan import DeviceShape, Plan
from laneformer.schedule import Schedule

# Arguments of decode that are neither compile-time constants nor int64 addresses.
DECODE_TYPES = {
    "launch": "*i64", "ranks": "*i64", "knobs": "*fp64", "stops": "*i32", "schedule": "*i32", "own": "*fp32",
    "lane_slot": "*i32", "slot_lane": "*i32", "cos": "*fp32", "sin": "*fp32", "eps": "fp32",
}  # fmt: skip


def shapes_only(config: LaneConfig, lanes: tuple[int, ...]) -> Any:
    """Weights of a rank that have shapes and strides but no memory, as kernels/buffers.py reads them."""
    import torch

    # As infer/weights.py packs them for GPUs: an output matrix's lanes lie column beside column.
    def empty(*shape: int) -> Any:
        return torch.empty(shape, device="meta", dtype=torch.bfloat16)

    width = config.hidden_size
    heads, kv_heads = config.num_attention_heads // config.num_lanes, config.kv_heads // config.num_lanes
    units, size, count = config.intermediate_size // config.num_lanes, config.head_size, len(lanes)
    layer = SimpleNamespace(
        attention_norm_LD=empty(count, width), qkv_LOI=empty(count, (heads + 2 * kv_heads) * size, width),
        out_LOI=empty(width, count, heads * size).transpose(0, 1), ffn_norm_LD=empty(count, width),
        gate_up_LOI=empty(count, 2 * units, width), down_LOI=empty(width, count, units).transpose(0, 1),
        q_norm_E=None, k_norm_E=None,
    )  # fmt: skip
    rows = -(-config.vocab_size // config.num_lanes)
    return SimpleNamespace(
        lanes=lanes, embedding_VD=empty(config.vocab_size, width), layers=[layer] * config.num_hidden_layers,
        norm_LD=empty(count, width), head_L=tuple(empty(rows, width) for _ in lanes),
    )  # fmt: skip


def decode_2b(target: str, ranks: int, programs: int, tile: int, warps: int) -> Entry:
    """The whole decode of the 2b preset on one of `ranks` devices with `programs` programs each."""
    return decode_of(target, "2b", ranks, DeviceShape(programs, tile=tile), 2048, warps)


def decode_of(target: str, preset: str, ranks: int, device: DeviceShape, context: int, warps: int = 8) -> Entry:
    """The whole decode of a preset on one of `ranks` devices, with a cache of `context` positions."""
    # Kernels are decorated when they are imported, so not before TRITON_INTERPRET has been looked at.
    from laneformer.kernels.buffers import constants
    from laneformer.kernels.decode import decode

    config = LaneConfig.preset(preset)
    plan = Plan(config, Schedule.from_config(config), ranks, device, context)
    weights = shapes_only(config, tuple(range(config.num_lanes // ranks)))
    sizes = constants(plan, weights, amd=target.startswith("gfx"))
    return Entry(decode, DECODE_TYPES, sizes, warps=warps, buffer_ops=False)


# Functions of kernels/standalone.py.
TILES = (
    "rms_norm", "matvec", "normed_matvec", "gated_units", "decode_attention", "attention_output", "tree_sum",
    "post_partials", "land_partials", "post_logits", "gumbel", "draw",
)  # fmt: skip


def type_of(value: Any) -> str:
    """An argument's type as triton writes it."""
    import torch

    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
             torch.int8: "i8", torch.int32: "i32", torch.int64: "i64"}  # fmt: skip
    if isinstance(value, torch.Tensor):
        return f"*{names[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def tile_2b(target: str, tile: str, ranks: int) -> Entry:
    """A stand-alone tile at the sizes of one of `ranks` ranks of the 2b preset, as kernels/tile_bench.py has it."""
    import torch

    from laneformer.kernels.standalone_launches import WARPS
    from laneformer.kernels.tile_bench import cases

    sized = cases(LaneConfig.preset("2b"), ranks, torch.bfloat16, torch.device("meta"))
    launch = next(case for case in sized if case.tile == tile).prepare()
    constants = dict(launch.constants)
    if "AMD" in constants:
        constants["AMD"] = target.startswith("gfx")
    types = [type_of(value) for value in launch.arguments]
    signature = dict(zip(launch.kernel.arg_names[: len(types)], types, strict=True))
    return Entry(launch.kernel, signature, constants, warps=WARPS, buffer_ops=False)


# By name, from a target to what is compiled for it.
ENTRIES: dict[str, Callable[[str], Entry]] = {
    "decode of the 2b on 1 of 8 devices, 8 warps": lambda target: decode_2b(target, 8, 132, 16384, 8),
    "decode of the 2b on 1 device, 8 warps": lambda target: decode_2b(target, 1, 132, 16384, 8),
    **{f"{tile} of the 2b on 1 of 8 devices": partial(tile_2b, tile=tile, ranks=8) for tile in TILES},
}
