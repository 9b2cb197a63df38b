"""No program passes without solving, and none hurts the host: every attack, each by itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from laneformer.evaluation.attacks import ATTACKS, CANONICAL, TEST, attack
from laneformer.evaluation.sandbox import Job, Limits, Sandbox, SandboxError

SECONDS = 1.0
# What an attack ends with where that is certain; a slow machine may make a timeout of anything.
EXPECTED = {
    "infinite loop": "timeout", "infinite loop while loading": "timeout", "sleeps": "timeout",
    "ignores every signal": "timeout", "fork bomb": "timeout", "memory": "memory", "memory at once": "memory",
}  # fmt: skip


@pytest.fixture(scope="module")
def sandbox():
    try:
        return Sandbox(Limits(seconds=SECONDS, memory_bytes=256 << 20))
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A file that all may change, a port that all may reach, a process, and how to see that they are as before."""
    folder = tmp_path_factory.mktemp("host")
    for place in (folder, folder.parent, folder.parent.parent):
        place.chmod(0o755)
    victim = folder / "victim.txt"
    victim.write_text("precious")
    victim.chmod(0o666)
    outside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        yield SimpleNamespace(victim=victim, outside=outside, server=server, port=server.getsockname()[1])
    outside.kill()
    outside.wait()


def test_an_honest_program_passes_the_test_that_all_attacks_must_not_pass(sandbox):
    assert sandbox.run(Job(CANONICAL, "check", "total", TEST, canonical=CANONICAL)).status == "passed"


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_does_not_pass_and_does_no_harm(name, sandbox, host):
    if not sandbox.namespaces and name == "network":
        pytest.skip("no namespaces: the network is open, which the sandbox says")
    children = len(psutil.Process().children(recursive=True))
    scratch = set(os.listdir("/tmp")) if os.path.isdir("/tmp") else set()
    found = attack(sandbox, name, str(host.victim), host.port, host.outside.pid)
    assert found.status in {EXPECTED.get(name, "failed"), "timeout"}, found
    # The limit, what starting takes on a busy machine, and nothing like the 1,000 seconds that some attacks ask for.
    assert found.seconds < SECONDS + 100
    assert host.victim.read_text() == "precious" and host.outside.poll() is None
    with pytest.raises(BlockingIOError):
        host.server.accept()
    assert len(psutil.Process().children(recursive=True)) == children
    left = {made for made in set(os.listdir("/tmp")) - scratch if made.startswith("laneformer-")} if scratch else set()
    assert not [made for made in left if os.path.isdir(f"/tmp/{made}") and os.listdir(f"/tmp/{made}")]
    assert not os.path.exists("/usr/laneformer-attack")


def test_the_port_and_the_file_can_be_reached_outside_the_sandbox(host):
    """Otherwise the attacks on them would prove nothing."""
    with socket.create_connection(("127.0.0.1", host.port), timeout=5):
        time.sleep(0.05)
        host.server.accept()[0].close()
    host.victim.write_text("precious")


def test_no_process_outlives_its_run_even_one_that_left_its_session(sandbox):
    name = f"left-{os.getpid()}"
    code = (
        "import ctypes, os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        f"    ctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(1000)\n"
        "    os._exit(0)\n"
        "os.wait()\n" + CANONICAL
    )
    assert sandbox.run(Job(code, "check", "total", TEST, canonical=CANONICAL)).status == "passed"
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and name in {process.name() for process in psutil.process_iter()}:
        time.sleep(0.05)
    assert name not in {process.name() for process in psutil.process_iter()}


def test_the_attacks_cover_what_was_asked_for():
    asked = {
        "infinite loop", "fork bomb", "memory", "huge output", "network", "deletes files", "exits at once", "sys.exit",
        "equal to everything", "overwrites the checker", "writes a verdict to every descriptor",
    }  # fmt: skip
    assert asked <= set(ATTACKS)
