"""Runs a candidate against a problem's tests and says how it ended: the one door through which generated code runs.

Three processes. The candidate's (launcher.py, candidate.py) is cut off from the machine and only answers calls. The
checker's (checker.py) runs the tests and holds the verdict's channel, which the candidate has no descriptor of and no
way to reach. This one starts both, watches time and output, and ends both whatever happens.

Guaranteed with namespaces (Linux that allows them to this user): the candidate sees no file of the host but the
interpreter and the system's libraries, read-only; no network; no process but its own; when a run ends, all of it is
gone. A pass means that the tests' comparisons held between builtin values in the checker.
Without namespaces, as root, it runs as a user that owns nothing: the verdict is as safe, but it sees the network and
files that all may read, and `Sandbox.note` says so. Without namespaces and not as root, this user's files and processes
are within its reach, so that has to be asked for (`namespaces=False`).

Not guaranteed: no sandbox of processes withstands a hole in the kernel, so for code of real enemies use a virtual
machine. Memory is bounded for each process (a few, `Limits.processes`), not for all together. A program that answers
only the inputs a test has, without solving the problem, passes as everywhere.
"""

from __future__ import annotations

import json
import os
import selectors
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from laneformer.evaluation.box import Box, start
from laneformer.evaluation.wire import encode

STATUSES = ("passed", "failed", "timeout", "memory", "syntax", "infrastructure")
# Seconds that the checker has over the candidate's time: its own start, and the sandbox's.
GRACE_S = 90.0
ENDED, ENDING_S, PRINTED_BYTES = "its process ended", 0.3, 1000
SIGNALS = {9: "it was killed", 11: "it crashed", 24: "it used up its processor time", 25: "it wrote too much"}


class SandboxError(ValueError):
    """Code that cannot be run here, or may not."""


@dataclass(frozen=True)
class Limits:
    """What one candidate may use: seconds from when its code starts to load, and bytes and counts for its processes."""

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 20
    file_bytes: int = 8 << 20
    scratch_bytes: int = 32 << 20
    files: int = 32
    processes: int = 8

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.memory_bytes < 1 << 26:
            raise SandboxError(
                f"limits of {self.seconds:g} s and {self.memory_bytes} bytes; at least some time and 64 MiB are needed"
            )


@dataclass(frozen=True)
class Job:
    """A candidate's whole program and the tests it has to pass; `kind` is one of checker.KINDS."""

    code: str
    kind: str
    entry_point: str
    test: str = ""
    setup: str = ""
    canonical: str = ""
    inputs: tuple[Any, ...] = ()
    example: tuple[Any, ...] | None = None
    atol: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """How a candidate ended: one of STATUSES, why, and the seconds it took."""

    status: str
    text: str = ""
    seconds: float = 0.0


class Sandbox:
    """Runs jobs, one at a time on each thread that asks; probes once what the kernel allows.

    namespaces: None to use them, and to do without only as root, where `note` says what is missing; False to do
    without them in any case. Raises SandboxError where code cannot be run, or not without danger to this user's files.
    """

    def __init__(self, limits: Limits | None = None, namespaces: bool | None = None) -> None:
        self.limits, self.note = limits or Limits(), ""
        self.namespaces = namespaces is not False
        reason = self._probe()
        if reason and namespaces is None and os.geteuid() == 0:
            self.namespaces = False
            self.note = (
                f"no namespaces here ({reason}): code runs with resource limits as a user that owns nothing, "
                "but sees the network and files that all may read"
            )
            reason = (again := self._probe()) and f"{reason}; without namespaces: {again}"
        if reason:
            raise SandboxError(
                f"generated code cannot be run here: {reason}. Allow user namespaces, or run this in a container "
                "as root; in one that is thrown away afterwards, --weak-sandbox does without them"
            )
        if not self.namespaces and os.geteuid() != 0:
            self.note = "the sandbox is weak: code reaches the network and this user's own files and processes"

    def _probe(self) -> str:
        """Why a harmless candidate does not pass, or nothing."""
        limits, self.limits = self.limits, replace(self.limits, seconds=30.0)
        found = self.run(Job("def f():\n    return 1\n", "asserts", "f", "assert f() == 1"))
        self.limits = limits
        return "" if found.status == "passed" else found.text

    def run(self, job: Job) -> Outcome:
        """Runs one job to its end; never raises for anything that the candidate does."""
        began = time.monotonic()
        limits = {name: value for name, value in asdict(self.limits).items() if isinstance(value, int)}
        limits["cpu_s"] = int(self.limits.seconds) + 2
        with ExitStack() as stack:
            boxes = [stack.enter_context(Box(limits, self.namespaces)) for _ in range(1 + (job.kind == "inputs"))]
            checker = stack.enter_context(Checker(job, self.limits, boxes))
            outcome = checker.watch()
        return replace(outcome, seconds=time.monotonic() - began)


class Checker:
    """The process that judges one job; a context manager that ends it."""

    def __init__(self, job: Job, limits: Limits, boxes: list[Box]) -> None:
        self.job, self.limits, self.boxes, self.printed = job, limits, boxes, b""

    def __enter__(self) -> Checker:
        given = tuple(made.channel.fileno() for made in self.boxes)
        spec = json.dumps({"channel": given[0], "reference": given[1] if len(given) > 1 else None})
        self.process = start(("wire", "compare", "remote", "checker"), spec, given, trusted=True)
        for made in self.boxes:
            # The checker's copies are the only ones now, so each side notices when the other is gone.
            made.channel.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def watch(self) -> Outcome:
        """Hands over the job, waits for the verdict while reading the candidate's output, and ends the candidate."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(self.document()).encode())
            self.process.stdin.close()
        except BrokenPipeError:
            return Outcome("infrastructure", "the checker did not start")
        outcome = self.listen(time.monotonic() + 2 * self.limits.seconds * len(self.boxes) + GRACE_S)
        if outcome.status == "passed":
            return outcome
        codes = [made.end(ENDING_S if ENDED in outcome.text else 0.0) for made in self.boxes]
        if trouble := " ".join(text for made in self.boxes if (text := made.trouble())):
            return Outcome("infrastructure", f"the sandbox could not be set up: {trouble}")
        if outcome.status == "infrastructure":
            return replace(outcome, text=f"{outcome.text} {self.printed.decode(errors='replace')}".strip())
        return explained(outcome, codes[0])

    def document(self) -> dict[str, Any]:
        """The job as JSON; inputs in the form that keeps their types."""
        job = self.job
        inputs, example = encode(list(job.inputs)), encode(job.example)
        return {**vars(job), "inputs": inputs, "example": example, "seconds": self.limits.seconds}

    def listen(self, deadline: float) -> Outcome:
        """The verdict, or why there is none."""
        assert self.process.stdout is not None
        verdict, written = self.process.stdout.fileno(), 0
        heard = b""
        with selectors.DefaultSelector() as selector:
            selector.register(verdict, selectors.EVENT_READ)
            for made in self.boxes:
                selector.register(made.output, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    part = os.read(key.fd, 1 << 16)
                    if key.fd == verdict:
                        heard += part
                    elif (written := written + len(part)) > self.limits.output_bytes:
                        return Outcome("failed", f"it printed more than {self.limits.output_bytes} bytes")
                    else:
                        self.printed = (self.printed + part)[-PRINTED_BYTES:]
                    if not part and key.fd == verdict:
                        return Outcome(**json.loads(heard)) if heard else Outcome("timeout", "the tests did not end")
                    if not part:
                        selector.unregister(key.fd)
        return Outcome("timeout", "no verdict in time")


def explained(outcome: Outcome, code: int) -> Outcome:
    """An outcome with the cause that the candidate's exit code tells of."""
    if outcome.status != "failed" or ENDED not in outcome.text:
        return outcome
    status = "timeout" if code == 128 + 24 else "failed"
    how = SIGNALS.get(code - 128, f"it ended with exit code {code}")
    return Outcome(status, f"its process ended before it answered: {how}")
