"""When each phase of a token streams, syncs and waits for peers: `cost.schedule_latency` in finer steps.

A phase first passes its barrier, then streams its bytes, sends, and waits for what it lands; what does not depend on
bytes comes last. Where the phases are those that `schedule_latency` assumes, the total is the same. Everything is
arithmetic; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .cost import Assumptions
from .machines import Machine


@dataclass(frozen=True)
class Load:
    """What a phase costs, for one rank.

    idle_bytes: what could have been streamed while the busiest program of the rank was still at work. sends: a message
    and its bytes to all peers together. lands: messages that are waited for after that.
    fixed_us: what comes on top, once they are there.
    """

    name: str
    module: int | None
    stream_bytes: int
    idle_bytes: int = 0
    syncs: int = 0
    fixed_us: float = 0.0
    sends: tuple[int, int] | None = None
    lands: tuple[int, ...] = ()


@dataclass(frozen=True)
class PhaseTime:
    """Microseconds of one phase, in the order in which they pass, from `start_us` of the token on.

    sent_us, arrives_us: when its message leaves and is there; None without one.
    """

    name: str
    module: int | None
    start_us: float
    sync_us: float
    stream_us: float
    uneven_us: float
    wait_us: float
    fixed_us: float
    sends: int | None
    lands: tuple[int, ...]
    sent_us: float | None
    arrives_us: float | None

    @property
    def total_us(self) -> float:
        """All of it."""
        return self.sync_us + self.stream_us + self.uneven_us + self.wait_us + self.fixed_us


@dataclass(frozen=True)
class TokenTime:
    """The phases of a predicted token."""

    phases: tuple[PhaseTime, ...]

    @property
    def total_us(self) -> float:
        """The whole token."""
        return sum(phase.total_us for phase in self.phases)

    def part_us(self, part: str, name: str | None = None) -> float:
        """Microseconds of `stream_us`, `uneven_us`, `sync_us`, `fixed_us` or `wait_us` in all phases (of a name)."""
        return sum(getattr(phase, part) for phase in self.phases if name in (None, phase.name))


def phase_times(
    loads: Iterable[Load], machine: Machine, ranks: int, assumptions: Assumptions, uneven: bool = True
) -> TokenTime:
    """Plays a token phase by phase on one of `ranks` equal ranks.

    With `uneven` a phase lasts until its busiest program is done, which draws its even share of the bandwidth and no
    more; without, all bandwidth is used until the last byte.
    """
    rate = machine.rank_bandwidth(ranks) * assumptions.efficiency / 1e6
    arrives: dict[int, float] = {}
    done: list[PhaseTime] = []
    now = 0.0
    for load in loads:
        start = now
        sync, stream = load.syncs * assumptions.sync_us, load.stream_bytes / rate
        idle = load.idle_bytes / rate if uneven else 0.0
        now += sync + stream + idle
        sent, arrival = None, None
        if load.sends is not None:
            message, count = load.sends
            sent, arrival = now, now + message_us(machine, ranks, count, assumptions)
            arrives[message] = arrival
        wait = max([0.0, *(arrives[message] - now for message in load.lands)])
        now += wait + load.fixed_us
        number = None if load.sends is None else load.sends[0]
        done.append(PhaseTime(load.name, load.module, start, sync, stream, idle, wait, load.fixed_us, number,
                              load.lands, sent, arrival))  # fmt: skip
    return TokenTime(tuple(done))


def message_us(machine: Machine, ranks: int, count: int, assumptions: Assumptions) -> float:
    """How long `count` bytes to all peers together take; nothing where there are no peers."""
    device = machine.device
    if ranks == 1:
        return 0.0
    latency = device.link_latency_us if assumptions.link_latency_us is None else assumptions.link_latency_us
    return latency + (0.0 if device.link_bandwidth is None else 1e6 * count / device.link_bandwidth)
