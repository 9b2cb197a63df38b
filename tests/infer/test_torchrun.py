"""Ranks started by torchrun decode what one process decodes, and only one of them speaks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import torch

from laneformer.infer.engine import generate
from laneformer.infer.exchange import LocalExchange
from laneformer.infer.request import Request
from laneformer.infer.runners import EagerRunner
from laneformer.infer.torchrun import under_torchrun
from laneformer.infer.weights import RankWeights

LIMIT_S = 90.0
FOLDER = Path(__file__).parents[1] / "golden" / "dtp-delay1"


def torchrun(*words):
    """Exit code, standard output and standard error of `infer generate` on two ranks."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
        "laneformer.infer.cli", "generate", str(FOLDER), "--prompt-ids", "1,2,3", *words,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        out, errors = job.communicate(timeout=LIMIT_S)
        return job.returncode, out, errors
    finally:
        # A killed launcher would leave its ranks behind.
        for process in psutil.Process(job.pid).children(recursive=True) if job.returncode is None else ():
            process.kill()
        job.kill()


def test_two_ranks_of_torchrun_print_the_tokens_of_one_process_once(nothing_left):
    assert not under_torchrun()
    runner = EagerRunner(RankWeights.load(FOLDER), LocalExchange(), 64)
    tokens = [token.id for token in generate(runner, Request((1, 2, 3), 20, schedule="delayed:3"))]
    assert torch.get_num_threads() == 1
    code, out, errors = torchrun("--max-tokens", "20", "--schedule", "delayed:3")
    assert code == 0, errors
    assert out == " ".join(map(str, tokens)) + "\n"
    assert errors.count("20 out (length)") == 1 and "2 ranks" in errors
