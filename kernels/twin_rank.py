"""One rank of the twin: its memory, and what a program does in each phase, every access checked.

Suffixes: L lanes of a rank, D hidden, G generations of a mailbox, S its slots, V vocabulary, E head size, B blocks of
positions, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import laneformer.ops as ops
from laneformer.kernels.plan import LOGIT_GENERATIONS, Plan, lane_slots
from laneformer.kernels.plan_phases import Land, generation
from laneformer.kernels.twin_draw import Drawing
from laneformer.kernels.twin_ledger import Actor, Key, Ledger, Need
from laneformer.kernels.weights import Weights as Weights
from laneformer.schedule import Own

if TYPE_CHECKING:
    from laneformer.kernels.launch import Settings


@dataclass
class World:
    """What the ranks of a twin share: plan, ring length, clocks, all ranks, tokens given, and what came out.

    sampling: how tokens are drawn, greedily if None. logits: by rank and token, [V]. drawn: by rank, program and token.
    """

    plan: Plan
    generations: int
    ledger: Ledger
    sampling: Settings | None = None
    ranks: list[Rank] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logits: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    drawn: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def token_at(self, actor: Actor) -> int:
        """The token that an actor's step begins with: given, or drawn by itself."""
        if actor.token < len(self.tokens):
            return self.tokens[actor.token]
        return self.drawn[actor.rank, actor.program, actor.token - 1]


class Rank:
    """One rank's memory, and what a program does in each phase. Everything starts out as NaN."""

    def __init__(self, world: World, number: int, weights: Weights) -> None:
        plan, config = world.plan, world.plan.config
        self.world, self.number, self.weights = world, number, weights
        self.plan, self.config, self.ledger = plan, config, world.ledger
        self.dtype = weights.embedding_VD.dtype
        self.wide = ops.accumulation_dtype(self.dtype)
        lanes, hidden, vocab, self.slots = (
            plan.lanes,
            config.hidden_size,
            config.vocab_size,
            lane_slots(config.num_lanes),
        )

        def empty(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
            return torch.full(shape, torch.nan, dtype=dtype or self.wide)

        heads = (lanes, plan.q_heads, plan.position_blocks)
        self.stream_LD, self.qkv_L = empty(lanes, hidden), empty(lanes, plan.tiles["qkv"].of_rows)
        self.weighted, self.scale = empty(*heads, config.head_size), empty(*heads, 2)
        self.units_L, self.final_D = empty(lanes, plan.units), empty(hidden)
        self.ring_GLD = empty(world.generations + 1, lanes, hidden)
        self.parts_LV = empty(lanes, vocab)
        self.box_GSD = empty(world.generations, plan.slots, hidden)
        self.logit_box = empty(LOGIT_GENERATIONS, plan.logit_slots, vocab)
        self.held = [min(config.window(i) or plan.context, plan.context) for i in range(config.num_hidden_layers)]
        shapes = [(lanes, plan.kv_heads, held, config.head_size) for held in self.held]
        self.keys, self.values = ([empty(*shape, dtype=self.dtype) for shape in shapes] for _ in "kv")
        self.drawing = Drawing(self)
        rope = config.rope_scaling
        scaling = rope and (rope.factor, rope.low_freq_factor, rope.high_freq_factor,
                            rope.original_max_position_embeddings)  # fmt: skip
        frequencies = ops.rope_frequencies(config.head_size, config.rope_theta, scaling)
        self.cos, self.sin = ops.rope_tables(torch.arange(plan.context), frequencies, self.dtype)

    def work(self, actor: Actor) -> Iterator[Need]:
        """What a program does in a phase, between its wait and its signal; yields where it polls a mailbox."""
        items = actor.phase.items_of(actor.program, self.plan.programs)
        phase = actor.phase.name
        if phase in ("output", "down", "final") and items:
            yield from self.rows(actor, items)
        elif phase == "draw" and items:
            yield from self.drawing.collect(actor, items)
        elif phase.startswith(("top-k", "top-p")):
            self.drawing.count(actor, items)
        elif phase == "agree":
            self.drawing.agree(actor)
        elif items:
            parts = {"embed": self.embed, "qkv": self.qkv, "attention": self.attention, "gate/up": self.gate_up,
                     "head": self.head, "keep": self.drawing.keep}  # fmt: skip
            parts[phase](actor, items)

    def read(self, actor: Actor, buffer: str, places: Sequence[Any], *tag: Any) -> None:
        """Checks that regions of a buffer hold `tag` for good; unless told otherwise, that of this token and module."""
        for place in places:
            self.ledger.read(actor, (buffer, self.number, place), tag or (actor.token, actor.phase.module))

    def write(self, actor: Actor, buffer: str, place: Any, *tag: Any) -> None:
        """Checks that a region may be overwritten; it then holds `tag`."""
        self.ledger.write(actor, (buffer, self.number, place), tag or (actor.token, actor.phase.module))

    def rows_of(self, matrix: str, tile: int) -> slice:
        """The rows of a matrix's tile."""
        shape = self.plan.tiles[matrix]
        return slice(tile * shape.rows, min((tile + 1) * shape.rows, shape.of_rows))

    def read_stream(self, actor: Actor) -> Tensor:
        """Every lane's stream [L, D] as the module before left it."""
        n = actor.phase.module
        before = 2 * self.config.num_hidden_layers - 1 if n is None else n - 1
        self.read(actor, "STREAM", range(self.plan.tiles["out"].count), actor.token, before)
        return self.stream_LD

    def product(self, weight: Tensor, x: Tensor) -> Tensor:
        """weight [O, I] times x [I]."""
        return ops.lane_linear(x.view(1, 1, 1, -1), weight.to(self.wide)[None])[0, 0, 0]

    def embed(self, actor: Actor, items: range) -> None:
        """Every lane's stream becomes the token's row."""
        row_D = self.weights.embedding_VD[self.world.token_at(actor)]
        for tile in items:
            self.write(actor, "STREAM", tile, actor.token, -1)
            rows = self.rows_of("out", tile)
            self.stream_LD[:, rows] = row_D[rows].to(self.wide)

    def qkv(self, actor: Actor, items: range) -> None:
        """Rows of queries, keys and values of a lane."""
        layer = self.weights.layers[actor.phase.layer or 0]
        x_LD = ops.rms_norm(self.read_stream(actor), layer.attention_norm_LD, self.config.norm_eps)
        for item in items:
            lane, tile = divmod(item, self.plan.tiles["qkv"].count)
            rows = self.rows_of("qkv", tile)
            self.write(actor, "QKV", (lane, tile))
            self.qkv_L[lane, rows] = self.product(layer.qkv_LOI[lane, rows], x_LD[lane])

    def attention(self, actor: Actor, items: range) -> None:
        """Blocks of positions of key-value heads; a block leaves weighted values, largest score, sum of weights."""
        index, size, position = actor.phase.layer or 0, self.plan.device.block_positions, actor.token
        length = min(self.config.window(index) or position + 1, position + 1)
        blocks = -(-length // size)
        for task in items:
            head, block = divmod(task, blocks)
            first = position + 1 - length + block * size
            positions = range(first, min(first + size, position + 1))
            lane, kv = divmod(head, self.plan.kv_heads)
            q_GE, k_E, v_E = self.new_position(actor, index, lane, kv)
            slots = [at % self.held[index] for at in positions]
            old = [(slot, at) for slot, at in zip(slots, positions, strict=True) if at != position]
            for slot, at in old:
                self.read(actor, "KEY_CACHE", [(index, head, slot)], at)
            if positions[-1] == position:
                self.write(actor, "KEY_CACHE", (index, head, slots[-1]), position)
                self.keys[index][lane, kv, slots[-1]], self.values[index][lane, kv, slots[-1]] = k_E, v_E
            keys_TE, values_TE = (t[index][lane, kv, slots].to(self.wide) for t in (self.keys, self.values))
            score_GT = q_GE @ keys_TE.T / self.config.head_size**0.5
            most_G = score_GT.amax(1)
            weight_GT = (score_GT - most_G[:, None]).exp()
            self.write(actor, "WEIGHTED", (head, block))
            mine = slice(kv * q_GE.shape[0], (kv + 1) * q_GE.shape[0])
            self.weighted[lane, mine, block] = weight_GT @ values_TE
            self.scale[lane, mine, block, 0], self.scale[lane, mine, block, 1] = most_G, weight_GT.sum(1)

    def new_position(self, actor: Actor, index: int, lane: int, kv: int) -> tuple[Tensor, Tensor, Tensor]:
        """Turned queries [G, E] of a key-value head, its turned key and its value [E], as the cache rounds them."""
        plan, layer, size = self.plan, self.weights.layers[index], self.config.head_size
        group, rows = plan.q_heads // plan.kv_heads, plan.tiles["qkv"].rows
        firsts = (kv * group, plan.q_heads + kv, plan.q_heads + plan.kv_heads + kv)
        parts = []
        for first, count in zip(firsts, (group, 1, 1), strict=True):
            begin, end = first * size, (first + count) * size
            self.read(actor, "QKV", [(lane, tile) for tile in range(begin // rows, -(-end // rows))])
            parts.append(self.qkv_L[lane, begin:end].view(count, size))
        q, k, v = parts
        if layer.q_norm_E is not None:
            q, k = (ops.rms_norm(x, w, self.config.norm_eps) for x, w in ((q, layer.q_norm_E), (k, layer.k_norm_E)))
        q, k = (ops.rope(x, self.cos[actor.token], self.sin[actor.token]) for x in (q, k))
        return q, k[0].to(self.dtype), v[0].to(self.dtype)

    def attended(self, actor: Actor, lane: int) -> Tensor:
        """A lane's attention output [H * E], its blocks joined."""
        heads = range(lane * self.plan.kv_heads, (lane + 1) * self.plan.kv_heads)
        layer = actor.phase.layer or 0
        blocks = self.plan.attention_tasks(layer, actor.token) // (self.plan.lanes * self.plan.kv_heads)
        self.read(actor, "WEIGHTED", [(head, block) for head in heads for block in range(blocks)])
        scale = self.scale[lane, :, :blocks]
        weight_HB = (scale[..., 0] - scale[..., 0].amax(1, keepdim=True)).exp()
        total_H = (weight_HB * scale[..., 1]).sum(1)
        out_HE = (self.weighted[lane, :, :blocks] * weight_HB[..., None]).sum(1) / total_H[:, None]
        return out_HE.flatten()

    def gate_up(self, actor: Actor, items: range) -> None:
        """Feed-forward units of a lane."""
        layer = self.weights.layers[actor.phase.layer or 0]
        x_LD = ops.rms_norm(self.read_stream(actor), layer.ffn_norm_LD, self.config.norm_eps)
        for item in items:
            lane, tile = divmod(item, self.plan.tiles["gate_up"].count)
            rows = self.rows_of("gate_up", tile)
            self.write(actor, "UNITS", (lane, tile))
            gate, up = layer.gate_up_LOI[lane].chunk(2)
            self.units_L[lane, rows] = ops.gated_mlp(
                self.product(gate[rows], x_LD[lane]), self.product(up[rows], x_LD[lane])
            )

    def inputs(self, actor: Actor) -> Callable[[int, slice], Tensor]:
        """What gives each lane's partial of some rows, once its input has been read."""
        lanes, layer = range(self.plan.lanes), actor.phase.layer or 0
        if actor.phase.name == "final":
            x_LD = self.read_stream(actor)
            if not self.config.pre_norm_lane_agg:
                x_LD = ops.rms_norm(x_LD, self.weights.norm_LD, self.config.norm_eps)
            return lambda lane, rows: x_LD[lane, rows]
        if actor.phase.name == "output":
            x_L, weight_LOI = [self.attended(actor, lane) for lane in lanes], self.weights.layers[layer].out_LOI
        else:
            self.read(actor, "UNITS", [(lane, tile) for lane in lanes for tile in self.tiles("gate_up")])
            x_L, weight_LOI = list(self.units_L), self.weights.layers[layer].down_LOI
        return lambda lane, rows: self.product(weight_LOI[lane, rows], x_L[lane])

    def tiles(self, matrix: str) -> range:
        """The tiles of one lane's matrix."""
        return range(self.plan.tiles[matrix].count)

    def rows(self, actor: Actor, items: range) -> Iterator[Need]:
        """Rows of the partials of a module, or of what the head reads: kept, sent, then landed as the phase says."""
        phase = actor.phase
        module = 2 * self.config.num_hidden_layers if phase.module is None else phase.module
        place = self.place(actor, phase.sends)
        partial = self.inputs(actor)
        for tile in items:
            rows = self.rows_of("out", tile)
            self.write(actor, "RING", (place, tile), actor.token, module)
            for lane in range(self.plan.lanes):
                self.ring_GLD[place, lane, rows] = partial(lane, rows)
            if phase.sends is not None and self.plan.ranks > 1:
                self.post(actor, place, tile, (actor.token, module))
        for tile in items:
            yield from self.update(actor, tile, place, module)

    def place(self, actor: Actor, number: int | None) -> int:
        """Where in the ring a message of this token is; what is not sent is kept beside it."""
        return self.world.generations if number is None else generation(
            self.plan, actor.token, number, self.world.generations
        )  # fmt: skip

    def sent(self, rows_LD: Tensor) -> dict[int, Tensor]:
        """What this rank sends of its lanes' rows, by slot."""
        if self.plan.presummed:
            return {self.number if self.plan.ranks > 1 else 0: ops.tree_sum(rows_LD)}
        first = self.number * self.plan.lanes
        return {self.slots[first + lane]: row for lane, row in enumerate(rows_LD)}

    def post(self, actor: Actor, place: int, tile: int, tag: Key) -> None:
        """Rows of a message into every rank's mailbox, the own last."""
        rows = self.rows_of("out", tile)
        for slot, row in self.sent(self.ring_GLD[place, :, rows]).items():
            for turn in range(self.plan.ranks):
                peer = self.world.ranks[(self.number + 1 + turn) % self.plan.ranks]
                self.ledger.post(actor, ("box", peer.number, place, slot, tile), tag)
                peer.box_GSD[place, slot, rows] = row

    def update(self, actor: Actor, tile: int, place: int, module: int) -> Iterator[Need]:
        """Adds to rows of the streams what a module keeps of its own and what it lands."""
        phase, rows = actor.phase, self.rows_of("out", tile)
        final = phase.name == "final"
        own = Own.NONE if final else self.plan.schedule.steps[module].own
        x_LD = torch.zeros_like(self.stream_LD[:, rows])
        if not final:
            self.read(actor, "STREAM", [tile], actor.token, module - 1)
            x_LD = self.stream_LD[:, rows]
        self.read(actor, "RING", [(place, tile)], actor.token, module)
        x_LD = x_LD + own.scale(self.config.num_lanes) * self.ring_GLD[place, :, rows]
        for land in phase.lands:
            at, tag = self.place(actor, land.number), (actor.token, land.module)
            self.read(actor, "RING", [(at, tile)], *tag)
            total_D = yield from self.landed(actor, land, at, tile, tag)
            x_LD = x_LD + (total_D if land.with_own else total_D - self.ring_GLD[at, :, rows])
        if final:
            self.write(actor, "FINAL", tile, actor.token)
            mean = 1 if self.config.pre_norm_lane_agg else self.config.num_lanes
            self.final_D[rows] = x_LD[0] / mean
        else:
            self.write(actor, "STREAM", tile, actor.token, module)
            self.stream_LD[:, rows] = x_LD

    def landed(self, actor: Actor, land: Land, place: int, tile: int, tag: Key) -> Iterator[Need]:
        """Rows of a message's sum over all lanes; a single rank has them all in its ring."""
        rows = self.rows_of("out", tile)
        if self.plan.ranks == 1:
            return ops.tree_sum(self.ring_GLD[place, :, rows])
        slots = [slot for slot in range(self.plan.slots) if self.plan.valid_slots >> slot & 1]
        keys = tuple(("box", self.number, place, slot, tile) for slot in slots)
        yield Need(actor, words=keys)
        for key in keys:
            self.ledger.land(actor, key, tag, land.rearms)
        total_D = ops.tree_sum(self.box_GSD[place, slots][:, rows])
        if land.rearms:
            self.box_GSD[place, :, rows] = torch.nan
        return total_D

    def pieces(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The token ids from begin to end, cut where tiles of the head and chunks of the draw begin."""
        plan, vocab = self.plan, self.config.vocab_size
        cuts = set(range(0, vocab, plan.score_chunk)) | {begin, end}
        for first in range(0, vocab, plan.head_rows):
            cuts |= set(range(first, min(first + plan.head_rows, vocab), plan.tiles["head"].rows))
        inside = sorted(cut for cut in cuts if begin <= cut <= end)
        return list(pairwise(inside))

    def head(self, actor: Actor, items: range) -> None:
        """Logits of this rank's part of the head, into every rank's logit box."""
        config, plan, held = self.config, self.plan, self.weights
        if plan.sends_at_end:
            self.read(actor, "FINAL", self.tiles("out"), actor.token)
            x_LD = self.final_D.expand(plan.lanes, -1)
        else:
            x_LD = self.read_stream(actor)
        if not plan.sends_at_end or config.pre_norm_lane_agg:
            x_LD = ops.rms_norm(x_LD, held.norm_LD, config.norm_eps)
        for item in items:
            if config.lm_head_type == "lane":
                rows = self.rows_of("head", item)
                parts = [self.product(head[rows], x) for head, x in zip(held.head_L, x_LD, strict=True)]
                for slot, row in self.sent(torch.stack(parts)).items():
                    self.post_logits(actor, slot, rows.start, row)
            else:
                lane, tile = divmod(item, plan.tiles["head"].count)
                rows = self.rows_of("head", tile)
                first = (self.number * plan.lanes + lane) * plan.head_rows + rows.start
                self.post_logits(actor, 0, first, self.product(held.head_L[lane][rows], x_LD[lane]))

    def post_logits(self, actor: Actor, slot: int, first: int, row: Tensor) -> None:
        """Logits of the ids from `first` on into a slot of every rank's logit box; ids beyond the last are dropped."""
        parity, last = actor.token % LOGIT_GENERATIONS, min(first + len(row), self.config.vocab_size)
        for turn in range(self.plan.ranks if last > first else 0):
            peer = self.world.ranks[(self.number + 1 + turn) % self.plan.ranks]
            for begin, end in self.pieces(first, last):
                self.ledger.post(actor, ("logit_box", peer.number, parity, slot, begin, end), (actor.token,))
                peer.logit_box[parity, slot, begin:end] = row[begin - first : end - first]
