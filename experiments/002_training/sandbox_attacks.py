"""Runs every attack program against the sandbox and prints one JSON line: how each ended, and what the host lost.

python experiments/002_training/sandbox_attacks.py [--seconds 2]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from laneformer.evaluation.attacks import ATTACKS, attack
from laneformer.evaluation.sandbox import Limits, Sandbox


def main() -> None:
    """One attack after another, with a file, a port and a process to be hurt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="time limit of an attack")
    seconds = parser.parse_args().seconds
    sandbox = Sandbox(Limits(seconds=seconds, memory_bytes=256 << 20))
    if sandbox.note:
        print(sandbox.note, file=sys.stderr)
    statuses, harm = {}, []
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        victim = Path(folder) / "victim.txt"
        victim.write_text("precious")
        victim.chmod(0o666)
        outside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        server.settimeout(0)
        for name in ATTACKS:
            found = attack(sandbox, name, str(victim), server.getsockname()[1], outside.pid)
            statuses[name] = found.status
            print(f"{found.seconds:5.1f} s  {name}: {found.status}, {found.text[:120]}", file=sys.stderr)
            harm += [f"{name}: {loss}" for loss in losses(victim, server, outside)]
        outside.kill()
    document = {"namespaces": sandbox.namespaces, "root": os.geteuid() == 0, "statuses": statuses, "harm": harm}
    print(json.dumps(document))
    raise SystemExit(bool(harm) or "passed" in statuses.values())


def losses(victim: Path, server: socket.socket, outside: subprocess.Popen[bytes]) -> list[str]:
    """What an attack has done to the host."""
    found = []
    if not victim.exists() or victim.read_text() != "precious":
        found.append("the file is gone or changed")
    if outside.poll() is not None:
        found.append("the process was ended")
    try:
        server.accept()[0].close()
        found.append("a connection came through")
    except BlockingIOError:
        pass
    if Path("/usr/laneformer-attack").exists():
        found.append("the system was written to")
    return found


if __name__ == "__main__":
    main()
