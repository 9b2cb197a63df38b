"""From tensors to one launch of a stand-alone kernel: what it is given, how many programs, and what it leaves.

A launch is prepared once and may run many times, which is what timing needs. Functions have the names and arguments of
kernels/standalone.py. Shape suffixes: laneformer/decode_ops.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from laneformer.kernels import memory as mem
from laneformer.kernels import standalone_tiles as tiles
from laneformer.kernels.buffers import draw_sizes
from laneformer.kernels.interpreted import mended
from laneformer.kernels.launch import WARPS as WARPS
from laneformer.kernels.launch import signed
from laneformer.kernels.matvec import ATTENTION, NORMED, PLAIN
from laneformer.kernels.plan import DeviceShape, PlanError, lane_slots, power_of_two, tile_for
from laneformer.kernels.sync import ABORT_WORDS

# Polls for what has been sent before the launch: what is not there by then was never sent.
LANDING_POLLS = 16
# Polls for programs of the same launch, which are all resident.
DRAW_POLLS = 1 << 26


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: positional arguments, compile-time constants, programs, what it writes.

    keep: tensors that the kernel reaches by address only. waits: its programs wait for each other.
    """

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    out: Any
    keep: tuple[Any, ...] = field(default=(), repr=False)
    waits: bool = False

    def run(self) -> Any:
        """Launches on the current stream of the tensors' device; returns `out`. Tensors without memory run nothing."""
        device = next(value.device for value in self.arguments if isinstance(value, Tensor))
        options: dict[str, Any] = {"num_warps": WARPS, "num_stages": 1}
        if device.type == "cuda" and self.waits:
            options["launch_cooperative_grid"] = True
        # No programs means that nothing is to be done, which a launch cannot say.
        if self.programs and device.type != "meta":
            with torch.cuda.device(device) if device.type == "cuda" else mended():
                self.kernel[(self.programs,)](*self.arguments, **self.constants, **options)
        return self.out


def require(condition: bool, message: str) -> None:
    """Raises PlanError (a ValueError) with the message unless the condition holds."""
    if not condition:
        raise PlanError(message)


def device_shape(device: torch.device) -> DeviceShape:
    """A GPU's own; few programs where they run one after another; that of an H200 where nothing runs."""
    if device.type == "cuda":
        return DeviceShape(torch.cuda.get_device_properties(device).multi_processor_count)
    return DeviceShape(132 if device.type == "meta" else 2)


def is_amd(device: torch.device) -> bool:
    """Whether kernels for this device are compiled for an AMD GPU."""
    return device.type == "cuda" and torch.version.hip is not None


def addresses(tensors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    """The int64 table of where tensors lie."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=tensors[0].device)


def integers(values: list[int], device: torch.device) -> Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def empty(x: Tensor, *shape: int) -> Tensor:
    """An uninitialised float32 tensor where x is."""
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def by_lane(name: str, weight: Tensor, lanes: int, *sizes: int, apart: bool = False) -> Tensor:
    """The weight, after checking its sizes and that every lane's part is contiguous; one part may serve all lanes.

    apart: the rows of a lane may lie apart from each other, as columns of a wider matrix do.
    """
    wanted = (lanes, *sizes)
    require(tuple(weight.shape) in (wanted, (1, *sizes)), f"{name} must be {wanted}, got {tuple(weight.shape)}")
    whole = weight[0, 0] if apart else weight[0]
    require(whole.is_contiguous(), f"{name} must be contiguous within a lane, its strides are {weight.stride()}")
    return weight if weight.shape[0] == lanes else weight.expand(wanted)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Launch:
    """RMSNorm of rows."""
    width = x.shape[-1]
    # The tile function reads float32, as the streams and heads of the kernel are.
    flat, count = x.float().contiguous(), x.numel() // width
    if weight.dim() > 1:
        weight = weight.broadcast_to(x.shape)
    weight, out = weight.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    padded = power_of_two(width)
    block = max(1, min(power_of_two(count), device_shape(x.device).tile // padded))
    constants = {"WEIGHT_ROW": 0 if weight.dim() == 1 else width, "E": width, "EP": padded, "BN": block}
    return Launch(tiles.norm_rows, -(-count // block), (flat, weight, out, eps, count), constants, out)


def _matrix(
    kind: Any, x: Tensor, scale: Tensor, weight: Tensor, blocks: int, eps: float, lanes: int, parts: dict[str, int]
) -> Launch:
    rows, columns = weight.shape[1:]
    shape = device_shape(x.device)
    tile = tile_for(rows, columns, shape)
    out = empty(x, lanes, rows)
    constants = {
        "INPUT": kind.value, "L": lanes, "ROWS": rows, "K": columns, "BR": tile.rows, "BK": tile.columns,
        "LANE": weight.stride(0), "STRIDE": weight.stride(1), **parts,
    }  # fmt: skip
    programs = min(shape.programs, lanes * tile.count)
    return Launch(tiles.matrix_rows, programs, (weight, x, scale, out, blocks, eps), constants, out)


def matvec(x_LI: Tensor, weight_LOI: Tensor) -> Launch:
    """Each lane's matrix times its vector."""
    lanes, width = x_LI.shape
    weight_LOI = by_lane("weight_LOI", weight_LOI, lanes, weight_LOI.shape[1], width, apart=True)
    by_lane("x_LI", x_LI, lanes, width)
    parts = {"X_LANE": x_LI.stride(0), "SCALE_LANE": 0, "E": 1, "NB": 1, "NBP": 1}
    return _matrix(PLAIN, x_LI, x_LI, weight_LOI, 0, 0.0, lanes, parts)


def normed_matvec(x_LD: Tensor, norm_LD: Tensor, weight_LOD: Tensor, eps: float) -> Launch:
    """Each lane's matrix times its normalised vector."""
    lanes, width = x_LD.shape
    weight_LOD = by_lane("weight_LOD", weight_LOD, lanes, weight_LOD.shape[1], width)
    by_lane("x_LD", x_LD, lanes, width)
    norm_LD = by_lane("norm_LD", norm_LD, lanes, width)
    parts = {"X_LANE": x_LD.stride(0), "SCALE_LANE": norm_LD.stride(0), "E": 1, "NB": 1, "NBP": 1}
    return _matrix(NORMED, x_LD, norm_LD, weight_LOD, 0, eps, lanes, parts)


def gated_units(x_LD: Tensor, norm_LD: Tensor, gate_up_LOD: Tensor, eps: float) -> Launch:
    """SwiGLU units of each lane's normalised vector."""
    lanes, width = x_LD.shape
    both = gate_up_LOD.shape[1]
    require(both % 2 == 0, f"gate_up_LOD holds as many rows of gate as of up, got {both} rows")
    gate_up_LOD = by_lane("gate_up_LOD", gate_up_LOD, lanes, both, width)
    by_lane("x_LD", x_LD, lanes, width)
    norm_LD = by_lane("norm_LD", norm_LD, lanes, width)
    shape = device_shape(x_LD.device)
    tile = tile_for(both // 2, width, shape)
    out = empty(x_LD, lanes, both // 2)
    constants = {
        "L": lanes, "F": both // 2, "D": width, "BR": tile.rows, "BK": tile.columns, "LANE": gate_up_LOD.stride(0),
        "X_LANE": x_LD.stride(0), "SCALE_LANE": norm_LD.stride(0),
    }  # fmt: skip
    programs = min(shape.programs, lanes * tile.count)
    return Launch(tiles.unit_rows, programs, (gate_up_LOD, x_LD, norm_LD, out, eps), constants, out)


def decode_attention(
    qkv_LO: Tensor, keys_LKTE: Tensor, values_LKTE: Tensor, position: int, cos_E: Tensor, sin_E: Tensor,
    window: int | None = None, q_norm_E: Tensor | None = None, k_norm_E: Tensor | None = None, eps: float = 0.0,
    block: int = 128,
) -> Launch:  # fmt: skip
    """Blocks of positions of every lane's heads; appends to the cache."""
    lanes, kv_heads, ring, size = keys_LKTE.shape
    heads = qkv_LO.shape[1] // size - 2 * kv_heads
    length = position + 1 if window is None else min(window, position + 1)
    require(length <= ring, f"{length} positions are seen at position {position}, the cache holds {ring}")
    require(keys_LKTE.is_contiguous() and values_LKTE.is_contiguous(), "the cache must be contiguous")
    require(heads > 0 and heads % kv_heads == 0, f"{kv_heads} key-value heads cannot serve {heads} query heads equally")
    require(block == power_of_two(block), f"a block must hold a power of two of positions, got {block}")
    require((q_norm_E is None) == (k_norm_E is None), "give head norms of queries and of keys, or neither")
    count = -(-ring // block)
    out, scale = empty(qkv_LO, lanes, heads, count, size), empty(qkv_LO, lanes, heads, count, 2)
    group = heads // kv_heads
    constants = {
        "L": lanes, "H": heads, "KV": kv_heads, "G": group, "GP": power_of_two(group), "E": size,
        "EP": power_of_two(size), "EC": size & -size, "BT": block, "NB": count, "HEAD_NORMS": q_norm_E is not None,
    }  # fmt: skip
    cos, sin = cos_E.float().contiguous(), sin_E.float().contiguous()
    norms = (cos, cos) if q_norm_E is None or k_norm_E is None else (q_norm_E, k_norm_E)
    arguments = (qkv_LO.float().contiguous(), keys_LKTE, values_LKTE, *norms, cos, sin, out, scale, position, length,
                 ring, eps)  # fmt: skip
    programs = min(device_shape(qkv_LO.device).programs, lanes * kv_heads * -(-length // block))
    return Launch(tiles.attention_blocks, programs, arguments, constants, (out, scale))


def attention_output(weighted_LHNE: Tensor, scale_LHN2: Tensor, blocks: int, weight_LOI: Tensor) -> Launch:
    """The output projection of what blocks of positions left."""
    lanes, heads, count, size = weighted_LHNE.shape
    weight_LOI = by_lane("weight_LOI", weight_LOI, lanes, weight_LOI.shape[1], heads * size, apart=True)
    by_lane("weighted_LHNE", weighted_LHNE, lanes, heads, count, size)
    by_lane("scale_LHN2", scale_LHN2, lanes, heads, count, 2)
    require(1 <= blocks <= count, f"blocks in use must be 1..{count}, got {blocks}")
    parts = {"X_LANE": heads * count * size, "SCALE_LANE": heads * count * 2, "E": size, "NB": count,
             "NBP": power_of_two(count)}  # fmt: skip
    return _matrix(ATTENTION, weighted_LHNE, scale_LHN2, weight_LOI, blocks, 0.0, lanes, parts)


def tree_sum(x_L: Tensor) -> Launch:
    """The sum over the first dimension in the fixed order."""
    count, width = x_L.shape[0], x_L[0].numel()
    places = lane_slots(count)
    padded = power_of_two(count)
    rows = integers([places.index(slot) if slot in places else -1 for slot in range(padded)], x_L.device)
    out = empty(x_L, *x_L.shape[1:])
    block = row_block(width, padded, x_L.device)
    constants = {"W": width, "S": padded, "LOG_S": padded.bit_length() - 1, "BW": block}
    return Launch(tiles.sum_rows, -(-width // block), (x_L.contiguous(), rows, out), constants, out)


def row_block(rows: int, slots: int, device: torch.device) -> int:
    """Rows of a program that sums `slots` messages."""
    shape = device_shape(device)
    return max(1, min(tile_for(rows, 1, shape).rows, shape.tile // slots))


@dataclass(frozen=True)
class Message:
    """How lanes share a mailbox: each rank's slots, the lane of each slot or -1, and which slots are filled.

    A rank sends the sum of its lanes where they are one subtree of the sum over all, and each of them otherwise.
    """

    sent: tuple[tuple[int, ...], ...]
    lane_of: tuple[int, ...]
    valid: int

    @classmethod
    def of(cls, ranks: int, lanes: int) -> Message:
        """For `ranks` ranks of `lanes` lanes each."""
        places = lane_slots(ranks * lanes)
        padded = power_of_two(ranks * lanes)
        lane_of = tuple(places.index(slot) if slot in places else -1 for slot in range(padded))
        if padded == ranks * lanes and ranks > 1:
            return cls(tuple((rank,) for rank in range(ranks)), lane_of, (1 << ranks) - 1)
        sent = tuple(places[rank * lanes : (rank + 1) * lanes] for rank in range(ranks))
        return cls(sent, lane_of, sum(1 << slot for slot in places))

    @property
    def slots(self) -> int:
        """Slots of a mailbox, a power of two."""
        return power_of_two(self.valid.bit_length())


def checked_boxes(partials_RLD: Tensor, boxes_R: tuple[Tensor, ...]) -> Message:
    """How the partials are sent, after checking the mailboxes."""
    ranks, lanes, hidden = partials_RLD.shape
    message = Message.of(ranks, lanes)
    shapes = [tuple(box.shape) for box in boxes_R]
    wanted = (message.slots, hidden)
    require(shapes == [wanted] * ranks, f"{ranks} ranks of {lanes} lanes need {ranks} boxes of {wanted}, got {shapes}")
    require(all(box.dtype == torch.int32 and box.is_contiguous() for box in boxes_R), "boxes hold int32, contiguous")
    require(partials_RLD.dtype == torch.float32 and partials_RLD.is_contiguous(), "partials are float32, contiguous")
    return message


def post_partials(partials_RLD: Tensor, boxes_R: tuple[Tensor, ...]) -> Launch:
    """Sends every rank's partials to every rank."""
    ranks, lanes, hidden = partials_RLD.shape
    message, device, padded = checked_boxes(partials_RLD, boxes_R), partials_RLD.device, power_of_two(lanes)
    block = row_block(hidden, padded, device)
    slots = integers([slot for sent in message.sent for slot in sent], device)
    constants = {"R": ranks, "LR": lanes, "LP": padded, "LOG_LP": padded.bit_length() - 1,
                 "NODES": len(message.sent[0]), "D": hidden, "BD": block}  # fmt: skip
    programs = ranks * -(-hidden // block) if ranks > 1 else 0
    return Launch(tiles.post_tiles, programs, (partials_RLD, addresses(boxes_R), slots), constants, None, boxes_R)


def land_partials(partials_RLD: Tensor, boxes_R: tuple[Tensor, ...], last: bool) -> Launch:
    """Sums what has been sent to every rank."""
    ranks, lanes, hidden = partials_RLD.shape
    message, device = checked_boxes(partials_RLD, boxes_R), partials_RLD.device
    block = row_block(hidden, message.slots, device)
    abort = torch.zeros(ranks, int(ABORT_WORDS.value), dtype=torch.int32, device=device)
    out = empty(partials_RLD, ranks, hidden)
    constants = {"R": ranks, "LR": lanes, "S": message.slots, "LOG_S": message.slots.bit_length() - 1,
                 "VALID": message.valid, "D": hidden, "BD": block, "AMD": is_amd(device)}  # fmt: skip
    arguments = (partials_RLD, addresses(boxes_R), integers(list(message.lane_of), device), abort,
                 addresses(list(abort)), out, int(last), LANDING_POLLS)  # fmt: skip
    return Launch(tiles.land_tiles, ranks * -(-hidden // block), arguments, constants, out, boxes_R)


def post_logits(
    x_LD: Tensor, norm_LD: Tensor | None, head_LCD: Tensor, eps: float, first_lane: int, boxes_R: tuple[Tensor, ...]
) -> Launch:
    """Sends the logits of these lanes' slices of the head to every rank."""
    lanes, rows, width = head_LCD.shape
    by_lane("head_LCD", head_LCD, lanes, rows, width)
    x_LD = by_lane("x_LD", x_LD, lanes, width)
    norm = x_LD if norm_LD is None else by_lane("norm_LD", norm_LD, lanes, width)
    shapes = {tuple(box.shape) for box in boxes_R}
    require(len(shapes) == 1 and all(box.dtype == torch.int32 for box in boxes_R), f"boxes are int32 [V], got {shapes}")
    shape = device_shape(x_LD.device)
    tile = tile_for(rows, width, shape)
    constants = {
        "INPUT": (PLAIN if norm_LD is None else NORMED).value, "R": len(boxes_R), "L": lanes, "C": rows,
        "V": boxes_R[0].shape[0], "D": width, "BR": tile.rows, "BK": tile.columns, "LANE": head_LCD.stride(0),
        "X_LANE": x_LD.stride(0), "SCALE_LANE": norm.stride(0),
    }  # fmt: skip
    arguments = (head_LCD, x_LD, norm, addresses(boxes_R), first_lane, eps)
    return Launch(tiles.head_rows, min(shape.programs, lanes * tile.count), arguments, constants, None, boxes_R)


def gumbel(ids_C: Tensor, seed: int, position: int) -> Launch:
    """Noise of token ids at a position."""
    count = ids_C.numel()
    key = torch.tensor([signed(seed)], dtype=torch.int64, device=ids_C.device)
    out = torch.empty(count, dtype=torch.float64, device=ids_C.device)
    block = min(1024, power_of_two(count))
    arguments = (ids_C.to(torch.int32).contiguous(), key, out, position, count)
    return Launch(tiles.noise_of, -(-count // block), arguments, {"BC": block}, out)


def draw(
    logits_V: Tensor, seen_V: Tensor, temperature: float, top_k: int, top_p: float, penalty: float, seed: int,
    position: int,
) -> Launch:  # fmt: skip
    """The next token; every run of the launch draws the same."""
    vocab, device = logits_V.numel(), logits_V.device
    require(logits_V.dtype == torch.float32 and seen_V.numel() == vocab, "logits are float32, one mark for each")
    # Programs run one after another where there is no GPU, so none may wait for another.
    programs = device_shape(device).programs if device.type == "cuda" else 1
    chunk = min(1024, power_of_two(-(-vocab // programs)))
    programs = min(programs, -(-vocab // chunk))
    held, boxes = draw_memory(vocab, programs, device)
    held["SEEN"] = seen_V.to(torch.int8).contiguous()
    table = [0] * int(mem.RANK_WORDS.value)
    for name, tensor in held.items():
        table[int(getattr(mem, name).value)] = tensor.data_ptr()
    words = [0] * int(mem.LAUNCH_WORDS.value)
    words[mem.SEED.value], words[mem.TOP_K.value] = signed(seed), top_k
    whole = {"dtype": torch.int64, "device": device}
    knobs = torch.tensor([temperature, top_p, penalty], dtype=torch.float64, device=device)
    token = integers([-1], device)
    arguments = (torch.tensor(table, **whole), torch.tensor(words, **whole), knobs, logits_V.contiguous(), token,
                 position, DRAW_POLLS)  # fmt: skip
    constants = {"P": programs, "PP": power_of_two(programs), "V": vocab, "BV": chunk, "AMD": is_amd(device)}
    return Launch(tiles.draw_token, programs, arguments, constants, token, (held, boxes), programs > 1)


def draw_memory(vocab: int, programs: int, device: torch.device) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What a draw needs of a rank's memory, by the names of kernels/memory.py, and what tables in it point at."""
    sizes = draw_sizes(vocab, programs) | {"LOGITS": (1, torch.float32)}
    held = {name: torch.zeros(size, dtype=dtype, device=device) for name, (size, dtype) in sizes.items()}
    box = torch.full((2 * vocab,), -1, dtype=torch.int32, device=device)
    abort = torch.zeros(int(ABORT_WORDS.value), dtype=torch.int32, device=device)
    held["LOGIT_BOXES"], held["ABORTS"] = addresses([box]), addresses([abort])
    return held, [box, abort]
