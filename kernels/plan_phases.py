"""The phases of one token as a plan has them: who computes what, waits for whom, and reads and writes which buffers.

kernels/decode.py carries these phases out; kernels/twin.py checks that nothing is read before it may be. Nothing here
needs triton. Buffers go by their names in kernels/memory.py (as strings), counters by their names in plan.COUNTERS.
Sizes count bytes where the name says so, elements otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from laneformer.kernels.plan import Plan, PlanError
from laneformer.schedule import Landing

LAYER_PHASES = ("qkv", "attention", "output", "gate/up", "down")
# Drawing is two phases here: every program collects its logits, then all agree on the best.
END_PHASES = ("final", "head", "draw", "agree")
MOST_SYNCS = 5
# Rounds of counting, of 8 bits of a key each, until top-k or top-p knows the last token that it keeps.
SELECT_ROUNDS = 7
WORD_BYTES = 4


@dataclass(frozen=True)
class Land:
    """A message that a phase lands: its module, its number among the token's messages, and what is done with it."""

    module: int
    number: int
    with_own: bool
    rearms: bool


@dataclass(frozen=True)
class Phase:
    """One phase of a token on a rank. Item i belongs to program i % P.

    waits_for, target: a counter of this rank, and how many arrivals since the token began it must show before programs
    0..waiters-1 go on. signals: the counter that programs 0..arrivals-1 add one to when they have done their share.
    weight_bytes, cache_bytes: what the rank streams. idle_bytes: what it could have streamed while its busiest program
    was at work and others were done. sends: the number of the message that carries this phase's partials, which go
    into place `number` of the ring, and to the peers if there are any.
    """

    name: str
    module: int | None
    items: int
    item: str
    waits_for: str | None
    target: int
    waiters: int
    signals: str | None
    arrivals: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    weight_bytes: int = 0
    cache_bytes: int = 0
    idle_bytes: int = 0
    sends: int | None = None
    lands: tuple[Land, ...] = field(default=())

    @property
    def layer(self) -> int | None:
        """The layer, or None for the ends of a token."""
        return None if self.module is None else self.module // 2

    @property
    def place(self) -> str:
        """What a message calls it."""
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"

    def items_of(self, program: int, programs: int) -> range:
        """The items of one program of `programs`."""
        return range(program, self.items, programs)


def generation(plan: Plan, token: int, number: int, generations: int | None = None) -> int:
    """The place in a ring (of the plan's own length unless given) of message `number` of the token'th token."""
    length = plan.generations if generations is None else generations
    return (token * max(1, len(plan.messages)) + number) % length


def message_bytes(plan: Plan) -> int:
    """Bytes that a rank sends to each peer for one message: float32 words, one row, or one a lane."""
    return WORD_BYTES * plan.config.hidden_size * (1 if plan.presummed else plan.lanes)


def logit_bytes(plan: Plan) -> int:
    """Bytes of logits that a rank sends to each peer for a token."""
    if plan.config.lm_head_type == "lane":
        return WORD_BYTES * plan.config.vocab_size * (1 if plan.presummed else plan.lanes)
    return WORD_BYTES * plan.head_rows * plan.lanes


def token_phases(plan: Plan, position: int, width: int = 2, selects: Sequence[str] = ()) -> tuple[Phase, ...]:
    """All phases of the token at `position` in order; weights and cache have `width` bytes an element.

    selects: what leaves tokens out in the draw, of top-k and top-p in this order. Raises PlanError for a position that
    the cache does not hold.
    """
    if not 0 <= position < plan.context:
        raise PlanError(f"position is {position}, the cache holds 0..{plan.context - 1}")
    token = _Token(plan, position, width)
    token.embed()
    for layer in range(plan.config.num_hidden_layers):
        token.attention_module(layer)
        token.feed_forward_module(layer)
    token.end(selects)
    return tuple(token.phases)


class _Token:
    """Adds phases one after another and keeps count of arrivals, as kernels/decode.py does."""

    def __init__(self, plan: Plan, position: int, width: int) -> None:
        self.plan, self.position, self.width = plan, position, width
        self.counts: dict[str, int] = {}
        self.phases: list[Phase] = []
        self.norm_bytes = width * plan.config.hidden_size * (1 if plan.config.replicated_rmsn_scale else plan.lanes)

    def add(
        self, name: str, module: int | None, items: int, item: str, reads: Iterable[str], writes: Iterable[str],
        waits_for: str | None = None, signals: str | None = None, waiters: int | None = None,
        arrivals: int | None = None, loads: Sequence[int] = (), norms: int = 0, cached: bool = False,
        sends: int | None = None, lands: tuple[Land, ...] = (),
    ) -> None:  # fmt: skip
        """One more phase; `loads`: bytes that each item streams, of weights or of the cache; norms: bytes all share."""
        programs = self.plan.programs
        working = min(items, programs)
        busiest = max((sum(loads[p::programs]) for p in range(working)), default=0)
        arrived = (working if arrivals is None else arrivals) if signals else 0
        waiting = (working if waiters is None else waiters) if waits_for else 0
        total = sum(loads)
        self.phases.append(
            Phase(
                name, module, items, item, waits_for, self.counts.get(waits_for or "", 0), waiting, signals, arrived,
                tuple(reads), tuple(writes), weight_bytes=norms + (0 if cached else total),
                cache_bytes=total if cached else 0, idle_bytes=programs * busiest - total, sends=sends, lands=lands,
            )
        )  # fmt: skip
        if signals:
            self.counts[signals] = self.counts.get(signals, 0) + arrived

    def loads(self, matrix: str, lanes_in_item: bool, matrices: int = 1) -> list[int]:
        """Bytes of each item of a phase that multiplies by a matrix; lane-major unless an item has all lanes."""
        tile, lanes = self.plan.tiles[matrix], self.plan.lanes
        a_row = self.width * tile.of_columns * matrices
        tiles = [a_row * min(tile.rows, tile.of_rows - t * tile.rows) for t in range(tile.count)]
        return [lanes * load for load in tiles] if lanes_in_item else tiles * lanes

    def rows(self, matrix: str, lanes_in_item: bool = False) -> str:
        """What an item of such a phase is."""
        tile = self.plan.tiles[matrix]
        whose = "each lane's" if lanes_in_item else "a lane's"
        return f"{tile.rows} rows of {whose} [{tile.of_rows}, {tile.of_columns}]"

    def embed(self) -> None:
        """Every lane's stream becomes the embedding's row; all signal, so that all have left the last token."""
        hidden, tile = self.plan.config.hidden_size, self.plan.tiles["out"]
        self.add(
            "embed", None, tile.count, f"{tile.rows} elements of the row", ["EMBEDDING"], ["STREAM"], signals="stream",
            arrivals=self.plan.programs, norms=self.width * hidden,
        )  # fmt: skip

    def attention_module(self, layer: int) -> None:
        """The three phases of an attention module."""
        plan, config, n = self.plan, self.plan.config, 2 * layer
        loads = self.loads("qkv", False)
        # Who has no item waits too: the token's end reads what a later token overwrites.
        self.add("qkv", n, len(loads), self.rows("qkv"), ["STREAM", "QKV_WEIGHT", "ATTENTION_NORM"], ["QKV"], "stream",
                 "qkv", waiters=plan.programs, loads=loads, norms=self.norm_bytes)  # fmt: skip
        tasks, block = plan.attention_tasks(layer, self.position), plan.device.block_positions
        heads, window = plan.lanes * plan.kv_heads, config.window(layer)
        length = self.position + 1 if window is None else min(window, self.position + 1)
        a_position = 2 * config.head_size * self.width
        loads = [a_position * min(block, length - b * block) for b in range(tasks // heads)] * heads
        norms = 2 * config.head_size * self.width if config.head_norms else 0
        self.add("attention", n, tasks, f"{block} positions of a key-value head", ["QKV", "KEY_CACHE", "VALUE_CACHE"],
                 ["KEY_CACHE", "VALUE_CACHE", "WEIGHTED", "WEIGHTED_SCALE"], "qkv", "attention", loads=loads,
                 norms=norms, cached=True)  # fmt: skip
        self.partials("output", n, "out", ["WEIGHTED", "WEIGHTED_SCALE", "OUT_WEIGHT"], "attention", "middle")

    def feed_forward_module(self, layer: int) -> None:
        """The two phases of a feed-forward module."""
        n, loads = 2 * layer + 1, self.loads("gate_up", False, 2)
        self.add("gate/up", n, len(loads), self.rows("gate_up"), ["STREAM", "GATE_UP_WEIGHT", "FFN_NORM"], ["UNITS"],
                 "middle", "hidden_units", loads=loads, norms=self.norm_bytes)  # fmt: skip
        self.partials("down", n, "down", ["UNITS", "DOWN_WEIGHT"], "hidden_units", "stream")

    def partials(self, name: str, n: int, matrix: str, reads: list[str], waits_for: str, signals: str) -> None:
        """A phase whose rows are sent and landed as the schedule says."""
        plan, step = self.plan, self.plan.schedule.steps[n]
        number = {module: i for i, module in enumerate(plan.messages)}
        lands = tuple(
            Land(la.module, number[la.module], la.with_own, plan.schedule.last_use[la.module] == n) for la in step.lands
        )
        loads = self.loads(matrix, True)
        boxes = ["box"] if plan.ranks > 1 else []
        self.add(
            name, n, len(loads), self.rows(matrix, True), [*reads, "STREAM", "RING", *(boxes if lands else [])],
            ["RING", "STREAM", *(boxes if step.sends or lands else [])], waits_for, signals, loads=loads,
            sends=number[n] if step.sends else None, lands=lands,
        )  # fmt: skip

    def end(self, selects: Sequence[str]) -> None:
        """Final norm, head, and the draw; a head that is not replicated reads the streams themselves."""
        plan, config = self.plan, self.plan.config
        tile, last, ready = plan.tiles["out"], 2 * config.num_hidden_layers, "stream"
        norm = self.width * config.hidden_size if config.pre_norm_lane_agg else self.norm_bytes
        mean = plan.sends_at_end and not config.pre_norm_lane_agg
        if plan.sends_at_end:
            number, boxes, ready = len(plan.messages) - 1, ["box"] if plan.ranks > 1 else [], "final"
            self.add("final", None, tile.count, f"{tile.rows} rows of the hidden state",
                     ["STREAM", "FINAL_NORM", "RING", *boxes], ["RING", "FINAL", *boxes], "stream", "final",
                     norms=norm if mean else 0, sends=number, lands=(Land(last, number, True, True),))  # fmt: skip
        together = config.lm_head_type == "lane"
        loads = self.loads("head", together)
        parts = ["HEAD_PARTS"] if together else []
        self.add("head", None, len(loads), self.rows("head", together),
                 ["FINAL" if plan.sends_at_end else "STREAM", "HEAD", *([] if mean else ["FINAL_NORM"])],
                 [*parts, "logit_box"], ready, loads=loads, norms=0 if mean else norm)  # fmt: skip
        self.add("draw", None, plan.score_chunks, f"{plan.score_chunk} token ids", ["logit_box", "SEEN"],
                 ["logit_box", "BEST_SCORES", "BEST_TOKENS"], signals="scores")  # fmt: skip
        self.select(selects)
        self.add("agree", None, 0, "", ["BEST_SCORES", "BEST_TOKENS"], ["TOKENS", "SEEN"], "scores",
                 waiters=plan.programs)  # fmt: skip

    def select(self, kinds: Sequence[str]) -> None:
        """Rounds that count the scores' keys, eight bits at a time, until it is known which tokens are kept."""
        plan, ids = self.plan, f"{self.plan.score_chunk} token ids"
        for kind in kinds:
            for digit in range(SELECT_ROUNDS):
                # All agree on the best first; who has no tokens is not asked again until the end.
                first = digit == 0 and kind == kinds[0]
                self.add(f"{kind} {digit}", None, plan.score_chunks, ids, ["BEST_SCORES" if first else "HISTOGRAMS"],
                         ["HISTOGRAMS"], "scores" if first else "select", "select",
                         waiters=plan.programs if first else None)  # fmt: skip
        if kinds:
            self.add("keep", None, plan.score_chunks, ids, ["HISTOGRAMS"], ["BEST_SCORES", "BEST_TOKENS"], "select",
                     "scores")  # fmt: skip


def syncs_per_layer(plan: Plan) -> int:
    """Waits for a counter of this rank that the busiest layer has; mailboxes are polled beside them."""
    phases = [phase for phase in token_phases(plan, 0) if phase.waits_for and phase.layer is not None]
    return max(sum(phase.layer == layer for phase in phases) for layer in range(plan.config.num_hidden_layers))


def sampling_syncs(top_k: bool, top_p: bool) -> int:
    """Waits of the draw: one, and with top-k or top-p another, and the rounds of counting of each."""
    return 1 + (top_k or top_p) + SELECT_ROUNDS * (top_k + top_p)


def check_plan(
    plan: Plan,
    phases: Sequence[Phase] | None = None,
    generations: int | None = None,
    resident: int | None = None,
) -> None:
    """Raises PlanError, naming both numbers, for a plan that could not be carried out.

    phases: those of the last position unless given. generations: messages the mailboxes hold, the plan's own unless
    given. resident: programs that the device runs at once, if known.
    """
    if resident is not None and plan.programs > resident:
        raise PlanError(f"the plan has {plan.programs} programs, the device holds {resident} at once; use no more")
    held = plan.generations if generations is None else generations
    if held < plan.generations:
        raise PlanError(f"mailboxes hold {held} messages, the schedule {plan.schedule} needs {plan.generations}")
    found = token_phases(plan, plan.context - 1) if phases is None else tuple(phases)
    for check in (_check_counters, _check_syncs, _check_messages, _check_buffers):
        check(plan, found)


def _check_counters(plan: Plan, phases: tuple[Phase, ...]) -> None:
    """Every wait is for all arrivals that come before it: fewer is a race, more never comes."""
    counts: dict[str, int] = {}
    for phase in phases:
        due = counts.get(phase.waits_for or "", 0)
        if phase.waits_for and phase.target != due:
            raise PlanError(f"{phase.place} waits for {phase.target} arrivals at {phase.waits_for}, {due} come before")
        if phase.waits_for is None and phase.name not in ("embed", "draw"):
            raise PlanError(f"{phase.place} waits for no counter (0 arrivals), but reads {', '.join(phase.reads)}")
        if max(phase.waiters, phase.arrivals) > plan.programs:
            raise PlanError(f"{phase.place} has {max(phase.waiters, phase.arrivals)} programs of {plan.programs}")
        if phase.signals:
            counts[phase.signals] = counts.get(phase.signals, 0) + phase.arrivals


def _check_syncs(plan: Plan, phases: tuple[Phase, ...]) -> None:
    for layer in range(plan.config.num_hidden_layers):
        syncs = sum(phase.layer == layer and phase.waits_for is not None for phase in phases)
        if syncs > MOST_SYNCS:
            raise PlanError(f"layer {layer} has {syncs} syncs, at most {MOST_SYNCS} are meant")


def _check_messages(plan: Plan, phases: tuple[Phase, ...]) -> None:
    """What lands was sent before, is what the schedule says, and is re-armed when it is landed for the last time."""
    sent: dict[int, int] = {}
    last: dict[int, tuple[Phase, Land]] = {}
    for phase in phases:
        if phase.sends is not None:
            if phase.sends != len(sent):
                raise PlanError(f"{phase.place} sends message {phase.sends}, the next is {len(sent)}")
            sent[2 * plan.config.num_hidden_layers if phase.module is None else phase.module] = phase.sends
        for land in phase.lands:
            if sent.get(land.module) != land.number:
                has = f"message {sent[land.module]}" if land.module in sent else f"none of {len(sent)} sent messages"
                raise PlanError(f"{phase.place} lands message {land.number} of module {land.module}, which is {has}")
            if land.module in last and last[land.module][1].rearms:
                raise PlanError(
                    f"{last[land.module][0].place} re-arms message {land.number}, which {phase.place} lands once more"
                )
            last[land.module] = (phase, land)
        if phase.name in ("output", "down") and phase.module is not None:
            wanted = plan.schedule.steps[phase.module].lands
            got = tuple(Landing(land.module, land.with_own) for land in phase.lands)
            if got != wanted:
                raise PlanError(f"{phase.place} lands {_modules(got)}, the schedule has {_modules(wanted)}")
    for module, number in sent.items():
        if module not in last or not last[module][1].rearms:
            raise PlanError(f"message {number} of module {module} is sent, and re-armed in 0 of {len(phases)} phases")


def _modules(lands: Sequence[Landing]) -> str:
    return f"modules {[landing.module for landing in lands]}"


def _check_buffers(plan: Plan, phases: tuple[Phase, ...]) -> None:
    """What is read was written earlier in the token, or is there from before it."""
    there = {"KEY_CACHE", "VALUE_CACHE", "SEEN", "RING", "box", "EMBEDDING", "HEAD"}
    for phase in phases:
        missing = [name for name in phase.reads if name not in there and not name.endswith(("_WEIGHT", "_NORM"))]
        if missing:
            raise PlanError(f"{phase.place} reads {', '.join(missing)}, written by none of the phases before it")
        there |= set(phase.writes)
