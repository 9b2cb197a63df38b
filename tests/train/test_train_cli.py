"""The `train` command: what it writes, how it stops, and one line for every mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml

from laneformer import Laneformer
from laneformer.train.cli import experiments, main, settings_from


def fails(arguments, capsys):
    """The one line on standard error of a command that exits with 2."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


def test_a_run_leaves_log_settings_versions_and_a_checkpoint(quick, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*quick, "out=runs/a", "schedule=delayed:2", "log.every=1"]) == 0
    out = tmp_path / "runs" / "a"
    assert [path.name for path in tmp_path.iterdir()] == ["runs"], "the working directory is littered"
    left = ["checkpoint", "checkpoints", "config.yaml", "data", "log.jsonl", "result.json", "versions.json"]
    assert sorted(path.name for path in out.iterdir()) == left
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and lines[1]["valid_bits_per_byte"]["corpus"] > 0
    saved = yaml.safe_load((out / "config.yaml").read_text())
    assert (saved["schedule"], saved["data"]["batch"], saved["model"]["num_lanes"]) == ("delayed:2", 3, 3)
    assert json.loads((out / "versions.json").read_text())["torch"] == torch.__version__
    model = Laneformer.from_pretrained(out / "checkpoint")
    assert model(torch.tensor([[1, 2, 3]])).isfinite().all()


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_runs_two_steps(name, corpus, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
             "intermediate_size": 24, "max_position_embeddings": 64, "num_lanes": 8, "swa_layers": "[0]",
             "sliding_window": 32, "vocab_size": 264}  # fmt: skip
    quick = ["steps=2", "data.batch=2", "data.micro_batch=1", "data.valid_bytes=500", "data.suffixes=[.txt]",
             "data.sequence_length=48", "data.phases=[]", "data.folders=[]", "init_from=null", "compile=false",
             "parallel.lanes=1", "device=cpu", "checkpoint.every=2"]  # fmt: skip
    arguments = [f"experiment={name}", f"corpus={corpus}", f"out={tmp_path}/run", *quick]
    assert main([*arguments, *(f"model.{key}={value}" for key, value in sizes.items())]) == 0
    assert (tmp_path / "run" / "checkpoint" / "model.safetensors").exists()


def test_the_command_line_wins_over_the_experiment_and_that_over_the_defaults():
    settings = settings_from(["experiment=demo", "corpus=a", "out=b", "data.batch=3"])
    assert (settings.steps, settings.data.batch, settings.data.valid_bytes) == (600, 3, 1_000_000)
    assert settings_from(["corpus=a", "out=b"]).steps == 300


@pytest.mark.parametrize("path", ["a=b", "~/x", "a,b", "it's", "12", "a b", "(x)", "1e3"])
def test_any_path_can_be_given_as_it_is(path):
    assert settings_from([f"corpus={path}", "out=b"]).corpus == path


@pytest.mark.parametrize(
    ("argument", "nearest"),
    [
        ("optim.lrr=1", "optim.lr"),
        ("lr=1", "optim.lr"),
        ("stpes=3", "steps"),
        ("seqence_length=3", "data.sequence_length"),
        ("model.num_lane=3", "model.num_lanes"),
        ("modle.num_lanes=3", "model.num_lanes"),
        ("log.steps=3", "steps"),
        ("data.valid_every=3", "log.valid_every"),
        ("model.steps=3", "steps"),
    ],
)
def test_a_misspelt_key_names_the_nearest_one(argument, nearest, capsys):
    message = fails(["corpus=a", "out=b", argument], capsys)
    assert repr(argument.partition("=")[0]) in message and f"did you mean {nearest}?" in message


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("steps=0", "steps must be at least 1, got 0"),
        ("steps=many", "steps must be a whole number, got 'many'"),
        ("steps=1.5", "steps must be a whole number, got 1.5"),
        ("steps=1,2", "gives several values, but this is one run; write a list as [a,b], or add -m"),
        ("steps=[1", "cannot be read"),
        ("steps", "is not KEY=VALUE"),
        ("out=", "out is not given; add out=FOLDER"),
        ("overwrite=1", "overwrite must be true or false, got 1"),
        ("optim.lr=true", "optim.lr must be a finite number, got True"),
        ("optim.lr=nan", "optim.lr must be a finite number, got nan"),
        ("data.suffixes=.py", "data.suffixes must be a list, got '.py'"),
        ("experiment=dmo", "did you mean demo"),
        ("precision=float16", "precision is 'float16', expected one of float32, bfloat16"),
        ("schedule=late", "no schedule 'late'"),
        ("schedule=delayed:99", "0..12 for 6 layers, got 99"),
        ("model.num_lanes=3", "num_lanes 3 does not divide num_attention_heads 8"),
        ("model.rope_scaling={factor: 2}", "model.rope_scaling needs the keys factor, low_freq_factor"),
        ("data.sequence_length=600", "600 exceeds the model's max_position_embeddings 512"),
        ("device=tpu", "device is 'tpu', expected cpu or cuda"),
        ("corpus=nowhere", "corpus nowhere does not exist"),
        ("corpus=", "one of corpus=FOLDER_OR_FILE and data.folders=[FOLDER] is needed, neither is given"),
        ("data.folders=[x]", "is needed, both are given"),
        ("data.micro_batch=3", "data.batch 16 is not a multiple of 1 ranks x data.micro_batch 3"),
        ("data.phases=[{until: 1.0}]", "data.phases needs the keys until, weights, got until"),
        ("parallel.lanes=2", "parallel.lanes=2 does not divide the 1 ranks"),
        ("parallel.shard=fsp", "did you mean fsdp?"),
        ("init_from=nowhere", "init_from nowhere does not exist; give a checkpoint folder"),
        ("log.wandb=on", "log.wandb is 'on', expected one of off, offline, online"),
    ],
)
def test_a_value_that_cannot_work_is_one_line_with_what_was_given(argument, message, capsys):
    assert message in fails(["corpus=a", "out=b", argument], capsys)


def test_a_phase_of_a_source_that_is_not_there_names_it(quick, tmp_path, capsys):
    arguments = [*quick, f"out={tmp_path}/run", "data.phases=[{until: 1.0, weights: {web: 1}}]"]
    assert main(arguments) == 2
    assert "'web'" in capsys.readouterr().err.splitlines()[-1]


def test_a_run_is_not_overwritten_unless_asked(quick, tmp_path, capsys):
    arguments = [*quick, f"out={tmp_path}/run"]
    assert main(arguments) == 0
    capsys.readouterr()
    assert "holds a run already; resume=true goes on with it, overwrite=true replaces it" in fails(arguments, capsys)
    assert main([*arguments, "overwrite=true", "seed=1", "steps=1"]) == 0
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 1


def test_a_run_that_diverges_is_one_line_and_exit_code_1(quick, tmp_path, capsys):
    arguments = [*quick, f"out={tmp_path}/run", "steps=40", "optim.lr=1e30", "optim.warmup=0", "optim.most_skipped=10"]
    assert main(arguments) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: loss or gradient was not finite in 10 steps in a row") and "1e+30" in last


def test_help_shows_an_example_and_every_key(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for part in (
        "Examples: train experiment=demo",
        "optim.lr=0.003",
        "tokenizer=null",
        "num_lanes",
        "resume=true goes on after a kill",
        "parallel.lanes=1",
    ):
        assert part in text
    assert main([]) == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_and_saves_the_weights(quick, tmp_path, number, code):
    out = tmp_path / "run"
    arguments = [*quick, f"out={out}", "steps=1000000", "log.every=1", "threads=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "laneformer.train.cli", *arguments],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while not ((out / "log.jsonl").exists() and (out / "log.jsonl").read_text()):
            assert process.poll() is None and time.monotonic() < end, "the run did not start"
            time.sleep(0.05)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code and "Traceback" not in err and "stopped; the weights so far are in" in err
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert 0 < lines[-1]["step"] < 1_000_000
    assert Laneformer.from_pretrained(out / "checkpoint").config.num_lanes == 3


def test_wandb_keeps_an_offline_run_below_the_output_folder(quick, tmp_path):
    # In a process of its own: its service's threads would be forked into the ranks of other tests.
    arguments = [*quick, f"out={tmp_path}/out", "log.every=1", "log.wandb=offline"]
    subprocess.run([sys.executable, "-m", "laneformer.train.cli", *arguments], cwd=tmp_path, check=True, timeout=60)
    (kept,) = (tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb")
    assert b"valid_bits_per_byte" in kept.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "the working directory is littered"
