"""Starts, watches and stops the rank processes of one run; whatever happens to one, the run ends with one clear error.

This process stays light: it computes nothing and imports no torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

from laneformer.config import LaneConfig
from laneformer.infer.device import EXCHANGES, check_device, may_use_gpu
from laneformer.infer.limits import INTERPRETED_LIMIT_S, PREFILL_CHUNK, RUNNERS, WAIT_LIMIT_S
from laneformer.infer.mailbox import generations, mailbox_bytes
from laneformer.infer.shared_memory import SharedBlock, Status
from laneformer.infer.sum_tree import SumTree
from laneformer.infer.watch import Watch
from laneformer.kernels.plan import shared_words
from laneformer.schedule import Schedule

START_LIMIT_S = 600.0
POLL_S = 0.1
LAST_WORDS_S = 0.3
STOP_S = 1.0
# Errors that only say that somebody else failed first.
CONSEQUENCES = ("WaitTimeout", "RunAborted")


# (rank, message, raw bytes) as a rank sent them.
Event = tuple[int, dict[str, Any], bytes]


class RankError(RuntimeError):
    """A rank died, was killed, raised or stalled; the message names rank, layer and module."""


@dataclass(frozen=True)
class RankSettings:
    """What a group of ranks runs: R processes over a checkpoint folder, one runner and exchange, `capacity` positions.

    schedules: text forms of all that will be asked for. threads: per rank; cores shared equally by default. dtype:
    None for the checkpoint's own. wait_limit_s: the longest a rank may wait for another or make no progress. exchange:
    by default `nccl` for a GPU a rank, else `mailbox`. device: `auto` is a GPU where torch sees one.
    """

    folder: str
    ranks: int = 1
    schedules: tuple[str, ...] = ("checkpoint",)
    runner: str = "eager"
    exchange: str = "auto"
    dtype: str | None = None
    capacity: int = 512
    threads: int | None = None
    wait_limit_s: float = WAIT_LIMIT_S
    fault: dict[str, Any] | None = None
    device: str = "auto"


class RankGroup:
    """Running ranks; a context manager. Raises RankError and ends all of them when one fails."""

    def __init__(self, settings: RankSettings) -> None:
        config = LaneConfig.from_pretrained(settings.folder)
        if settings.exchange not in EXCHANGES:
            raise ValueError(f"no exchange {settings.exchange!r}; there are {', '.join(EXCHANGES)}")
        if settings.runner not in RUNNERS:
            raise ValueError(f"no runner {settings.runner!r}; there are {', '.join(RUNNERS)}")
        check_device(settings.device)
        tree = SumTree.over(config.num_lanes, settings.ranks)
        schedules = [Schedule.parse(text, config) for text in settings.schedules]
        slots = generations(max(schedule.max_outstanding for schedule in schedules))
        # A chunk's partials, and any row that the head exchanges for one token, fit one message.
        words = max(tree.width * PREFILL_CHUNK * config.hidden_size, config.vocab_size + config.num_lanes)
        self.settings, self.config, self.ranks = settings, config, settings.ranks
        self.ready: list[dict[str, Any]] = []
        self._limit_s = settings.wait_limit_s
        if settings.runner == "persistent" and not may_use_gpu(settings.device):
            self._limit_s = max(self._limit_s, INTERPRETED_LIMIT_S)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._resources = ExitStack()
        size = Status.num_bytes(self.ranks) + mailbox_bytes(self.ranks, slots, words)
        # The persistent kernel's mailboxes lie behind the others.
        peer_offset, peer_words = -(-size // 64) * 64, 0
        if settings.runner == "persistent" and self.ranks > 1:
            peer_words = max(shared_words(config, schedule, self.ranks) for schedule in schedules)
            size = peer_offset + 4 * self.ranks * peer_words
        self._block = SharedBlock.create(size)
        self._resources.callback(self._block.close)
        modules = 2 * config.num_hidden_layers
        self.status = Status(self._block, self.ranks, modules)
        self._spec: dict[str, Any] = {
            "ranks": self.ranks, "folder": str(Path(settings.folder).resolve()), "lanes": config.num_lanes,
            "modules": modules, "block_fd": self._block.fd, "block_size": size, "slots": slots, "words": words,
            "runner": settings.runner, "exchange": settings.exchange, "dtype": settings.dtype,
            "capacity": settings.capacity, "limit_s": self._limit_s, "fault": settings.fault,
            "parent": os.getpid(), "device": settings.device, "schedules": settings.schedules,
            "peer_offset": peer_offset, "peer_words": peer_words,
        }  # fmt: skip

    def __enter__(self) -> RankGroup:
        try:
            self._start()
        except BaseException:
            self.close(at_once=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(at_once=kind is not None)

    def _start(self) -> None:
        available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        cores = len(available) or os.cpu_count() or 1
        threads = self.settings.threads or max(1, cores // self.ranks)
        # With a thread for every core there is nothing to gain by moving, and much to lose when two share one.
        pin = bool(available) and threads * self.ranks == cores
        # Only torch.distributed meets at a file; the mailbox leaves nothing even when this process is killed.
        meeting = ""
        exchange = self.settings.exchange
        if exchange in ("gloo", "nccl") or (exchange == "auto" and may_use_gpu(self.settings.device)):
            meeting = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="laneformer-"))
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.ranks > 1:
            # Threads that spin between operations would take the cores of other ranks.
            environment["OMP_WAIT_POLICY"] = "passive"
        for rank in range(self.ranks):
            ours, theirs = Pipe()
            command = [sys.executable, "-m", "laneformer.infer.worker", str(theirs.fileno())]
            self._processes.append(
                subprocess.Popen(
                    command,
                    pass_fds=(theirs.fileno(), self._block.fd),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
            theirs.close()
            self._connections.append(ours)
            own = available[rank * threads : (rank + 1) * threads] if pin else []
            spec = {"rank": rank, "threads": threads, "cores": own, "meeting": f"{meeting}/store"}
            self._send(rank, self._spec | spec)
        ready = {rank: message for rank, message, _ in self._events("ready", START_LIMIT_S)}
        self.ready = [ready[rank] for rank in range(self.ranks)]

    @property
    def process_ids(self) -> list[int]:
        """Process id of each rank."""
        return [process.pid for process in self._processes]

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        try:
            self._connections[rank].send_bytes(json.dumps(message).encode())
        except OSError:
            self._fail(rank, self._how_ended(rank))

    def call(
        self, op: str, limit_s: float = START_LIMIT_S, **arguments: Any
    ) -> Iterator[tuple[int, dict[str, Any], bytes]]:
        """Has every rank carry out an operation; yields its events as they come, until all are done."""
        if not self._processes:
            raise RankError("the ranks have ended; open a new session")
        for rank in range(self.ranks):
            self._send(rank, {"op": op, **arguments})
        yield from self._events("done", limit_s)

    def _events(self, last: str, limit_s: float) -> Iterator[Event]:
        """Messages of all ranks until each has sent its `last` one, while watching all of them."""
        open_ranks = set(range(self.ranks))
        watch = Watch(self.status, self.ranks, self._limit_s)
        deadline = time.monotonic() + limit_s
        while open_ranks:
            for connection in wait([self._connections[r] for r in open_ranks], timeout=POLL_S):
                rank = next(r for r in open_ranks if self._connections[r] is connection)
                message, raw = self._receive(rank)
                if message["event"] == last:
                    open_ranks.discard(rank)
                yield rank, message, raw
            for rank in range(self.ranks):
                if (
                    self._processes[rank].poll() is not None
                    and rank in open_ranks
                    and not self._connections[rank].poll()
                ):
                    self._fail(rank, self._how_ended(rank))
            stalled = watch.stalled()
            if stalled is not None:
                self._fail(stalled, f"made no progress for {self._limit_s:g} s")
            if time.monotonic() > deadline:
                self._fail(min(open_ranks), f"did not answer within {limit_s:g} s")

    def _receive(self, rank: int) -> tuple[dict[str, Any], bytes]:
        try:
            message = json.loads(self._connections[rank].recv_bytes())
            raw = self._connections[rank].recv_bytes() if message.get("shape") and rank == 0 else b""
        except (EOFError, OSError):
            self._fail(rank, self._how_ended(rank))
        if message["event"] == "error":
            self._fail_from(rank, message)
        return message, raw

    def _fail_from(self, rank: int, message: dict[str, Any]) -> NoReturn:
        """Ends the run over a rank's own report, looking first for the cause when it only reports a consequence."""
        if message["kind"] in CONSEQUENCES:
            self._look_for_cause(rank)
        if message["kind"] == "WaitTimeout" and message["peer"] is not None:
            self._fail(message["peer"], f"stalled: {message['text']}")
        if message["kind"] in ("CheckpointError", "ConfigError", "RequestError", "TextError", "DeviceError"):
            self.close(at_once=True)
            raise ValueError(message["text"])
        self._fail(rank, f"raised {message['kind']}: {message['text']}")

    def _look_for_cause(self, reporter: int) -> None:
        """Gives the other ranks a moment to say or show what went wrong first."""
        self.status.abort()
        deadline = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < deadline:
            for rank in range(self.ranks):
                if rank == reporter:
                    continue
                if self._connections[rank].poll(0.01):
                    try:
                        message = json.loads(self._connections[rank].recv_bytes())
                    except (EOFError, OSError):
                        self._fail(rank, self._how_ended(rank))
                    if message["event"] == "error" and message["kind"] not in CONSEQUENCES:
                        self._fail_from(rank, message)
                elif self._processes[rank].poll() is not None:
                    self._fail(rank, self._how_ended(rank))

    def _how_ended(self, rank: int) -> str:
        try:
            code = self._processes[rank].wait(LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            return "closed its control connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _fail(self, rank: int, how: str) -> NoReturn:
        where = self.status.where(rank)
        self.close(at_once=True)
        raise RankError(f"rank {rank} {how} ({where}); the run was ended")

    def close(self, at_once: bool = False) -> None:
        """Stops every rank and waits until it is gone; `at_once` without letting it finish."""
        self.status.abort()
        for rank, process in enumerate(self._processes):
            if process.poll() is None and not at_once:
                try:
                    self._connections[rank].send_bytes(b'{"op": "stop"}')
                except OSError:
                    process.kill()
        deadline = time.monotonic() + (0.0 if at_once else STOP_S)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._resources.close()
