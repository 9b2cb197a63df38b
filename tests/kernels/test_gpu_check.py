"""The check of a real GPU can be rehearsed without one, and says which step failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = ROOT / "experiments" / "gpu_check"


def run(*command: str, interpret: str = "1", **options) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": interpret}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, **options)


def test_a_rehearsed_step_leaves_a_document_without_times(tmp_path):
    done = run(sys.executable, str(STEPS / "sync_latency.py"), "--tiny", "--json", str(tmp_path / "sync_latency.json"))
    assert done.returncode == 0, done.stderr
    (tmp_path / "steps.txt").write_text("sync_latency 0\ngroups 124\n")
    collected = run(sys.executable, str(STEPS / "collect.py"), str(tmp_path), str(tmp_path / "out.json"), "--rehearsal")
    assert collected.returncode == 0, collected.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["failed"] == ["groups"]
    assert document["rehearsal"] is True
    rows = document["steps"]["sync_latency"]["counter"]
    assert [(row["programs"], row["scope"], row["us"]) for row in rows][:2] == [(2, "gpu", None), (2, "sys", None)]
    assert "failed steps: groups" in collected.stdout


def test_without_a_gpu_a_step_says_how_to_rehearse_it():
    done = run(sys.executable, str(STEPS / "groups.py"), interpret="0")
    assert done.returncode == 1
    assert "--tiny rehearses it without one" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_whole_check_passes_its_rehearsal(tmp_path):
    done = run("make", "gpu-check", "GPU_CHECK=--tiny", cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    document = json.loads((ROOT / "out" / "gpu_check" / "results.json").read_text())
    assert document["failed"] == []
    assert all(case["passed"] for case in document["steps"]["correctness"]["cases"])
    assert all(row["bit_equal"] for row in document["steps"]["groups"]["rows"])
