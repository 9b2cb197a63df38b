"""What the persistent kernel does for one token: phases, tiles, mailboxes, from a config, a schedule and a device.

A plan is arithmetic: it runs nothing. kernels/decode.py is written for any plan; kernels/twin.py runs one with
laneformer.ops and checks every signal. Sizes count elements unless they say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from laneformer.config import LaneConfig
from laneformer.schedule import Own, Schedule

COUNTERS = ("stream", "qkv", "attention", "middle", "hidden_units", "final", "scores", "select")
# Words of what peers write beside messages: an abort block (as in kernels/sync.py), and control words.
ABORT_WORDS = 16
CONTROL_WORDS = 16
# Logit boxes of two tokens are enough: a rank needs its peers' logits of a token before it can begin the next.
LOGIT_GENERATIONS = 2
# Parts of shared memory begin at multiples of so many words.
PART_WORDS = 64


class PlanError(ValueError):
    """A plan that cannot be carried out; the message names both numbers."""


@dataclass(frozen=True)
class DeviceShape:
    """What of a device the plan depends on: programs that are resident at once, and elements of a weight tile."""

    programs: int
    tile: int = 16384
    most_columns: int = 1024
    block_positions: int = 32

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise PlanError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a weight tile, powers of two, over a matrix [rows, columns]."""

    rows: int
    columns: int
    of_rows: int
    of_columns: int

    @property
    def count(self) -> int:
        """Tiles that the rows are cut into."""
        return -(-self.of_rows // self.rows)


def power_of_two(count: int) -> int:
    """The smallest power of two of at least `count`."""
    return 1 << max(0, count - 1).bit_length()


def tile_for(rows: int, columns: int, device: DeviceShape) -> Tile:
    """A tile of about `device.tile` elements that spreads the rows over the programs.

    Depends on one lane's matrix and the device only, so that any number of ranks adds in the same order.
    """
    wide = min(power_of_two(columns), device.most_columns)
    # A narrower tile wastes nothing where it divides the columns; below 256 columns loads grow too short.
    while wide > 256 and columns % wide:
        narrower = wide // 2
        if columns % narrower and power_of_two(columns) == wide:
            break
        wide = narrower
    share = power_of_two(-(-rows // device.programs))
    return Tile(max(1, min(share, device.tile // wide)), wide, rows, columns)


def lane_slots(lanes: int) -> tuple[int, ...]:
    """The slot of each lane among the next power of two of them, so that pairwise sums follow the balanced tree."""

    def place(lo: int, hi: int, first: int, width: int) -> dict[int, int]:
        if hi - lo == 1:
            return {lo: first}
        middle = lo + (hi - lo) // 2
        return place(lo, middle, first, width // 2) | place(middle, hi, first + width // 2, width // 2)

    placed = place(0, lanes, 0, power_of_two(lanes))
    return tuple(placed[lane] for lane in range(lanes))


def ring_generations(schedule: Schedule, ends: bool) -> int:
    """Messages a mailbox must hold, at least 4; `ends` says that the head sends one more message a token.

    A sender fills a slot again G messages later. It must by then have landed a message that the reader sent after its
    last read of that slot: with f(s) the number of messages that are read for good before message s is sent, that is
    f(f(s) - 1) > s - G for every s, since what the sender landed last was itself sent after f(f(s) - 1) were read.
    """
    order = message_order(schedule, ends)
    end = [schedule.last_use[module] if module < len(schedule.steps) else module for module in order]
    done_before: list[int] = []
    for token in range(8):
        for i, module in enumerate(order):
            unread = [j for j in range(i + 1) if j == i or end[j] >= module]
            done_before.append(token * len(order) + unread[0])
    need = 4
    for s in range(4 * len(order), len(done_before)):
        reader_done = done_before[done_before[s] - 1]
        need = max(need, s - reader_done + 1)
    return need


def shared_words(config: LaneConfig, schedule: Schedule, ranks: int) -> int:
    """Words that peers write into on one rank, whatever the device."""
    return Plan(config, schedule, ranks, DeviceShape(1), 1).shared_words


def message_order(schedule: Schedule, ends: bool) -> tuple[int, ...]:
    """Modules that send, in order; the head's exchange counts as module 2N."""
    sends = [n for n, step in enumerate(schedule.steps) if step.sends]
    return tuple(sends + ([len(schedule.steps)] if ends else []))


@dataclass(frozen=True)
class Plan:
    """The whole of it. Raises PlanError for what does not fit, before anything is allocated or started.

    context: positions the cache holds at most. ranks must divide the lanes.
    """

    config: LaneConfig
    schedule: Schedule
    ranks: int
    device: DeviceShape
    context: int

    def __post_init__(self) -> None:
        config = self.config
        if self.ranks < 1 or config.num_lanes % self.ranks:
            fits = [r for r in range(1, config.num_lanes + 1) if config.num_lanes % r == 0]
            raise PlanError(
                f"{config.num_lanes} lanes cannot be shared equally by {self.ranks} ranks; they may be {fits}"
            )
        if self.schedule.num_layers != config.num_hidden_layers:
            raise PlanError(f"the schedule has {self.schedule.num_layers} layers, the model {config.num_hidden_layers}")
        if config.vocab_size >= 1 << 24:
            raise PlanError(
                f"the device draws from fewer than {1 << 24} tokens, the vocabulary has {config.vocab_size}"
            )
        if not 1 <= self.context <= config.max_position_embeddings:
            raise PlanError(f"context must be 1..{config.max_position_embeddings}, got {self.context}")

    @property
    def lanes(self) -> int:
        """Lanes of a rank."""
        return self.config.num_lanes // self.ranks

    @property
    def programs(self) -> int:
        """Programs of a rank."""
        return self.device.programs

    @property
    def presummed(self) -> bool:
        """Whether a rank's lanes are one subtree of the sum over lanes, so that it sends their sum only."""
        return power_of_two(self.config.num_lanes) == self.config.num_lanes

    @property
    def slots(self) -> int:
        """Slots of a message, a power of two."""
        if self.presummed and self.ranks > 1:
            return self.ranks
        return power_of_two(self.config.num_lanes)

    @property
    def valid_slots(self) -> int:
        """Bit mask of the slots that somebody fills."""
        if self.presummed:
            return (1 << self.slots) - 1
        return sum(1 << slot for slot in lane_slots(self.config.num_lanes))

    @property
    def q_heads(self) -> int:
        """Query heads of a lane."""
        return self.config.num_attention_heads // self.config.num_lanes

    @property
    def kv_heads(self) -> int:
        """Key-value heads of a lane."""
        return self.config.kv_heads // self.config.num_lanes

    @property
    def units(self) -> int:
        """Feed-forward units of a lane."""
        return self.config.intermediate_size // self.config.num_lanes

    @property
    def head_rows(self) -> int:
        """Rows of a lane's slice of the head."""
        if self.config.lm_head_type == "lane":
            return self.config.vocab_size
        return -(-self.config.vocab_size // self.config.num_lanes)

    @cached_property
    def tiles(self) -> dict[str, Tile]:
        """The weight tiles of each matrix of one lane; out and down share their rows, which a program owns."""
        config, device = self.config, self.device
        hidden, head = config.hidden_size, config.head_size
        out = tile_for(hidden, self.q_heads * head, device)
        down = tile_for(hidden, self.units, device)
        rows = min(out.rows, down.rows)
        return {
            "qkv": tile_for((self.q_heads + 2 * self.kv_heads) * head, hidden, device),
            "out": Tile(rows, out.columns, hidden, out.of_columns),
            "gate_up": tile_for(self.units, hidden, device),
            "down": Tile(rows, down.columns, hidden, down.of_columns),
            "head": tile_for(self.head_rows, hidden, device),
        }

    @property
    def sends_at_end(self) -> bool:
        """Whether the head begins with an exchange of normalised streams."""
        return self.config.lm_head_type == "replicate"

    @property
    def messages(self) -> tuple[int, ...]:
        """Modules that send, in order; 2N is the head."""
        return message_order(self.schedule, self.sends_at_end)

    @property
    def generations(self) -> int:
        """Messages a mailbox holds."""
        return ring_generations(self.schedule, self.sends_at_end)

    @property
    def logit_slots(self) -> int:
        """Slots of a logit message: one, unless all lanes of a head are added up."""
        if self.config.lm_head_type != "lane":
            return 1
        return self.ranks if self.presummed else self.slots

    @property
    def shared_sizes(self) -> dict[str, int]:
        """Words of each part of what peers write into, in order."""
        return {
            "box": self.generations * self.slots * self.config.hidden_size,
            "logit_box": LOGIT_GENERATIONS * self.logit_slots * self.config.vocab_size,
            "abort": ABORT_WORDS,
            "control": CONTROL_WORDS,
        }

    @property
    def shared_words(self) -> int:
        """Words of all of it."""
        return sum(-(-size // PART_WORDS) * PART_WORDS for size in self.shared_sizes.values())

    @property
    def signals_per_token(self) -> int:
        """More than any counter grows during a token."""
        return (self.config.num_hidden_layers + 32) * self.programs

    @property
    def most_lands(self) -> int:
        """The most messages that one module lands."""
        return max(1, *(len(step.lands) for step in self.schedule.steps))

    @property
    def position_blocks(self) -> int:
        """The most blocks of positions a layer's attention has."""
        return -(-self.context // self.device.block_positions)

    @property
    def score_chunk(self) -> int:
        """Token ids that a program scores at a time."""
        return min(1024, power_of_two(-(-self.config.vocab_size // self.programs)))

    @property
    def score_chunks(self) -> int:
        """Chunks of the vocabulary."""
        return -(-self.config.vocab_size // self.score_chunk)

    @property
    def row_programs(self) -> int:
        """Programs that own rows of the hidden dimension."""
        return min(self.programs, self.tiles["out"].count)

    def arrivals(self, phase: str) -> int:
        """Programs of a rank that have work in a phase, and so signal; attention's depends on the position."""
        counts = {
            "qkv": self.lanes * self.tiles["qkv"].count,
            "gate_up": self.lanes * self.tiles["gate_up"].count,
            "scores": self.score_chunks,
        }
        return min(self.programs, counts[phase]) if phase in counts else self.row_programs

    def attention_tasks(self, layer: int, position: int) -> int:
        """(lane, key-value head, block) tasks of a layer for the token at `position`."""
        window = self.config.window(layer)
        length = position + 1 if window is None else min(window, position + 1)
        return self.lanes * self.kv_heads * -(-length // self.device.block_positions)

    def schedule_rows(self) -> tuple[list[list[int]], list[float]]:
        """Each module's row (sends, message, lands, then (message, with own, last read) per landing), and own factors.

        `message` is the module's number among the token's messages, -1 if it sends none.
        """
        number = {module: i for i, module in enumerate(self.messages)}
        rows, own = [], []
        for n, step in enumerate(self.schedule.steps):
            row = [int(step.sends), number.get(n, -1), len(step.lands)]
            for landing in step.lands:
                last = self.schedule.last_use[landing.module] == n
                row += [number[landing.module], int(landing.with_own), int(last)]
            rows.append(row + [0] * (3 + 3 * self.most_lands - len(row)))
            own.append(0.0 if step.own is Own.NONE else step.own.scale(self.config.num_lanes))
        rows.append([int(self.sends_at_end), number.get(2 * self.config.num_hidden_layers, -1)]
                    + [0] * (1 + 3 * self.most_lands))  # fmt: skip
        return rows, [*own, 0.0]
