"""Sweeps: every combination has a folder, finished ones are skipped, the table has all, a failure stops no other."""

from __future__ import annotations

import json

import pytest

from laneformer.train.cli import main


@pytest.fixture
def sweep(quick, tmp_path):
    """Runs `train -m` on the small corpus below tmp_path/runs."""

    def run(*arguments):
        return main(["-m", *quick, f"out={tmp_path}/runs", *arguments])

    return run


def rows(tmp_path):
    return json.loads((tmp_path / "runs" / "sweep.json").read_text())


def test_every_combination_runs_once_and_the_table_has_them_all(sweep, tmp_path, capsys):
    assert sweep("optim.lr=1e-3,3e-3", "schedule=delayed:2,ladder") == 0
    table, _ = capsys.readouterr()
    names = {f"optim.lr={rate},schedule={schedule}" for rate in (0.001, 0.003) for schedule in ("delayed:2", "ladder")}
    found = rows(tmp_path)
    assert {row["name"] for row in found} == names and all(name in table for name in names)
    assert [row["bits_per_byte"] for row in found] == sorted(row["bits_per_byte"] for row in found)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {*names, "sweep.json"}
    logs = {name: (tmp_path / "runs" / name / "log.jsonl").stat().st_mtime_ns for name in names}
    assert sweep("optim.lr=1e-3,3e-3,1e-2", "schedule=delayed:2,ladder") == 0
    assert capsys.readouterr().err.count("finished before, skipped") == 4 and len(rows(tmp_path)) == 6
    assert logs == {name: (tmp_path / "runs" / name / "log.jsonl").stat().st_mtime_ns for name in names}


def test_a_finished_run_of_other_settings_is_not_taken_for_this_one(sweep, tmp_path, capsys):
    assert sweep("seed=0,1") == 0
    assert sweep("seed=0,1", "optim.lr=1e-4") == 1
    assert all("optim.lr was 0.003, is 0.0001" in row["status"] for row in rows(tmp_path))


def test_a_run_that_fails_is_named_and_the_others_finish(sweep, tmp_path, capsys):
    assert sweep("optim.lr=1e-3,1e30", "steps=30", "optim.warmup=0", "optim.most_skipped=3") == 1
    good, bad = rows(tmp_path)
    assert good["status"] == "finished" and bad["name"] == "optim.lr=1e+30" and "exit code 1" in bad["status"]
    assert "not finished: optim.lr=1e+30" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["steps=2"], "-m varies nothing"), (["optim.lrr=1,2"], "did you mean optim.lr?"),
     (["experiment=demo,dmo"], "did you mean demo?")],
)  # fmt: skip
def test_a_sweep_that_cannot_work_is_one_line(sweep, capsys, arguments, message):
    assert sweep(*arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_value_that_no_run_can_take_fails_its_run_alone(sweep, tmp_path, capsys):
    assert sweep("seed=0,x") == 1
    good, bad = rows(tmp_path)
    assert (good["name"], good["status"]) == ("seed=0", "finished")
    assert bad["name"] == "seed=x" and "seed must be a whole number, got 'x'" in bad["status"]


@pytest.mark.slow
def test_submitit_runs_the_same_sweep_in_processes_of_its_own(sweep, tmp_path):
    assert sweep("seed=0,1", "hydra/launcher=submitit_local") == 0
    assert [row["status"] for row in rows(tmp_path)] == ["finished", "finished"]
