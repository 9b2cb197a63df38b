"""Starting and ending one isolated interpreter (launcher.py inside), and the descriptors that lead to it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PACKAGE = "laneformer.evaluation"
# Runs `main` of one of our modules in an interpreter that has none of our packages.
BOOT = """
import json, sys, types
name, sources, argument = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
for package in ("laneformer", "laneformer.evaluation"):
    sys.modules[package] = types.ModuleType(package)
for module, source in sources:
    sys.modules[module] = made = types.ModuleType(module)
    exec(compile(source, module, "exec"), made.__dict__)
sys.argv[1:] = []
sys.modules[name].main(argument)
"""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/nix/store")
HIGH_UID, NOBODY, CLOSING_S, NOTE_BYTES = 1_879_048_192, 65534, 5.0, 4096


class Box:
    """An isolated interpreter that waits for code at the other end of `channel`; a context manager that ends it.

    limits: what the launcher's `limits` are. `output` gives what it prints, `trouble()` what could not be set up.
    """

    def __init__(self, limits: dict[str, int], namespaces: bool) -> None:
        self._resources = contextlib.ExitStack()
        self._limits, self._namespaces, self.exit_code = limits, namespaces, 0

    def __enter__(self) -> Box:
        self.root = self._resources.enter_context(
            tempfile.TemporaryDirectory(prefix="laneformer-", ignore_cleanup_errors=True)
        )
        self.channel, theirs = socket.socketpair()
        self.output, output_in = os.pipe()
        self._trouble, trouble_in = os.pipe()
        lifeline_out, self._lifeline = os.pipe()
        given = (theirs.fileno(), output_in, trouble_in, lifeline_out)
        try:
            self._process = start(("launcher",), json.dumps(self._spec(given)), given, trusted=False)
        finally:
            theirs.close()
            for fd in given[1:]:
                os.close(fd)
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process and all it started, whatever it did."""
        self.end()
        self.channel.close()
        for fd in (self.output, self._trouble):
            os.close(fd)
        self._resources.close()

    def end(self, patience_s: float = 0.0) -> int:
        """Ends the process; its exit code, 128 and the signal if one ended it. May be called again.

        patience_s: how long it may take to end by itself first.
        """
        if self._lifeline >= 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
            os.close(self._lifeline)
            self._lifeline = -1
            try:
                self.exit_code = self._process.wait(CLOSING_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self.exit_code = self._process.wait()
        return self.exit_code

    def trouble(self) -> str:
        """What could not be set up; empty when the code ran. Only after `end`."""
        return os.read(self._trouble, NOTE_BYTES).decode(errors="replace")

    def _spec(self, given: tuple[int, ...]) -> dict[str, Any]:
        """The launcher's orders."""
        uid = unused_uid() if os.geteuid() == 0 else None
        if uid is not None and not self._namespaces:
            os.chown(self.root, uid, uid)
        base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        argv = [base, "-I", "-S", "-c", BOOT, f"{PACKAGE}.candidate", sources("wire", "candidate"), "3"]
        return {
            **dict(zip(("channel", "output", "status", "lifeline"), given, strict=True)),
            "namespaces": self._namespaces, "uid": uid, "root": self.root, "command": argv, "limits": self._limits,
            "visible": [*SYSTEM, os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)],
            "hidden": hidden(),
        }  # fmt: skip


def unused_uid() -> int:
    """A user id that owns nothing and that no other run uses, so that a limit on processes counts only its own."""
    try:
        ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except OSError:
        return NOBODY
    uid = HIGH_UID + secrets.randbelow(1 << 24)
    return uid if any(first <= uid < first + count for first, _, count in ranges) else NOBODY


def hidden() -> list[str]:
    """Folders with installed packages and this one: they hold problems with their solutions."""
    version = f"python{sysconfig.get_python_version()}"
    prefixes = {os.path.realpath(prefix) for prefix in (sys.base_prefix, "/usr", "/usr/local")}
    inside = [f"{prefix}/lib/{name}" for prefix in sorted(prefixes) for name in (version, "python3")]
    return [f"{path}/{kind}" for path in inside for kind in ("site-packages", "dist-packages")] + [str(HERE.resolve())]


def sources(*names: str) -> str:
    """The text of modules of this folder, for BOOT, in the order in which they need each other."""
    return json.dumps([(f"{PACKAGE}.{name}", (HERE / f"{name}.py").read_text(encoding="utf-8")) for name in names])


def start(names: tuple[str, ...], argument: str, given: tuple[int, ...], trusted: bool) -> subprocess.Popen[bytes]:
    """Runs `main(argument)` of the last of some modules of this folder in a fresh interpreter of its own session.

    given: descriptors it gets. A `trusted` one can import installed packages, and is talked to by pipes.
    """
    flags = ["-I"] if trusted else ["-I", "-S"]
    pipe = subprocess.PIPE if trusted else subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, *flags, "-c", BOOT, f"{PACKAGE}.{names[-1]}", sources(*names), argument],
        pass_fds=given,
        env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.DEVNULL,
    )
