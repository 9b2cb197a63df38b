"""Resuming: bit-equal after kill -9, the same run on other ranks, torn and foreign checkpoints, what is kept."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks_of_training import run_training_ranks
from rich.console import Console

from laneformer import Laneformer
from laneformer.train import state
from laneformer.train.parallel import Layout
from laneformer.train.prepare import prepare
from laneformer.train.settings_build import build_settings

STEPS = 24


def arguments(corpus, out, *more):
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
             "head_dim": 4, "intermediate_size": 20, "vocab_size": 264, "num_lanes": 4}  # fmt: skip
    return [f"corpus={corpus}", f"out={out}", *(f"model.{key}={value}" for key, value in sizes.items()),
            f"steps={STEPS}", "data.sequence_length=19", "data.batch=4", "data.infilling=0.5", "optim.name=muon",
            "checkpoint.every=1", "log.every=1", "log.valid_every=10", "resume=true", *more]  # fmt: skip


def command(corpus, out, *more):
    return [sys.executable, "-m", "laneformer.train.cli", *arguments(corpus, out, *more)]


def tensors_of(folder):
    return (folder / "checkpoint" / "model.safetensors").read_bytes()


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def killed_at(corpus, out, step):
    """Starts the run and kills it, hard, once it has logged `step`; the step whose line was the last then."""
    process = subprocess.Popen(command(corpus, out), stderr=subprocess.PIPE, text=True, env=environment())
    log, end = out / "log.jsonl", time.monotonic() + 60
    try:
        while not (log.exists() and len(log.read_text().splitlines()) >= step):
            assert process.poll() is None and time.monotonic() < end, process.communicate()[1]
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return len(log.read_text().splitlines())


@pytest.fixture(scope="module")
def untouched(corpus, tmp_path_factory):
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("untouched") / "run"
    subprocess.run(command(corpus, out), check=True, env=environment(), capture_output=True)
    return out


def without_speed(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: line[key] for key in line if key not in ("tokens_per_s", "eta_s", "memory_bytes")} for line in lines]


def test_a_run_killed_at_any_moment_ends_with_the_bits_of_one_that_was_not(corpus, untouched, tmp_path):
    out, stopped = tmp_path / "run", []
    for step in (3, 9, 16):
        stopped.append(killed_at(corpus, out, step))
    assert stopped[-1] < STEPS, "the last kill came too late"
    result = subprocess.run(command(corpus, out), env=environment(), capture_output=True, text=True)
    assert result.returncode == 0 and "resumed from" in result.stderr, result.stderr
    assert tensors_of(out) == tensors_of(untouched)
    assert without_speed(out / "log.jsonl") == without_speed(untouched / "log.jsonl")


def job_of(place, values, console=None):
    settings = build_settings(values, "test")
    torch.set_num_threads(1)
    return prepare(settings, console or Console(quiet=True), place)


def values_of(corpus, out, lanes=1, shard="ddp", **changes):
    model = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
             "head_dim": 4, "intermediate_size": 20, "vocab_size": 264, "num_lanes": 4}  # fmt: skip
    keys = {"corpus": str(corpus), "out": str(out), "model": model, "steps": 8, "schedule": "delayed:2",
            "precision": "float64", "resume": True, "checkpoint": {"every": 4}, "log": {"every": 1},
            "data": {"sequence_length": 19, "batch": 8, "micro_batch": 2, "infilling": 0.3},
            "parallel": {"lanes": lanes, "shard": shard, "timeout": 30.0}}  # fmt: skip
    return {**keys, **changes}


def run_on(place, values, stop_at):
    job = job_of(place, values)
    job.run(lambda: stop_at is not None and job.trainer.finished == stop_at - 1)
    return job.trainer.finished


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("place", [(2, 2, "ddp"), (2, 1, "ddp"), (2, 1, "fsdp"), (4, 2, "fsdp")], ids=str)
def test_a_run_goes_on_with_another_number_of_ranks_and_back(corpus, tmp_path, place, optimizer):
    ranks, lanes, shard = place
    optim = {"name": optimizer}
    assert run_on(Layout(), values_of(corpus, tmp_path / "one", optim=optim), None) == 8
    out = tmp_path / "moved"
    assert run_on(Layout(), values_of(corpus, out, optim=optim), 3) == 3
    assert run_training_ranks(ranks, run_on, values_of(corpus, out, lanes, shard, optim=optim), 6) == [6] * ranks
    assert run_on(Layout(), values_of(corpus, out, optim=optim), None) == 8
    one, moved = without_speed(tmp_path / "one" / "log.jsonl"), without_speed(out / "log.jsonl")
    assert [line["step"] for line in moved] == [line["step"] for line in one] == list(range(1, 9))
    assert [line["targets"] for line in moved] == [line["targets"] for line in one]
    np.testing.assert_allclose([line["loss"] for line in moved], [line["loss"] for line in one], rtol=1e-9)
    ends = [Laneformer.from_pretrained(folder / "checkpoint") for folder in (tmp_path / "one", out)]
    for (name, p), q in zip(ends[0].named_parameters(), ends[1].parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-6, msg=name)


def test_old_states_go_and_permanent_ones_stay(corpus, tmp_path):
    kept = {"every": 2, "keep": 2, "permanent": 4}
    run_on(Layout(), values_of(corpus, tmp_path / "run", checkpoint=kept, steps=11), None)
    names = [folder.name for folder in state.saved(tmp_path / "run")]
    assert names == ["step-00000004", "step-00000008", "step-00000010", "step-00000011"]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert Laneformer.from_pretrained(tmp_path / "run" / "checkpoints" / names[0])


@pytest.mark.parametrize("file", ["state.json", "optimizer.safetensors", "model.safetensors"])
def test_a_torn_state_is_skipped_with_a_warning_and_an_older_one_serves(corpus, tmp_path, file):
    out = tmp_path / "run"
    run_on(Layout(), values_of(corpus, out), 6)
    torn = out / "checkpoints" / "step-00000006" / file
    torn.write_bytes(torn.read_bytes()[:100])
    said = io.StringIO()
    job = job_of(Layout(), values_of(corpus, out), Console(file=said, width=500))
    assert job.trainer.finished == 4 and f"{torn.parent} is not whole and is skipped" in said.getvalue()


def test_a_save_that_was_killed_leaves_nothing_that_is_taken_for_a_state(corpus, tmp_path):
    out = tmp_path / "run"
    beside = out / "checkpoints" / ".step-00000004.partial"
    beside.mkdir(parents=True)
    (beside / "state.json").write_text("{")
    assert run_on(Layout(), values_of(corpus, out), 4) == 4
    assert not beside.exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"optim": {"lr": 0.5}}, "optim.lr was 0.003, is 0.5"),
        ({"schedule": "ladder"}, 'schedule was "delayed:2", is "ladder"'),
        ({"steps": 9}, "steps was 8, is 9"),
        ({"seed": 3}, "seed was 0, is 3"),
        ({"data": {"sequence_length": 18, "batch": 8, "infilling": 0.3}}, "data.sequence_length was 19, is 18"),
    ],
    ids=str,
)
def test_a_state_of_other_settings_is_refused_by_name(corpus, tmp_path, change, named):
    run_on(Layout(), values_of(corpus, tmp_path / "run"), 2)
    with pytest.raises(ValueError, match="belongs to a run with other settings") as error:
        job_of(Layout(), values_of(corpus, tmp_path / "run", **change))
    assert named in str(error.value)


def test_a_state_of_other_data_is_refused(corpus, tmp_path):
    run_on(Layout(), values_of(corpus, tmp_path / "run"), 2)
    other = tmp_path / "corpus"
    other.mkdir()
    for path in Path(corpus).iterdir():
        (other / path.name).write_text(path.read_text() + "and more\n")
    with pytest.raises(ValueError, match=r"belongs to a run with other settings: data\."):
        job_of(Layout(), values_of(other, tmp_path / "run"))
