"""Cleaning from raw documents to the card: what stays, what the report says, and what a kill changes (nothing)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from corpus_maker import document, program, read_documents, write_problems, write_raw

from laneformer.data.clean import CleanError, clean, finish, summary
from laneformer.data.executors import Execution, StepFailed
from laneformer.data.pipeline import CleanSettings, parse_limits
from laneformer.data.records import SettingsError

SOLUTION = "def strange_marble(pile, shade):\n    return sorted(marble for marble in pile if marble.colour is shade)"
SECRET = "x9Kq2mPz7LwV4t"


@pytest.fixture
def problems(tmp_path: Path) -> tuple[str, ...]:
    return (str(write_problems(tmp_path / "tiny.jsonl", prompt="Sort marbles.", canonical_solution=SOLUTION)),)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Three shards with one of everything that is removed; the copies are first in a shard but the first."""
    near = program(3, 300)
    shards = [
        [document(program(1)), document(program(2) + "\n\n", "two.py", "BSD-3-Clause"), document(near, "near.py")],
        [document(program(2).replace("\n", "  \n"), "copy.py"), document(program(4), "gpl.py", "GPL-3.0-only")],
        [
            document(near.replace("\n", "\n    z = 1\n", 1), "nearly.py"),
            document(f"{program(5)}\n{SOLUTION}\n", "problem.py"),
            document(f'{program(6)}password = "{SECRET}"\n', "secret.py"),
            document("x = 1\n", "tiny.py"),
            document(program(7) + "def broken(:\n", "broken.py"),
        ],
    ]
    write_raw(tmp_path / "raw", shards)
    return tmp_path / "raw"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_each_filter_removes_its_document_and_the_report_says_so(
    raw: Path, tmp_path: Path, problems: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    report = clean(raw, out, CleanSettings(problems=problems), Execution(), command="laneformer data clean")
    assert report is not None
    kept = {entry["metadata"]["path"] for entry in read_documents(out / "documents")}
    assert {"a.py", "two.py", "secret.py"} < kept and len(kept & {"near.py", "nearly.py"}) == 1 and len(kept) == 4
    removed = {f["filter"]: f["removed"] for step in report["steps"] for f in step["filters"]}
    assert removed == {
        "licence": {"GPL-3.0-only": 1},
        "size": {"too short": 1},
        "quality of code": {"does not parse": 1},
        "quality of prose": {},
        "repetition in prose": {},
        "exact duplicates": {"duplicate": 1},
        "near duplicates": {"duplicate": 1},
        "evaluation problems": {"tiny": 1},
    }
    assert report["secrets"] == {"password": 1}
    assert report["totals"]["input"]["documents"] == 10 and report["totals"]["output"]["documents"] == 4
    assert report["licences"]["output"]["MIT"]["documents"] == 3 and "GPL-3.0-only" not in report["licences"]["output"]
    assert [hit["id"] for hit in report["contaminated"]] == ["made/problem.py"]
    assert json.loads((out / "report.json").read_text()) == report
    assert all(SECRET not in path.read_text(errors="ignore") for path in out.rglob("*") if path.is_file())
    everything = (out / "README.md").read_text()
    for line in ("GPL-3.0-only | 1 | 0", "| password | 1 |", "laneformer data clean", "tiny (1 problems"):
        assert line in everything
    assert "evaluation problems    removed        1" in summary(report, out)


def test_workers_and_tasks_do_not_change_the_documents(raw: Path, tmp_path: Path, problems: tuple[str, ...]) -> None:
    settings = CleanSettings(problems=problems)
    for workers in (1, 3):
        clean(raw, tmp_path / str(workers), settings, Execution(workers=workers))
    assert contents(tmp_path / "1" / "documents") == contents(tmp_path / "3" / "documents")
    assert list(contents(tmp_path / "1" / "documents")) == [f"{n:05d}.jsonl.gz" for n in range(3)]


def test_a_shard_that_loses_all_its_documents_does_not_shift_the_others(tmp_path: Path) -> None:
    gone = [document(program(seed), f"{seed}.py", "GPL-3.0-only") for seed in range(3)]
    copies = [document(program(9), "copy.py"), document(program(10), "last.py")]
    write_raw(tmp_path / "raw", [[document(program(9), "first.py")], gone, copies])
    clean(tmp_path / "raw", tmp_path / "out", CleanSettings(), Execution())
    assert [d["metadata"]["path"] for d in read_documents(tmp_path / "out" / "documents")] == ["first.py", "last.py"]


def test_a_finished_corpus_is_not_made_again_and_other_settings_are_refused(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = clean(raw, out, CleanSettings(), Execution())
    before = {path: path.stat().st_mtime_ns for path in (out / "documents").iterdir()}
    assert clean(raw, out, CleanSettings(), Execution()) == first
    assert finish(out) == first
    assert {path: path.stat().st_mtime_ns for path in (out / "documents").iterdir()} == before
    other = CleanSettings(limits=parse_limits(["max_line=500"]))
    with pytest.raises(SettingsError, match=r"settings\.limits\.max_line was 1000, is 500.*--redo"):
        clean(raw, out, other, Execution())
    write_raw(raw, [[document(program(77))]], source="another")
    with pytest.raises(SettingsError, match="another"):
        clean(raw, out, CleanSettings(), Execution())
    again = clean(raw, out, other, Execution(), redo=True)
    assert again is not None and again["totals"]["input"]["documents"] == 11


RUN = """
import sys
from pathlib import Path
from laneformer.data.clean import clean
from laneformer.data.executors import Execution
from laneformer.data.pipeline import CleanSettings
clean(Path(sys.argv[1]), Path(sys.argv[2]), CleanSettings(problems=(sys.argv[3],)), Execution())
"""
# A file that is there in the middle of a step: a shard half written, signatures half written, the result half written.
MOMENTS = (".clean/data/selected/.*.partial", ".clean/data/near-signatures/*/*.sig", "documents/.*.partial")


def test_a_run_killed_in_the_middle_of_steps_ends_with_the_same_bytes(tmp_path: Path) -> None:
    raw, out = tmp_path / "raw", tmp_path / "out"
    problems = str(write_problems(tmp_path / "tiny.jsonl", prompt="Sort marbles.", canonical_solution=SOLUTION))
    pairs = [[document(program(n), f"{n}.py"), document(program(n // 2), f"{n}c.py")] for n in range(400)]
    write_raw(raw, [[entry for pair in pairs[n::4] for entry in pair] for n in range(4)])
    for moment in MOMENTS:
        process = subprocess.Popen([sys.executable, "-c", RUN, raw, out, problems], start_new_session=True)
        while not list(out.glob(moment)):
            assert process.poll() is None, f"ended before {moment}"
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not (out / "report.json").exists()
    report = clean(raw, out, CleanSettings(problems=(problems,)), Execution())
    expected = clean(raw, tmp_path / "whole", CleanSettings(problems=(problems,)), Execution())
    assert contents(out / "documents") == contents(tmp_path / "whole" / "documents")
    assert report is not None and expected is not None
    for part in ("totals", "sources", "licences", "secrets", "contaminated"):
        assert report[part] == expected[part]
    assert [step["filters"] for step in report["steps"]] == [step["filters"] for step in expected["steps"]]
    assert not list(out.rglob("*.partial"))


def test_a_damaged_shard_fails_the_step_and_leaves_no_result(raw: Path, tmp_path: Path) -> None:
    path = raw / "made" / "00001.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(StepFailed, match=r"step select failed: .*step\.log"):
        clean(raw, tmp_path / "out", CleanSettings(), Execution())
    assert not (tmp_path / "out" / "documents").exists() and not list((tmp_path / "out").rglob("*.partial"))


def test_a_card_needs_all_steps(tmp_path: Path, raw: Path) -> None:
    with pytest.raises(CleanError, match="no cleaned corpus"):
        finish(tmp_path)
    clean(raw, tmp_path / "out", CleanSettings(), Execution())
    (tmp_path / "out" / ".clean" / "logs" / "finish" / "completions" / "00002").unlink()
    with pytest.raises(CleanError, match="2 of 3 tasks of step finish"):
        finish(tmp_path / "out")


def test_input_that_is_missing_or_inside_out_is_refused(tmp_path: Path, raw: Path) -> None:
    with pytest.raises(CleanError, match="holds no documents"):
        clean(tmp_path / "nothing", tmp_path / "out", CleanSettings(), Execution())
    with pytest.raises(CleanError, match="outside"):
        clean(raw, raw / "out", CleanSettings(), Execution())


def test_a_limit_that_does_not_exist_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"no limit 'max_lines'; did you mean max_line\?"):
        parse_limits(["max_lines=3"])
    with pytest.raises(SettingsError, match="expected a number"):
        parse_limits(["max_line=many"])
