"""Runs all programs of Triton kernels, on one or several ranks, in one process under a seeded scheduler.

Kernel source is unchanged: every program is a greenlet under Triton's interpreter, and another one may go on wherever a
program polls, does an atomic, or passes a block barrier. So barriers between programs end, several ranks meet, and the
same seed gives the same run. A run in which nothing can change any more is a Deadlock that says who waits for what.

`memory="weak"` also delays and reorders stores and serves stale loads, see kernels/weak_memory.py. Needs the variable
TRITON_INTERPRET=1 from before triton was imported, and the package greenlet.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from laneformer.kernels.interpreted import mended
from laneformer.kernels.memory_model import Memory, Region, SequentialMemory
from laneformer.kernels.weak_memory import WeakMemory

# Rounds in which every program polls and nothing changes, before it is a deadlock.
PATIENCE = 3
MOST_SWITCHES = 2_000_000


class Deadlock(RuntimeError):
    """Nothing can change any more; the text says which programs wait where, and for what."""


class ProgramError(RuntimeError):
    """A program raised; the text names its rank and number."""


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid and arguments, and the rank whose device it runs on (scope gpu is one rank)."""

    kernel: Any
    grid: tuple[int, ...]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0


@dataclass(frozen=True)
class Report:
    """What a run took: switches between programs, and polls that found nothing new."""

    switches: int
    idle_polls: int


class Program:
    """One program of a launch while it runs."""

    def __init__(self, number: int, rank: int, place: tuple[int, int, int], grid: tuple[int, ...]) -> None:
        self.number, self.rank, self.place, self.grid = number, rank, place, grid
        self.greenlet: Any = None
        # What each polled place held last, and the memory's version when the last poll found nothing new.
        self.seen: dict[int, bytes] = {}
        self.quiet_at: int | None = None
        self.chosen_at = 0
        self.polled: tuple[int, Any] = (0, None)

    def __str__(self) -> str:
        return f"program {self.place[0]} of rank {self.rank}"


class Scheduler:
    """Chooses, with a seed, who goes on; programs that wait in vain go on seldom."""

    def __init__(self, seed: int, memory: Memory, patience: int, most_switches: int) -> None:
        self.rng, self.memory = random.Random(seed), memory
        self.patience, self.most_switches = patience, most_switches
        self.programs: list[Program] = []
        self.running: Program | None = None
        self.switches = self.idle_polls = 0
        self.main: Any = None

    def pause(self) -> None:
        """Lets the scheduler choose again."""
        self.main.switch()

    def polled(self, address: int, value: Any) -> None:
        """Notes what the running program read where it may be waiting."""
        program = self.running
        assert program is not None
        found = np.asarray(value).tobytes()
        quiet = program.seen.get(address) == found
        program.seen[address] = found
        program.polled = address, value
        program.quiet_at = self.memory.version if quiet else None
        self.idle_polls += quiet

    def speeds(self) -> list[float]:
        """How often each program is chosen: in every other run some ranks and programs are much slower than others."""
        spread = self.rng.choice((0.0, 3.0))
        ranks = {program.rank: 10 ** -self.rng.uniform(0, spread) for program in self.programs}
        return [ranks[program.rank] * 10 ** -self.rng.uniform(0, spread / 2) for program in self.programs]

    def run(self) -> Report:
        """Until every program has ended; raises Deadlock or ProgramError."""
        live, vain, speeds = list(self.programs), 0, self.speeds()
        while live:
            awake = [p for p in live if p.quiet_at is None or p.quiet_at != self.memory.version]
            if awake:
                vain = 0
            elif not self.memory.settle():
                vain += 1
                if vain > self.patience * len(live):
                    raise Deadlock(report(live, self.memory))
            # Now and then one that waits in vain polls again.
            choice = awake if awake and self.rng.random() < 0.95 else live
            chosen = self.rng.choices(choice, [speeds[program.number] for program in choice])[0]
            if vain:
                # Before it counts as a deadlock every program has had its turns, slow ones too.
                chosen = min(live, key=lambda program: program.chosen_at)
            self.running = chosen
            self.switches += 1
            chosen.chosen_at = self.switches
            if self.switches > self.most_switches:
                raise Deadlock(f"no end after {self.most_switches} switches\n" + report(live, self.memory))
            chosen.greenlet.switch()
            self.memory.drift()
            if chosen.greenlet.dead:
                live.remove(chosen)
        self.memory.finish()
        return Report(self.switches, self.idle_polls)


def simulate(
    launches: Sequence[Launch],
    seed: int = 0,
    memory: str = "sequential",
    names: Mapping[str, Any] | None = None,
    patience: int = PATIENCE,
    most_switches: int = MOST_SWITCHES,
) -> Report:
    """Runs the launches at the same time. names: tensors that kernels reach through tables of addresses.

    patience: how often every program may poll in vain before it is a deadlock; kernels that give up by themselves need
    more than their limit. Raises Deadlock, ProgramError, ValueError for an unknown memory, and ImportError without
    greenlet.
    """
    if memory not in ("sequential", "weak"):
        raise ValueError(f"no memory {memory!r}; there are sequential and weak")
    try:
        import greenlet
    except ImportError:
        raise ImportError("the simulator needs greenlet: pip install laneformer[simulate]") from None
    regions = regions_of(launches, names or {})
    ranks = 1 + max((launch.rank for launch in launches), default=0)
    rng = random.Random(f"memory {seed}")
    model = WeakMemory(regions, ranks, rng) if memory == "weak" else SequentialMemory(regions)
    scheduler = Scheduler(seed, model, patience, most_switches)
    scheduler.main = greenlet.getcurrent()
    with patched(scheduler), mended():
        for launch in launches:
            for program, body in bodies(launch, len(scheduler.programs)):
                program.greenlet = greenlet.greenlet(guarded(scheduler, program, body))
                scheduler.programs.append(program)
        model.start(scheduler.programs)
        try:
            return scheduler.run()
        finally:
            for program in scheduler.programs:
                if program.greenlet and not program.greenlet.dead:
                    program.greenlet.throw(greenlet.GreenletExit)


def guarded(scheduler: Scheduler, program: Program, body: Any) -> Any:
    """A program's body whose errors say whose they are."""

    def run() -> None:
        try:
            body()
        except Exception as error:
            raise ProgramError(f"{program}: {error!r}") from error
        finally:
            scheduler.memory.ended(program)

    return run


def bodies(launch: Launch, number: int) -> Iterator[tuple[Program, Any]]:
    """Every program of a launch, and what it runs."""
    from triton.runtime import interpreter

    if not isinstance(launch.kernel, interpreter.InterpretedFunction):
        raise ValueError("the kernel is compiled, not interpreted: set TRITON_INTERPRET=1 before triton is imported")
    interpreter._patch_lang(launch.kernel.fn)
    function = launch.kernel.rewrite()
    executor = interpreter.GridExecutor(function, launch.kernel.arg_names, launch.grid)
    given = inspect.getcallargs(function, *launch.args, **launch.kwargs)
    args = {
        name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
        for name, value in given.items()
    }
    grid = (*launch.grid, 1, 1)[:3]
    for place in np.ndindex(*grid):
        where = (int(place[0]), int(place[1]), int(place[2]))
        yield Program(number, launch.rank, where, grid), lambda: function(**dict(args))
        number += 1


def regions_of(launches: Sequence[Launch], names: Mapping[str, Any]) -> list[Region]:
    """The memory of all tensors that are named or passed, each piece once."""
    found: dict[int, Region] = {}

    def add(name: str, tensor: Any) -> None:
        if hasattr(tensor, "data_ptr") and tensor.numel() and tensor.data_ptr() not in found:
            found[tensor.data_ptr()] = Region.of(name, tensor)

    for name, tensor in names.items():
        add(name, tensor)
    for launch in launches:
        for name, tensor in zip(launch.kernel.arg_names, launch.args, strict=False):
            add(f"{name} of rank {launch.rank}", tensor)
        for name, tensor in launch.kwargs.items():
            add(f"{name} of rank {launch.rank}", tensor)
    return sorted(found.values(), key=lambda region: region.start)


def report(live: Sequence[Program], memory: Memory) -> str:
    """Who waits where and for what, equal ones in one line."""
    groups: dict[str, list[Program]] = {}
    for program in live:
        address, value = program.polled
        what = f"{waiting_line(program)} for {memory.name_of(address)}, which holds {shown(value)}"
        groups.setdefault(what, []).append(program)
    lines = []
    for what, programs in groups.items():
        who = ", ".join(f"{p.place[0]} of rank {p.rank}" for p in programs)
        lines.append(f"program{'s' if len(programs) > 1 else ''} {who} wait{'' if len(programs) > 1 else 's'} {what}")
    return "\n".join(lines)


def shown(value: Any) -> str:
    """A polled value, or how many of a block."""
    array = np.asarray(value)
    return str(array.reshape(-1)[0]) if array.size == 1 else f"{array.size} words from {array.reshape(-1)[0]} on"


def waiting_line(program: Program) -> str:
    """Function, file and line of the kernel source at which a program stands, outermost and innermost."""
    frame, found = program.greenlet.gr_frame, []
    own = [Path(__file__).with_name(f"{name}.py") for name in ("simulate", "memory_model", "weak_memory")]
    while frame is not None:
        file = frame.f_code.co_filename
        if "/triton/" not in file and Path(file) not in own:
            found.append(f"{frame.f_code.co_name} ({Path(file).name}:{frame.f_lineno})")
        frame = frame.f_back
    inner = [place for place in found if not place.startswith(("run ", "<lambda>"))]
    return f"in {inner[0]}" + (f" called from {inner[1]}" if len(inner) > 1 else "") if inner else "nowhere"


@contextmanager
def patched(scheduler: Scheduler) -> Iterator[None]:
    """Triton's interpreter with its memory operations going through the scheduler; put back afterwards."""
    from triton.runtime import interpreter

    builder, memory = interpreter.InterpreterBuilder, scheduler.memory
    handle, np_type = interpreter.TensorHandle, interpreter._get_np_dtype
    sems = {member: name.lower() for name, member in interpreter._ir.MEM_SEMANTIC.__members__.items()}
    scopes = {interpreter._ir.MEM_SYNC_SCOPE.SYSTEM: "sys", interpreter._ir.MEM_SYNC_SCOPE.GPU: "gpu",
              interpreter._ir.MEM_SYNC_SCOPE.CTA: "cta"}  # fmt: skip
    kept = {name: builder.__dict__[name] for name in (
        "create_load", "create_store", "create_masked_load", "create_masked_store", "create_atomic_cas",
        "create_atomic_rmw", "create_barrier", "create_get_program_id", "create_get_num_programs")}  # fmt: skip

    def current() -> Program:
        assert scheduler.running is not None
        return scheduler.running

    def load(self: Any, ptrs: Any, mask: Any, other: Any, cache: Any, eviction: Any, volatile: bool) -> Any:
        dtype = ptrs.get_element_ty()
        default = np.zeros(ptrs.data.shape, np_type(dtype)) if other is None else other.data
        if volatile:
            scheduler.pause()
        data = memory.load(current(), ptrs.data, mask.data, default, np_type(dtype), volatile)
        if volatile:
            scheduler.polled(int(np.asarray(ptrs.data).reshape(-1)[0]), data)
        return handle(data, dtype)

    def plain_load(self: Any, ptr: Any, cache: Any, eviction: Any, volatile: bool) -> Any:
        return load(self, ptr, handle(np.ones(ptr.data.shape, bool), tl_bool), None, cache, eviction, volatile)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, cache: Any, eviction: Any) -> None:
        current().quiet_at = None
        memory.store(current(), ptrs.data, value.data.astype(np_type(ptrs.get_element_ty())), mask.data)

    def plain_store(self: Any, ptr: Any, value: Any, cache: Any, eviction: Any) -> None:
        store(self, ptr, value, handle(np.ones(ptr.data.shape, bool), tl_bool), cache, eviction)

    def cas(self: Any, ptr: Any, expected: Any, value: Any, sem: Any, scope: Any) -> Any:
        scheduler.pause()
        return atomic(ptr, lambda: kept["create_atomic_cas"](self, ptr, expected, value, sem, scope), sem, scope)

    def rmw(self: Any, op: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        scheduler.pause()
        return atomic(ptr, lambda: kept["create_atomic_rmw"](self, op, ptr, value, mask, sem, scope), sem, scope, mask)

    def atomic(ptr: Any, apply: Any, sem: Any, scope: Any, mask: Any = None) -> Any:
        used = np.ones(ptr.data.shape, bool) if mask is None else mask.data
        result = memory.atomic(current(), ptr.data, used, apply, sems[sem], scopes[scope])
        if result.data.size == 1:
            scheduler.polled(int(np.asarray(ptr.data).reshape(-1)[0]), result.data)
        return result

    def barrier(self: Any) -> None:
        memory.barrier(current())
        scheduler.pause()

    def index(self: Any, axis: int) -> Any:
        return handle(np.array([current().place[axis]], dtype=np.int32), tl_int)

    def count(self: Any, axis: int) -> Any:
        return handle(np.array([current().grid[axis]], dtype=np.int32), tl_int)

    tl_bool, tl_int = interpreter.tl.int1, interpreter.tl.int32
    new = {"create_load": plain_load, "create_store": plain_store, "create_masked_load": load,
           "create_masked_store": store, "create_atomic_cas": cas, "create_atomic_rmw": rmw, "create_barrier": barrier,
           "create_get_program_id": index, "create_get_num_programs": count}  # fmt: skip
    try:
        for name, function in new.items():
            setattr(builder, name, function)
        yield
    finally:
        for name, function in kept.items():
            setattr(builder, name, function)
