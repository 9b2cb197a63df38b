"""How a candidate's process is cut off from the machine before a line of its code runs.

Where the kernel allows it: its own user (an unused id where this runs as root), and namespaces of its own for
processes, network, mounts, messages and host name. Its file system holds the interpreter and the system's libraries,
read-only, and one small scratch folder in memory; there is no network, no other process to be seen, and when its first
process ends, all of them end. Everywhere: resource limits, an empty environment, a session of its own, no new
privileges. Linux; elsewhere only the limits. Standard library only.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
MNT_DETACH, AT_RECURSIVE, MOUNT_SETATTR = 2, 0x8000, 442
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
MAX_FD = 1 << 16
DEVICES = ("null", "zero", "urandom", "random")
CHANNEL, SCRATCH, NOBODY, POLL_S = 3, "/scratch", 65534, 0.005


def main(spec: str) -> None:
    """Carries out a spec (JSON, from box.py): isolates, starts the candidate, outlives it, ends with its code."""
    keys = json.loads(spec)
    try:
        if keys["namespaces"]:
            enter_namespaces(keys)
        else:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        child = os.fork()
    except (OSError, AttributeError) as error:
        complain(keys, error)
    if child == 0:
        (first_process if keys["namespaces"] else become_candidate)(keys)
    for name in ("channel", "output", "status"):
        os.close(keys[name])
    code = outlive(child, keys["lifeline"])
    if not keys["namespaces"]:
        end_descendants(keys)
    os._exit(code)


def complain(keys: dict[str, Any], error: BaseException) -> NoReturn:
    """Says what could not be set up, and ends: the code never runs less isolated than asked for."""
    os.write(keys["status"], f"{type(error).__name__}: {error}".encode())
    os._exit(1)


def libc_call(name: str, *arguments: Any) -> None:
    """A C library function that returns 0; raises OSError otherwise."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)} ({[a for a in arguments if isinstance(a, bytes)]})")


def prctl(option: int, value: int) -> None:
    """One setting of this process, where the system knows it."""
    if sys.platform == "linux":
        libc_call("prctl", option, ctypes.c_ulong(value), 0, 0, 0)


def enter_namespaces(keys: dict[str, Any]) -> None:
    """New namespaces; with a user namespace where that is needed for the others."""
    flags = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        try:
            return libc_call("unshare", flags)
        except PermissionError:
            pass
    libc_call("unshare", flags | NEWUSER)
    # In here there is one user, who has no rights outside, and none inside once the candidate's program starts.
    keys["uid"] = None
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {gid} 1")


def outlive(child: int, lifeline: int) -> int:
    """Waits for the child, and kills it when the lifeline's other end closes; the code it ended with."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return exit_code(status)
        if select.select([lifeline], [], [], POLL_S)[0]:
            os.kill(child, signal.SIGKILL)
            return exit_code(os.waitpid(child, 0)[1])


def exit_code(status: int) -> int:
    """A wait status as shells number it: 128 and the signal for a process that was killed."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def end_descendants(keys: dict[str, Any]) -> None:
    """Without a process namespace: kills what the candidate left running, until nothing is left."""
    if keys["uid"] is not None:
        killer = os.fork()
        if killer == 0:
            os.setresuid(keys["uid"], keys["uid"], keys["uid"])
            os.kill(-1, signal.SIGKILL)
            os._exit(0)
        os.waitpid(killer, 0)
    for _ in range(1000):
        children = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and parent_of(pid) == os.getpid()] \
            if os.path.isdir("/proc/self") else []  # fmt: skip
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if not children:
            return


def parent_of(pid: str) -> int:
    """The parent of a process, 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return 0


def first_process(keys: dict[str, Any]) -> NoReturn:
    """Process 1 of the new process namespace: builds the file system, starts the candidate, and ends with it."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        build_root(keys)
        prctl(PR_SET_DUMPABLE, 0)
        child = os.fork()
    except (OSError, AttributeError) as error:
        complain(keys, error)
    if child == 0:
        become_candidate(keys)
    os.closerange(0, MAX_FD)
    while True:
        pid, status = os.wait()
        if pid == child:
            # The kernel ends every process that is left in here.
            os._exit(exit_code(status))


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    libc_call(
        "mount", source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode()
    )


def build_root(keys: dict[str, Any]) -> None:
    """A new root: what the interpreter needs, read-only; hidden folders empty; a scratch folder in memory."""
    root, size = keys["root"], keys["limits"]["scratch_bytes"]
    os.umask(0o022)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in keys["visible"]:
        show(path, root)
    for path in (root + path for path in keys["hidden"] if os.path.isdir(root + path)):
        mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, "size=4k,mode=755")
    for name in ("/dev", SCRATCH):
        os.makedirs(root + name, exist_ok=True)
    for name in DEVICES:
        Path(f"{root}/dev/{name}").touch()
    make_read_only(root)
    mount("tmpfs", root + SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},nr_inodes=1000,mode=777")
    for name in DEVICES:
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, MS_BIND)
    os.chdir(root)
    libc_call("pivot_root", b".", b".")
    libc_call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def show(path: str, root: str) -> None:
    """Makes a host path visible under the new root; a link stays a link."""
    target = Path(root + path)
    if target.exists() or target.is_symlink() or not os.path.lexists(path):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.islink(path):
        return os.symlink(os.readlink(path), target)
    if os.path.isdir(path):
        target.mkdir()
    else:
        target.touch()
    mount(path, str(target), None, MS_BIND | MS_REC)


def make_read_only(root: str) -> None:
    """Every mount below the new root, without special files or privileges by file."""

    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "namespace")]

    wanted = Attributes(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    libc_call("syscall", MOUNT_SETATTR, -100, root.encode(), AT_RECURSIVE, ctypes.byref(wanted), size)


def become_candidate(keys: dict[str, Any]) -> NoReturn:
    """Takes limits, gives up every privilege, and turns into the interpreter that runs the code."""
    try:
        os.setsid()
        os.chdir(SCRATCH if keys["namespaces"] else keys["root"])
        os.umask(0o077)
        drop_user(keys)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        arrange_files(keys)
        set_limits(keys["limits"])
        os.execve(keys["command"][0], keys["command"], {})
    except (OSError, ValueError, AttributeError) as error:
        complain(keys, error)


def drop_user(keys: dict[str, Any]) -> None:
    """As root: an id that owns nothing. Raises OSError where the interpreter could not be run then."""
    if keys["uid"] is not None and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(keys["uid"], keys["uid"], keys["uid"])
        os.setresuid(keys["uid"], keys["uid"], keys["uid"])


def set_limits(limits: dict[str, int]) -> None:
    """Resource limits that neither this process nor its children can raise."""
    cpu = limits["cpu_s"]
    wanted: dict[str, Any] = {
        "RLIMIT_CPU": (cpu, cpu + 1), "RLIMIT_AS": (limits["memory_bytes"],) * 2, "RLIMIT_CORE": (0, 0),
        "RLIMIT_FSIZE": (limits["file_bytes"],) * 2, "RLIMIT_NOFILE": (limits["files"],) * 2,
        "RLIMIT_NPROC": (limits["processes"],) * 2, "RLIMIT_MEMLOCK": (0, 0), "RLIMIT_MSGQUEUE": (0, 0),
    }  # fmt: skip
    apply: Callable[[int, tuple[int, int]], None] = resource.setrlimit
    for name, value in wanted.items():
        if hasattr(resource, name):
            apply(getattr(resource, name), value)


def arrange_files(keys: dict[str, Any]) -> None:
    """Nothing is open in the candidate but: no input, one output pipe, and the channel as descriptor 3."""
    null = os.open("/dev/null", os.O_RDONLY)
    # Copies above all that is written to below, so that no copy overwrites a source.
    high = [fcntl.fcntl(keys[name], fcntl.F_DUPFD, 10) for name in ("channel", "output", "status")]
    keys["status"] = high[2]
    for source, target in ((null, 0), (high[1], 1), (high[1], 2), (high[0], CHANNEL)):
        os.dup2(source, target)
    os.set_inheritable(high[2], False)
    os.closerange(CHANNEL + 1, high[2])
    os.closerange(high[2] + 1, MAX_FD)
