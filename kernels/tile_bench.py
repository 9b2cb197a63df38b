"""How long does each tile of the persistent kernel take alone, and how many bytes a second does it move?

    python -m laneformer.kernels.tile_bench --preset 2b --ranks 8 --json tiles.json
    TRITON_INTERPRET=1 python -m laneformer.kernels.tile_bench --tiny

Sizes are one rank's share of a config. Every launch uses weights of its own until they exceed the last-level cache, so
that they come from memory, as in decoding. Nothing is overlapped: the persistent kernel has a phase's weights under way
while it waits, a launch alone has not. Shape suffixes: laneformer/decode_ops.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laneformer.config import LaneConfig
from laneformer.kernels import standalone_launches as launches
from laneformer.kernels import standalone_tiles as tiles
from laneformer.kernels.plan import DeviceShape, PlanError
from laneformer.kernels.standalone_launches import Launch, Message

# Copies of small tensors: more would only take time to make.
MOST_COPIES = 64
# Launches between two looks at the clock, so that starting the first of them does not show.
LAUNCHES_TIMED = 24
# AMD's last-level cache is not the one that torch reports; no GPU so far has more.
AMD_CACHE = 256 << 20
# Weights of a layer that the interpreter multiplies in about a second.
INTERPRETED_WEIGHTS = 1 << 20
MOST_POSITIONS = 2048


@dataclass(frozen=True)
class Case:
    """A tile at one size: its name, its shape in words, the bytes it must move, and what prepares a launch of it."""

    tile: str
    shape: str
    bytes: int
    prepare: Callable[[], Launch]


def tiny() -> LaneConfig:
    """A config small enough for the interpreter; nothing in it divides anything."""
    return LaneConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4, head_dim=6,
        intermediate_size=40, vocab_size=53, num_lanes=4, max_position_embeddings=40, sliding_window=20,
        swa_layers=(0,),
    )  # fmt: skip


@dataclass(frozen=True)
class Share:
    """One rank's share of a config, and tensors of its shapes."""

    config: LaneConfig
    ranks: int
    dtype: torch.dtype
    device: torch.device

    @property
    def lanes(self) -> int:
        """Lanes of a rank."""
        return self.config.num_lanes // self.ranks

    def part(self, count: int) -> int:
        """A lane's part of something that the config counts over all lanes."""
        return -(-count // self.config.num_lanes)

    def weight(self, *shape: int) -> Tensor:
        """Random weights."""
        return (torch.randn(shape, device=self.device) * 0.02).to(self.dtype)

    def stream(self, *shape: int) -> Tensor:
        """Random float32 values."""
        return torch.randn(shape, device=self.device)

    def size(self, weights: int, values: int = 0) -> int:
        """Bytes of weights in this type and of float32 values."""
        return weights * self.dtype.itemsize + values * 4


def matrix_cases(s: Share) -> list[Case]:
    """The matrices of a layer and the norm alone."""
    config, lanes, eps = s.config, s.lanes, s.config.norm_eps
    hidden, units = config.hidden_size, s.part(config.intermediate_size)
    rows = (s.part(config.num_attention_heads) + 2 * s.part(config.kv_heads)) * config.head_size
    return [
        Case("rms_norm", f"{lanes} x {hidden}", s.size(hidden, 2 * lanes * hidden),
             lambda: launches.rms_norm(s.stream(lanes, hidden), s.weight(hidden), eps)),
        Case("matvec", f"down: {lanes} x {hidden} x {units}", s.size(lanes * hidden * units, lanes * (hidden + units)),
             lambda: launches.matvec(s.stream(lanes, units), s.weight(lanes, hidden, units))),
        Case("normed_matvec", f"qkv: {lanes} x {rows} x {hidden}",
             s.size(lanes * (rows + 1) * hidden, lanes * (hidden + rows)),
             lambda: launches.normed_matvec(s.stream(lanes, hidden), s.weight(lanes, hidden),
                                            s.weight(lanes, rows, hidden), eps)),
        Case("gated_units", f"gate and up: {lanes} x {2 * units} x {hidden}",
             s.size(lanes * (2 * units + 1) * hidden, lanes * (hidden + units)),
             lambda: launches.gated_units(s.stream(lanes, hidden), s.weight(lanes, hidden),
                                          s.weight(lanes, 2 * units, hidden), eps)),
    ]  # fmt: skip


def attention_cases(s: Share) -> list[Case]:
    """Attention over a full window (or 2,048 positions), and the output projection that combines its blocks."""
    config, lanes, size = s.config, s.lanes, s.config.head_size
    heads, kv_heads, hidden = s.part(config.num_attention_heads), s.part(config.kv_heads), config.hidden_size
    length = min(config.max_position_embeddings, config.sliding_window or MOST_POSITIONS)
    rows, block = (heads + 2 * kv_heads) * size, min(DeviceShape(1).block_positions, launches.power_of_two(length))
    blocks = -(-length // block)
    left = lanes * heads * blocks * (size + 2)

    def attention() -> Launch:
        cache = [s.weight(lanes, kv_heads, length, size) for _ in range(2)]
        angles = s.stream(2, size // 2)
        return launches.decode_attention(s.stream(lanes, rows), *cache, length - 1, *angles, block=block)

    def output() -> Launch:
        parts = s.stream(lanes, heads, blocks, size), s.stream(lanes, heads, blocks, 2).abs()
        return launches.attention_output(*parts, blocks, s.weight(lanes, hidden, heads * size))

    return [
        Case("decode_attention", f"{lanes} x {heads} heads on {kv_heads}, {length} positions of {size}",
             s.size(2 * lanes * kv_heads * length * size, lanes * rows + left), attention),
        Case("attention_output", f"{lanes} x {hidden} x {heads * size}, {blocks} blocks",
             s.size(lanes * hidden * heads * size, left + lanes * hidden), output),
    ]  # fmt: skip


def exchange_cases(s: Share) -> list[Case]:
    """Sums over lanes, and a message from every rank to every rank with all of them on this device (at least two)."""
    config, hidden = s.config, s.config.hidden_size
    ranks = s.ranks if s.ranks > 1 else 2
    lanes = max(1, config.num_lanes // ranks)
    message = Message.of(ranks, lanes)
    sent = sum(len(slots) for slots in message.sent)

    def boxes() -> tuple[Tensor, ...]:
        empty = (message.slots, hidden)
        return tuple(torch.full(empty, -1, dtype=torch.int32, device=s.device) for _ in range(ranks))

    def landing() -> Launch:
        partials, filled = s.stream(ranks, lanes, hidden), boxes()
        launches.post_partials(partials, filled).run()
        return launches.land_partials(partials, filled, False)

    count = config.num_lanes
    return [
        Case("tree_sum", f"{count} x {hidden}", s.size(0, (count + 1) * hidden),
             lambda: launches.tree_sum(s.stream(count, hidden))),
        Case("post_partials", f"{ranks} ranks x {lanes} x {hidden} to each of them",
             s.size(0, (ranks * lanes + ranks * sent) * hidden),
             lambda: launches.post_partials(s.stream(ranks, lanes, hidden), boxes())),
        Case("land_partials", f"{ranks} ranks x {sent} messages x {hidden}",
             s.size(0, ranks * (sent + 1) * hidden), landing),
    ]  # fmt: skip


def ending_cases(s: Share) -> list[Case]:
    """The head's slices with logits to every rank, and the draw."""
    config, hidden, vocab = s.config, s.config.hidden_size, s.config.vocab_size
    rows = s.part(vocab)

    def logits() -> Launch:
        boxes = tuple(torch.full((vocab,), -1, dtype=torch.int32, device=s.device) for _ in range(s.ranks))
        head = s.weight(s.lanes, rows, hidden)
        return launches.post_logits(s.stream(1, hidden), None, head, config.norm_eps, 0, boxes)

    def token() -> Launch:
        seen = torch.zeros(vocab, dtype=torch.int8, device=s.device)
        return launches.draw(s.stream(vocab), seen, 0.8, 50, 0.95, 1.1, 7, 100)

    return [
        Case("post_logits", f"{s.lanes} x {rows} x {hidden} to {s.ranks} ranks",
             s.size(s.lanes * rows * hidden, hidden + s.ranks * s.lanes * rows), logits),
        Case("gumbel", f"{vocab}", vocab * 12,
             lambda: launches.gumbel(torch.arange(vocab, dtype=torch.int32, device=s.device), 7, 100)),
        # Logits in and out of the box, marks, scores and keys each way; what the searches read again is in a cache.
        Case("draw", f"{vocab}, temperature, top-k and top-p", vocab * 45, token),
    ]  # fmt: skip


def cases(config: LaneConfig, ranks: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Every tile of kernels/standalone.py at a rank's sizes. Raises PlanError if the lanes cannot be shared so."""
    if ranks < 1 or config.num_lanes % ranks:
        raise PlanError(f"{config.num_lanes} lanes cannot be shared equally by {ranks} ranks")
    s = Share(config, ranks, dtype, device)
    return [*matrix_cases(s), *attention_cases(s), *exchange_cases(s), *ending_cases(s)]


def interpreted() -> bool:
    """Whether kernels are run by Triton's interpreter, which says nothing about their speed."""
    return "Interpreted" in type(tiles.matrix_rows).__name__


def check_device(config: LaneConfig, device: torch.device) -> None:
    """Raises PlanError where the tiles cannot be run, or not in a reasonable time."""
    if device.type == "cuda":
        return
    if not interpreted():
        raise PlanError(f"triton compiles nothing for {device}; to try the interpreter: TRITON_INTERPRET=1 ... --tiny")
    weights = 3 * config.hidden_size * config.intermediate_size
    if weights > INTERPRETED_WEIGHTS:
        raise PlanError(
            f"Triton's interpreter would take minutes for {weights} weights of a layer's feed-forward part, at most "
            f"{INTERPRETED_WEIGHTS} are measured with it; give --tiny to try this without a GPU"
        )


def cache_bytes(device: torch.device) -> int:
    """Bytes of a device's last-level cache, 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    own = int(torch.cuda.get_device_properties(device).L2_cache_size)
    return max(own, AMD_CACHE) if torch.version.hip is not None else own


def interpreted_times(prepared: list[Launch], rounds: int) -> list[float]:
    """Microseconds a launch, once a round."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        for launch in prepared:
            launch.run()
        found.append((time.perf_counter() - start) * 1e6 / len(prepared))
    return found


def gpu_times(prepared: list[Launch], rounds: int, device: torch.device) -> list[float]:
    """Microseconds a launch, once a round: a graph of all launches, so that the host's own time does not show."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Kernels are compiled and loaded here, which a capture does not allow.
            for launch in prepared:
                launch.run()
        torch.cuda.synchronize()
        turns = -(-LAUNCHES_TIMED // len(prepared))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in prepared * turns:
                launch.run()
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        found = []
        for _ in range(rounds):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3 / (turns * len(prepared)))
    return found


def measure(case: Case, device: torch.device, rounds: int) -> dict[str, Any]:
    """One tile's row; `cold`: the copies together are more than twice the last-level cache."""
    cache = cache_bytes(device)
    copies = min(MOST_COPIES, 2 + 2 * cache // case.bytes)
    prepared = [case.prepare() for _ in range(copies)]
    on_gpu = device.type == "cuda"
    times = gpu_times(prepared, rounds, device) if on_gpu else interpreted_times(prepared, rounds)
    median = statistics.median(times)
    row = {
        "tile": case.tile, "shape": case.shape, "bytes": case.bytes, "copies": copies,
        "cold": copies * case.bytes > 2 * cache, "rounds": rounds, "median_us": median, "low_us": min(times),
        "high_us": max(times), "gb_per_s": case.bytes / median / 1e3,
    }  # fmt: skip
    return row if on_gpu else {**row, "interpreted": True}


def bench_tiles(
    config: LaneConfig, dtype: torch.dtype, device: torch.device | str, rounds: int, ranks: int = 1
) -> list[dict[str, Any]]:
    """Times each stand-alone tile at the sizes of one of `ranks` ranks: a row of numbers for each.

    A row has the tile, its shape, bytes moved, copies rotated, microseconds (median, lowest and highest of `rounds`)
    and GB/s; rows of the interpreter say so under `interpreted`, and are no speeds. Raises PlanError as `check_device`
    does.
    """
    where = torch.device(device)
    if rounds < 1:
        raise PlanError(f"rounds must be at least 1, got {rounds}")
    check_device(config, where)
    return list(measured_tiles(config, dtype, where, rounds, ranks))


def measured_tiles(
    config: LaneConfig, dtype: torch.dtype, device: torch.device, rounds: int, ranks: int
) -> Iterator[dict[str, Any]]:
    """The rows of `bench_tiles`, each as soon as it is measured."""
    for case in cases(config, ranks, dtype, device):
        yield measure(case, device, rounds)


def line_of(row: dict[str, Any]) -> str:
    """A row as a line of a table."""
    note = "  interpreted: no speed" if row.get("interpreted") else "" if row["cold"] else "  from the cache"
    return (
        f"{row['tile']:17} {row['median_us']:10.2f} us ({row['low_us']:.2f} to {row['high_us']:.2f}) "
        f"{row['gb_per_s']:9.1f} GB/s {row['bytes'] / 1e6:9.3f} MB  {row['shape']}{note}"
    )


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Writes beside the file and renames, so that no half of it is ever there."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def arguments(given: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m laneformer.kernels.tile_bench", description=(__doc__ or "").split("\n")[0]
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--preset", default="2b", help="a named size of laneformer/presets.py (default 2b)")
    size.add_argument(
        "--tiny", action="store_true", help="sizes for Triton's interpreter: shows that it runs, no speed"
    )
    parser.add_argument("--ranks", type=int, default=1, help="ranks that share the lanes; one is measured (default 1)")
    parser.add_argument("--dtype", help="of the weights: bfloat16, float16, float32 (default: the preset's)")
    parser.add_argument("--rounds", type=int, default=20, help="times each measurement is taken (default 20)")
    parser.add_argument("--device", help="default: the first GPU, or the CPU under TRITON_INTERPRET=1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    return parser.parse_args(given)


def dtype_of(name: str) -> torch.dtype:
    """A weight type by name; raises PlanError."""
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in known:
        raise PlanError(f"no weight type {name!r}; there are {', '.join(known)}")
    return known[name]


def device_of(name: str | None) -> torch.device:
    """A device by name, or the first GPU, or the CPU; raises PlanError."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise PlanError(f"no device {name!r}; give cuda, cuda:1, ... or cpu") from None
    if device.type not in ("cuda", "cpu") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise PlanError(f"there is no {device} here; leave --device out, and give --tiny to try this without a GPU")
    return device


def main(given: list[str] | None = None) -> int:
    """Prints the table; 2 with a message for input that cannot be used."""
    options = arguments(given)
    try:
        config = tiny() if options.tiny else LaneConfig.preset(options.preset)
        dtype = dtype_of(options.dtype or config.torch_dtype)
        device = device_of(options.device)
        if options.json and not options.json.absolute().parent.is_dir():
            raise PlanError(f"the folder of {options.json} does not exist")
        if options.rounds < 1:
            raise PlanError(f"rounds must be at least 1, got {options.rounds}")
        check_device(config, device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
        print(f"{name}, {str(dtype).removeprefix('torch.')}, one of {options.ranks} ranks", flush=True)
        preset = "tiny" if options.tiny else options.preset
        about = {"device": name, "dtype": str(dtype), "preset": preset, "ranks": options.ranks}
        rows: list[dict[str, Any]] = []
        for row in measured_tiles(config, dtype, device, options.rounds, options.ranks):
            rows.append(row)
            print(line_of(row), flush=True)
            if options.json:
                # After every tile, so that one that fails does not take the others with it.
                write_json(options.json, {**about, "tiles": rows})
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # What a GPU's driver and its memory say; only the first line is for users.
    except RuntimeError as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
