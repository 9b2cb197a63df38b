"""A rank's memory for the persistent kernel, from its plan: buffers, mailboxes, and tables of their addresses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from laneformer.kernels import memory as mem
from laneformer.kernels.ending import JOINED, MEAN, NORMED_SUM, SLICES
from laneformer.kernels.plan import COUNTERS, PART_WORDS, Plan, PlanError, lane_slots, power_of_two
from laneformer.kernels.sampling import BINS, DIGITS
from laneformer.kernels.weights import Weights as Weights

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# What the host reads or writes while the kernel runs.
ON_HOST = ("TOKENS", "RESULT", "CANCEL")


@dataclass(frozen=True)
class Shared:
    """What peers write into: mailboxes [G, S, D], logit boxes [2, LS, V], an abort block, control words; all int32."""

    box: Tensor
    logit_box: Tensor
    abort: Tensor
    control: Tensor

    def clear(self) -> None:
        """As before the first token: every word of a mailbox is the sentinel."""
        for tensor, value in ((self.box, -1), (self.logit_box, -1), (self.abort, 0), (self.control, -1)):
            tensor.fill_(value)


def new_shared(plan: Plan, device: torch.device | str = "cpu", words: Tensor | None = None) -> Shared:
    """Mailboxes of a rank, cleared, in `words` (int32, at least plan.shared_words) if given."""
    if words is None:
        words = torch.empty(plan.shared_words, dtype=torch.int32, device=device)
    shared = shared_in(plan, words)
    shared.clear()
    return shared


def shared_in(plan: Plan, words: Tensor) -> Shared:
    """The parts of a rank's shared memory, as they are."""
    if len(words) < plan.shared_words:
        raise PlanError(f"mailboxes need {plan.shared_words} words, there are {len(words)}")
    parts, start = [], 0
    for size in plan.shared_sizes.values():
        parts.append(words[start : start + size])
        start += -(-size // PART_WORDS) * PART_WORDS
    return Shared(*parts)


def head_kind(plan: Plan) -> int:
    """The type of head as kernels/ending.py numbers it."""
    config = plan.config
    if config.lm_head_type == "replicate":
        return int((NORMED_SUM if config.pre_norm_lane_agg else MEAN).value)
    return int((JOINED if config.lm_head_type == "lane" else SLICES).value)


@dataclass
class RankMemory:
    """One rank's buffers and its table of addresses; `tensors` names them for error messages and the simulator.

    keys, values: the cache of each layer, [LR, 1, KV, positions, E]. peers: Shared of every rank, its own included, as
    this rank reaches them. tokens: the most that a launch decodes; kept_logits: of how many it can keep the logits.
    """

    plan: Plan
    rank: int
    weights: Weights
    keys: list[Tensor]
    values: list[Tensor]
    peers: list[Shared]
    tokens: int
    kept_logits: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        if len(self.peers) != self.plan.ranks:
            raise PlanError(f"the plan has {self.plan.ranks} ranks, mailboxes of {len(self.peers)} were given")
        device = self.weights.embedding_VD.device
        for name, (count, dtype) in self._sizes().items():
            pinned = name in ON_HOST and device.type != "cpu"
            place = "cpu" if name in ON_HOST else device
            self.tensors[name] = torch.zeros(max(1, count), dtype=dtype, device=place, pin_memory=pinned)
        self._tables(device)
        entries = [0] * int(mem.RANK_WORDS.value)
        for name, tensor in self.tensors.items():
            entries[int(getattr(mem, name).value)] = tensor.data_ptr()
        weights = self.weights
        entries[mem.EMBEDDING.value] = weights.embedding_VD.data_ptr()
        entries[mem.FINAL_NORM.value] = weights.norm_LD.data_ptr()
        entries[mem.HEAD.value] = weights.head_L[0].data_ptr()
        entries[mem.RANK.value] = self.rank
        self.table = torch.tensor(entries, dtype=torch.int64, device=device)

    def _sizes(self) -> dict[str, tuple[int, torch.dtype]]:
        plan, config, f32 = self.plan, self.plan.config, torch.float32
        lanes, vocab, programs = plan.lanes, config.vocab_size, plan.programs
        blocks = lanes * plan.q_heads * plan.position_blocks
        return {
            "STREAM": (lanes * config.hidden_size, f32),
            "QKV": (lanes * plan.tiles["qkv"].of_rows, f32),
            "WEIGHTED": (blocks * config.head_size, f32),
            "WEIGHTED_SCALE": (blocks * 2, f32),
            "UNITS": (lanes * plan.units, f32),
            "RING": ((plan.generations + 1) * lanes * config.hidden_size, f32),
            "FINAL": (config.hidden_size, f32),
            "HEAD_PARTS": (lanes * vocab if config.lm_head_type == "lane" else 1, f32),
            "SEEN": (vocab, torch.int8),
            "TOKENS": (self.tokens, torch.int32),
            "LOGITS": (self.kept_logits * vocab, f32),
            "RESULT": (2, torch.int32),
            "WAITS": (2 * programs, torch.int64),
            "CANCEL": (1, torch.int32),
        } | draw_sizes(vocab, programs)

    def _tables(self, device: torch.device) -> None:
        def addresses(tensors: list[Tensor]) -> Tensor:
            return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=device)

        peers, weights = self.peers, self.weights
        self.tensors["BOXES"] = addresses([peer.box for peer in peers])
        self.tensors["LOGIT_BOXES"] = addresses([peer.logit_box for peer in peers])
        self.tensors["ABORTS"] = addresses([peer.abort for peer in peers])
        self.tensors["CONTROLS"] = addresses([peer.control for peer in peers])
        self.tensors["HEAD_OFFSETS"] = torch.tensor(head_offsets(weights), dtype=torch.int64, device=device)
        rows = []
        for layer, (keys, values) in zip(weights.layers, zip(self.keys, self.values, strict=True), strict=True):
            found = [layer.attention_norm_LD, layer.qkv_LOI, layer.out_LOI, layer.ffn_norm_LD, layer.gate_up_LOI,
                     layer.down_LOI, layer.q_norm_E, layer.k_norm_E, keys, values]  # fmt: skip
            row = [0 if tensor is None else tensor.data_ptr() for tensor in found]
            rows.append([*row, keys.shape[3], self.plan.config.window(len(rows)) or 0])
        self.tensors["LAYERS"] = torch.tensor(rows, dtype=torch.int64, device=device).flatten()

    def clear(self) -> None:
        """As before the first token; the other ranks must do the same before anyone starts."""
        for name in ("COUNTERS", "TARGETS", "HISTOGRAMS", "SEEN", "RESULT", "WAITS", "CANCEL"):
            self.tensors[name].zero_()
        self.peers[self.rank].clear()


def draw_sizes(vocab: int, programs: int) -> dict[str, tuple[int, torch.dtype]]:
    """Elements and types of what counters and the draw need of a rank's memory."""
    return {
        "COUNTERS": (len(COUNTERS) * int(mem.LINE.value), torch.int32),
        "TARGETS": (len(COUNTERS), torch.int32),
        "SCORES": (vocab, torch.float64),
        "KEYS": (vocab, torch.int64),
        "MASSES": (vocab, torch.int64),
        "HISTOGRAMS": (2 * 2 * int(DIGITS.value) * int(BINS.value), torch.int64),
        "BEST_SCORES": (2 * programs, torch.float64),
        "BEST_TOKENS": (2 * programs, torch.int32),
    }


def head_offsets(weights: Weights) -> list[int]:
    """Elements from the first lane's part of the head to each lane's."""
    first, size = weights.head_L[0].data_ptr(), weights.head_L[0].element_size()
    return [(tensor.data_ptr() - first) // size for tensor in weights.head_L]


def constants(plan: Plan, weights: Weights, keep: bool = False, amd: bool = False) -> dict[str, Any]:
    """The compile-time arguments of kernels/decode.py."""
    config, tiles, lanes = plan.config, plan.tiles, plan.lanes
    first = weights.layers[0]
    head, lanes_padded = config.head_size, power_of_two(lanes)
    slots, logit = plan.slots, plan.logit_slots
    per_lane = {
        "QKV_LANE": first.qkv_LOI.stride(0), "OUT_LANE": first.out_LOI.stride(0),
        "UNITS_LANE": first.gate_up_LOI.stride(0), "DOWN_LANE": first.down_LOI.stride(0),
        "NORM_LANE": first.attention_norm_LD.stride(0), "FINAL_LANE": weights.norm_LD.stride(0),
        "OUT_ROW": first.out_LOI.stride(1), "DOWN_ROW": first.down_LOI.stride(1),
        "HEAD_ALIGN": math.gcd(16, *head_offsets(weights)),
    }  # fmt: skip
    shapes = {
        "BR_QKV": tiles["qkv"].rows, "BK_QKV": tiles["qkv"].columns, "BR_ROWS": tiles["out"].rows,
        "BK_OUT": tiles["out"].columns, "BR_UNITS": tiles["gate_up"].rows, "BK_UNITS": tiles["gate_up"].columns,
        "BK_DOWN": tiles["down"].columns, "BR_HEAD": tiles["head"].rows, "BK_HEAD": tiles["head"].columns,
    }  # fmt: skip
    return per_lane | shapes | {
        "R": plan.ranks, "P": plan.programs, "PP": power_of_two(plan.programs), "N": config.num_hidden_layers,
        "LANES": config.num_lanes, "LR": lanes, "LP": lanes_padded, "LOG_LP": lanes_padded.bit_length() - 1,
        "NODES": 1 if plan.presummed else lanes, "S": slots, "LOG_S": slots.bit_length() - 1,
        "VALID": plan.valid_slots, "GENERATIONS": plan.generations, "MESSAGES": max(1, len(plan.messages)),
        "ROW": 3 + 3 * plan.most_lands, "D": config.hidden_size, "H": plan.q_heads, "KV": plan.kv_heads, "E": head,
        "EP": power_of_two(head), "EC": head & -head, "GP": power_of_two(plan.q_heads // plan.kv_heads),
        "F": plan.units, "V": config.vocab_size, "C": plan.head_rows, "BT": plan.device.block_positions,
        "NB": plan.position_blocks, "NBP": power_of_two(plan.position_blocks), "BV": plan.score_chunk, "LS": logit,
        "LOG_LS": logit.bit_length() - 1, "LVALID": plan.valid_slots if logit == slots else (1 << logit) - 1,
        "KIND": head_kind(plan), "HEAD_NORMS": config.head_norms, "WEIGHT": TYPES[weights.embedding_VD.dtype],
        "KEEP": keep, "SCOPE": "sys" if plan.ranks > 1 else "gpu",
        "AMD": amd,
    }  # fmt: skip


@dataclass
class Tables:
    """The arguments that all launches of a plan share: schedule, slots of what is sent, rope angles."""

    schedule: Tensor
    own: Tensor
    lane_slot: Tensor
    slot_lane: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, plan: Plan, rank: int, cos: Tensor, sin: Tensor, device: torch.device | str = "cpu") -> Tables:
        """From a plan; cos, sin float32 [positions, E / 2]."""
        rows, own = plan.schedule_rows()
        places = lane_slots(plan.config.num_lanes)
        mine = (rank,) if plan.presummed else places[rank * plan.lanes : (rank + 1) * plan.lanes]
        lane_of = {slot: lane for lane, slot in enumerate(places)}
        integers = {"dtype": torch.int32, "device": device}
        return cls(
            torch.tensor(rows, **integers),
            torch.tensor(own, dtype=torch.float32, device=device),
            torch.tensor(mine, **integers),
            torch.tensor([lane_of.get(slot, -1) for slot in range(power_of_two(plan.config.num_lanes))], **integers),
            cos.contiguous(),
            sin.contiguous(),
        )
