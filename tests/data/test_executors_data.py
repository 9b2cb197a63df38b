"""That a cluster runs the same blocks with the settings that were asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from corpus_maker import document, program, write_raw
from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from typer.testing import CliRunner

from laneformer.data import executors
from laneformer.data.executors import Execution, ExecutorError, chain
from laneformer.data.pipeline import CleanSettings, Layout, steps
from laneformer.data.records import SettingsError, locked
from laneformer.tools.data_cli import data_app


def blocks(pipeline: list) -> list[str]:
    return [f"{type(block).__module__}.{type(block).__name__}" for block in pipeline]


def test_slurm_gets_the_blocks_of_the_local_run_in_a_chain(tmp_path: Path) -> None:
    plan = steps(tmp_path / "raw", Layout(tmp_path / "out"), CleanSettings(problems=("p",)), 40)
    execution = Execution("slurm", 7, "cpu", "01:00:00", 3, {"account": "lab"})
    local, slurm = chain(plan, tmp_path, Execution()), chain(plan, tmp_path, execution)
    assert [step.name for step in plan] == ["index", "select", "exact", "unique", "buckets", "cluster", "finish"]
    assert [step.tasks for step in plan] == [1, 40, 3, 40, 14, 1, 40]
    for here, there, before in zip(local, slurm, [None, *slurm], strict=False):
        assert isinstance(here, LocalPipelineExecutor) and isinstance(there, SlurmPipelineExecutor)
        assert blocks(there.pipeline) == blocks(here.pipeline)
        assert (there.tasks, there.workers, there.depends) == (here.tasks, 7, before)
        assert (there.partition, there.time, there.mem_per_cpu_gb) == ("cpu", "01:00:00", 3)
        assert there.get_sbatch_args(4)["account"] == "lab"
        assert there.logging_dir.path == here.logging_dir.path


def test_an_executor_that_cannot_run_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExecutorError, match="expected one of local, slurm, ray"):
        Execution("cloud")
    with pytest.raises(ExecutorError, match="--partition NAME"):
        Execution("slurm")
    with pytest.raises(ExecutorError, match="workers is 0"):
        Execution(workers=0)
    monkeypatch.setattr(executors.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExecutorError, match="pip install ray"):
        Execution("ray")


def test_ray_gets_the_blocks_of_the_local_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors.importlib.util, "find_spec", lambda name: object())
    plan = steps(tmp_path / "raw", Layout(tmp_path / "out"), CleanSettings(), 5)
    found = chain(plan, tmp_path, Execution("ray", 3, memory_gb=6))[-1]
    assert type(found).__name__ == "RayPipelineExecutor"
    assert blocks(found.pipeline) == blocks(list(plan[-1].pipeline))
    assert (found.world_size, found.workers, found.mem_per_cpu_gb) == (5, 3, 6)  # pyright: ignore


def test_two_commands_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laneformer.data.records.PATIENCE", 0.0)
    with locked(tmp_path):
        with pytest.raises(SettingsError, match="another laneformer data command"):
            with locked(tmp_path):
                pass
    with locked(tmp_path):
        pass


def test_the_command_line_collects_cleans_and_shows_the_card(tmp_path: Path) -> None:
    run = CliRunner().invoke
    (tmp_path / "src").mkdir()
    for seed in range(3):
        (tmp_path / "src" / f"{seed}.py").write_text(program(seed))
    raw, out = str(tmp_path / "raw"), str(tmp_path / "out")
    collected = run(data_app, ["collect", raw, "--folder", str(tmp_path / "src"), "--license", "MIT"])
    assert collected.exit_code == 0 and "src: 3 documents" in collected.stderr
    cleaned = run(data_app, ["clean", raw, out, "--no-decontaminate", "--no-near-duplicates"])
    assert cleaned.exit_code == 0 and "3 documents" in cleaned.stderr and "documents/s" in cleaned.stderr
    # datatrove's own log stays in its files.
    assert "Launching pipeline" not in cleaned.stderr and list(tmp_path.glob("out/.clean/logs/*/step.log"))
    card = run(data_app, ["card", out])
    assert card.exit_code == 0 and card.stdout.startswith("# Data card") and "| MIT | 3 | 3 |" in card.stdout
    settings = json.loads((tmp_path / "out" / "report.json").read_text())["settings"]
    assert settings["problems"] == [] and settings["near_duplicates"] is False


def test_bad_input_is_one_line_and_exit_code_2_and_a_failed_run_is_1(tmp_path: Path) -> None:
    run = CliRunner().invoke
    for line in (
        ["collect", str(tmp_path / "raw")],
        ["clean", str(tmp_path), str(tmp_path / "o")],
        ["card", str(tmp_path)],
    ):
        result = run(data_app, line)
        assert result.exit_code == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    write_raw(tmp_path / "raw", [[document(program(1))]])
    path = tmp_path / "raw" / "made" / "00000.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-9])
    assert run(data_app, ["clean", str(tmp_path / "raw"), str(tmp_path / "out")]).exit_code == 1
