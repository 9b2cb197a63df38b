"""Whatever happens to a rank or to its parent: one clear error within seconds, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import HANDLED_S

from laneformer.infer.ranks import RankError, RankSettings
from laneformer.infer.request import Request
from laneformer.infer.session import Session

FOLDER = Path(__file__).parents[1] / "golden" / "dtp-delay1"
# A link slow enough that a run goes on for a while: ten modules and two exchanges of 3 ms make 36 ms a token.
SLOW = Request((1, 2, 3), 200, schedule="tensor-parallel", link_latency_us=3000.0, ignore_end=True)
VANISH_S = 2.0


def two_ranks(**changes):
    return Session(RankSettings(str(FOLDER), 2, ("tensor-parallel", "checkpoint"), capacity=256, threads=1, **changes))


def gone(pids):
    """Whether none of the processes runs any more."""
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in alive)


def wait_until_gone(pids, limit_s):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and not gone(pids):
        time.sleep(0.02)
    return gone(pids)


@pytest.mark.parametrize(("kind", "exchange", "schedule", "how"), [
    ("raise", "mailbox", "tensor-parallel", "rank 1 raised ArithmeticError: a planted fault"),
    ("exit", "mailbox", "checkpoint", "rank 1 ended with exit code 3"),
    ("stall", "mailbox", "tensor-parallel", "rank 1 "),
    ("stall", "gloo", "checkpoint", "rank 1 "),
    pytest.param("stall", "mailbox", "checkpoint", "rank 1 ", marks=pytest.mark.slow),
    pytest.param("stall", "gloo", "tensor-parallel", "rank 1 ", marks=pytest.mark.slow),
    pytest.param("exit", "gloo", "checkpoint", "rank 1 ended with exit code 3", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_rank_that_fails_is_named_with_its_layer_and_module(kind, exchange, schedule, how, nothing_left):
    fault = {"rank": 1, "kind": kind, "module": 5, "count": 3}
    with two_ranks(exchange=exchange, fault=fault) as session:
        pids = session.process_ids
        began, tokens = time.monotonic(), []
        with pytest.raises(RankError) as error:
            tokens += session.generate(Request((1, 2, 3), 50, schedule=schedule, ignore_end=True))
        assert time.monotonic() - began < HANDLED_S
        assert gone(pids)
    text = str(error.value)
    assert text.startswith(how) and "layer 2 feed-forward" in text and text.endswith("the run was ended")


@pytest.mark.parametrize(("what", "how"), [
    (signal.SIGKILL, "rank 1 was killed by SIGKILL"), (signal.SIGSTOP, "rank 1 "),
])  # fmt: skip
def test_a_rank_that_is_killed_or_stopped_while_decoding_is_named(what, how, nothing_left):
    with two_ranks() as session:
        pids = session.process_ids
        with pytest.raises(RankError) as error:
            for count, _ in enumerate(session.generate(SLOW)):
                if count == 4:
                    os.kill(pids[1], what)
                    struck = time.monotonic()
        assert time.monotonic() - struck < HANDLED_S
        assert gone(pids)
    text = str(error.value)
    assert text.startswith(how)
    assert any(name in text for name in ("attention", "feed-forward", "the head"))


def test_a_rank_that_fails_while_it_starts_ends_the_start(tmp_path, nothing_left):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes()[: -1000 if name != "config.json" else None])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        with Session(RankSettings(str(tmp_path), 2, threads=1)):
            pytest.fail("there is no session over half a checkpoint")


@pytest.mark.parametrize(
    ("what", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_run_that_is_interrupted_stops_its_ranks_and_says_so_in_its_exit_code(what, code, tmp_path, nothing_left):
    command = [
        sys.executable, "-m", "laneformer.infer.cli", "generate", str(FOLDER), "--prompt-ids", "1,2,3", "--ranks", "2",
        "--max-tokens", "100000", "--link-latency", "20000", "--schedule", "tensor-parallel", "--threads", "1",
    ]  # fmt: skip
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True,
        # A suite that a shell started in the background ignores interrupts, and so would this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        first = run.stdout.read(4)
        assert first
        ranks = [child.pid for child in psutil.Process(run.pid).children(recursive=True)]
        assert len(ranks) == 2
        os.killpg(run.pid, what)
        _, errors = run.communicate(timeout=HANDLED_S)
    finally:
        run.kill()
    assert run.returncode == code, errors
    assert b"Traceback" not in errors
    assert wait_until_gone(ranks, VANISH_S)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith("laneformer")] == []


PARENT = """
import json, sys
from laneformer.infer.ranks import RankSettings
from laneformer.infer.request import Request
from laneformer.infer.session import Session
with Session(RankSettings(sys.argv[1], 2, ("tensor-parallel",), capacity=256, threads=1)) as session:
    request = Request((1, 2, 3), 200, schedule="tensor-parallel", link_latency_us=3000.0, ignore_end=True)
    for token in session.generate(request):
        if token.position == 5:
            print(json.dumps(session.process_ids), flush=True)
"""


def test_ranks_vanish_with_a_parent_that_is_killed_and_leave_no_file(tmp_path, nothing_left):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(FOLDER)], stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    pids = json.loads(parent.stdout.readline())
    assert len(pids) == 2 and not gone(pids)
    parent.kill()
    parent.wait()
    assert wait_until_gone(pids, VANISH_S)
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_an_unknown_kind_is_refused():
    from laneformer.infer.faults import Fault

    with pytest.raises(ValueError, match="no fault 'burn'; there are raise, exit, stall"):
        Fault(1, "burn", 5)
