"""Decode speed of one request, by rules that make two numbers comparable.

Every runner is gated first: its logits against the reference. Then rounds go over all variants in turn, on the same
processes, weights and prompt; medians and ratios within a round are the result, for absolute times move with the
machine. Shape suffixes: R ranks, n tokens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from laneformer.config import LaneConfig
from laneformer.infer.peers import PEERS, Peers
from laneformer.infer.ranks import RankSettings
from laneformer.infer.reference import Verdict, gate_tokens, judge, reference_logits
from laneformer.infer.request import Request, RequestError
from laneformer.infer.session import Session, Timing
from laneformer.infer.tokenizer import Text

BASELINE = "tensor-parallel"
# Times a round only reads the weights; the median of them is that round's floor.
READS = 5
# Tokens decoded once per variant before the rounds, not measured.
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class BenchSettings:
    """What to measure: every schedule over every number of ranks and link latency, `rounds` times in turn."""

    folder: str
    ranks: tuple[int, ...] = (2,)
    schedules: tuple[str, ...] = (BASELINE, "delayed:4", "ladder", "silent")
    latencies_us: tuple[float, ...] = (0.0,)
    prompt_tokens: int = 64
    new_tokens: int = 64
    rounds: int = 5
    dtype: str | None = None
    runner: str = "compiled"
    exchange: str = "auto"
    against: tuple[str, ...] = ()
    threads: int | None = None
    prompt_file: str | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 1), ("new_tokens", 2), ("rounds", 1)):
            if getattr(self, name) < least:
                raise RequestError(f"{name.replace('_', ' ')} must be at least {least}, got {getattr(self, name)}")
        for latency in self.latencies_us:
            if not 0 <= latency < math.inf:
                raise RequestError(f"a link latency must be 0 us or above, got {latency}")
        unknown = [peer for peer in self.against if peer not in PEERS]
        if unknown:
            raise RequestError(f"no peer {unknown[0]!r}; there are {', '.join(PEERS)}")


@dataclass(frozen=True)
class Variant:
    """One row of the result."""

    schedule: str
    runner: str
    ranks: int
    latency_us: float

    @property
    def baseline(self) -> Variant:
        """The standard tensor parallelism that this is compared with: same runner, ranks and link."""
        return Variant(BASELINE, self.runner, self.ranks, self.latency_us)


@dataclass
class Samples:
    """What the rounds measured of a variant: one entry a round."""

    itl_s: list[np.ndarray] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    wait_s: list[list[float]] = field(default_factory=list)
    head_wait_s: list[list[float]] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)

    def add(self, timing: Timing, read_s: float) -> None:
        """Takes one round. Waits are the median over tokens of each rank; the first token is prefill's."""
        self.ttft_s.append(timing.at_s[0])
        self.itl_s.append(np.diff(timing.at_s))
        self.wait_s.append([float(np.median(waits[1:])) for waits in timing.wait_s])
        self.head_wait_s.append([float(np.median(waits[1:])) for waits in timing.head_wait_s])
        self.read_s.append(read_s)

    @property
    def round_itl_s(self) -> np.ndarray:
        """Each round's median inter-token time."""
        return np.array([np.median(times) for times in self.itl_s])


class Bench:
    """A running comparison; `rounds()` measures, `samples` holds what came. `say` hears what is going on."""

    def __init__(self, settings: BenchSettings, say: Callable[[str], None] = lambda text: None) -> None:
        self.settings, self.say = settings, say
        self.config = LaneConfig.from_pretrained(settings.folder)
        needed, limit = settings.prompt_tokens + settings.new_tokens, self.config.max_position_embeddings
        if needed > limit:
            raise RequestError(f"{needed} tokens in and out were asked for, but the model has {limit} positions")
        self.samples: dict[Variant, Samples] = {}
        self.gates: dict[str, Verdict] = {}
        self.sessions: dict[int, Session] = {}
        self.notes: list[str] = []
        self._peers: Peers | None = None
        self._resources = ExitStack()
        self.prompt = bench_prompt(settings, self.config)

    def __enter__(self) -> Bench:
        try:
            self._open()
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()

    def _open(self) -> None:
        settings = self.settings
        capacity = settings.prompt_tokens + settings.new_tokens
        # The static cache of every runner, peers too, has the same size.
        capacity = min(-(-capacity // 64) * 64, self.config.max_position_embeddings)
        self.capacity = capacity
        schedules = tuple(dict.fromkeys((*settings.schedules, "checkpoint")))
        for ranks in settings.ranks:
            self.say(f"starting {ranks} rank{'s' if ranks > 1 else ''} with the {settings.runner} runner")
            session = Session(
                RankSettings(
                    settings.folder, ranks, schedules, settings.runner, settings.exchange, settings.dtype, capacity,
                    settings.threads, device=settings.device,
                )
            )  # fmt: skip
            self.sessions[ranks] = self._resources.enter_context(session)
            self.notes += [note for note in session.notes if note not in self.notes]
        if settings.against:
            self.say("starting transformers")
            threads = settings.threads or usable_cores()
            peers = Peers(settings.folder, self.dtype, threads, capacity)
            self._peers = self._resources.enter_context(peers)
        self._gate()

    @property
    def dtype(self) -> str:
        """The type of the weights while decoding."""
        return self.settings.dtype or self.config.torch_dtype

    def _gate(self) -> None:
        """Checks every schedule on every number of ranks, and the peers; raises GateError for one that is wrong."""
        tokens = gate_tokens(self.config)
        wanted = list(dict.fromkeys([*self.settings.schedules, *([BASELINE] if self._peers else [])]))
        for schedule in wanted:
            self.say(f"checking {schedule} against the reference")
            expected, name = reference_logits(self.settings.folder, tokens, schedule, self.dtype)
            for ranks, session in self.sessions.items():
                if schedule in self.settings.schedules:
                    logits = session.logits(tokens, schedule, len(tokens) // 2)
                    self._pass(f"{schedule}, {ranks} ranks", judge(logits, expected, self.dtype, name))
            if self._peers and schedule == BASELINE:
                self._pass("transformers", judge(self._peers.logits(tokens), expected, self.dtype, name))

    def _pass(self, name: str, verdict: Verdict) -> None:
        self.gates[name] = verdict
        if not verdict.passed:
            raise GateError(
                f"{name}: the logits differ by {verdict.error:.1e} of the largest one from the {verdict.reference} "
                f"reference, more than {verdict.tolerance:.0e}; no speed is measured for a wrong result"
            )

    def variants(self) -> Iterator[Variant]:
        """Every row, in the order of a round. A single rank has no link, so only latency 0."""
        for ranks, session in self.sessions.items():
            for latency in self.settings.latencies_us if ranks > 1 else (0.0,):
                for schedule in self.settings.schedules:
                    yield Variant(schedule, session.runner, ranks, latency)
        for peer in self.settings.against:
            yield Variant("dense", peer, 1, 0.0)

    def rounds(self) -> Iterator[tuple[int, Variant]]:
        """Measures all rounds; yields each (round, variant) once it is measured."""
        variants = list(self.variants())
        for variant in variants:
            self._time(variant, WARM_UP_TOKENS)
        for number in range(self.settings.rounds):
            reads = {ranks: float(np.median(session.read_seconds(READS))) for ranks, session in self.sessions.items()}
            # Another order each round, so that no variant always follows the same one.
            for variant in variants[number % len(variants) :] + variants[: number % len(variants)]:
                read_s = reads.get(variant.ranks, min(reads.values()))
                timing = self._time(variant, self.settings.new_tokens)
                self.samples.setdefault(variant, Samples()).add(timing, read_s)
                yield number, variant

    def _time(self, variant: Variant, count: int) -> Timing:
        if variant.runner in PEERS:
            assert self._peers is not None
            at_s = self._peers.timed(variant.runner, self.prompt, count)
            return Timing(tuple(at_s), ((0.0,) * count,), ((0.0,) * count,), ())
        return self.sessions[variant.ranks].timed(
            Request(
                self.prompt,
                count,
                schedule=variant.schedule,
                link_latency_us=variant.latency_us,
                ignore_end=True,
            )
        )

    def streamed_bytes(self, variant: Variant) -> int:
        """Bytes of weights one token reads over all ranks."""
        session = self.sessions.get(variant.ranks) or next(iter(self.sessions.values()))
        return sum(session.streamed_bytes)


class GateError(RuntimeError):
    """A runner's logits are wrong, so its speed means nothing."""


def bench_prompt(settings: BenchSettings, config: LaneConfig) -> tuple[int, ...]:
    """The first `prompt_tokens` tokens of the prompt file, or random ids, the same every time, without one."""
    count = settings.prompt_tokens
    if settings.prompt_file is None:
        return tuple(int(i) for i in np.random.default_rng(1).integers(0, config.vocab_size, count))
    try:
        text = Path(settings.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the prompt file cannot be read: {error}") from None
    ids = Text.from_folder(settings.folder).encode(text)
    if len(ids) < count:
        raise RequestError(f"{settings.prompt_file} has {len(ids)} tokens, fewer than the prompt's {count}")
    return tuple(ids[:count])


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_bench(
    settings: BenchSettings,
    say: Callable[[str], None] = lambda text: None,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Measures everything the settings ask for; the document of docs/bench.schema.json."""
    from laneformer.infer.report import document

    with Bench(settings, say) as bench:
        total = settings.rounds * len(list(bench.variants()))
        step(0, total)
        for done, _ in enumerate(bench.rounds(), 1):
            step(done, total)
        return document(bench)


def parse_list(text: str, kind: Callable[[str], Any], name: str) -> tuple[Any, ...]:
    """The items of a comma-separated option; raises RequestError naming the option and the item."""
    items: list[Any] = []
    for item in text.split(","):
        try:
            items.append(kind(item.strip()))
        except ValueError:
            raise RequestError(
                f"{name} has {item!r}, expected numbers with commas between them, as in {name} 1,2"
            ) from None
    if len(set(items)) < len(items):
        raise RequestError(f"{name} names {text} with something twice")
    return tuple(items)
