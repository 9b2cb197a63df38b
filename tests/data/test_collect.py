"""What each kind of source becomes, and that a collection goes on where it was."""

from __future__ import annotations

import gzip
import json
import platform
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from corpus_maker import read_documents

from laneformer.data.choose import choose_source
from laneformer.data.collect import collect, collect_commands, incomplete
from laneformer.data.executors import Execution, StepFailed
from laneformer.data.records import SettingsError
from laneformer.data.sources import CollectError, installed_distributions, standard_library


def source(licence: str | None = None, limit: int | None = None, kind: str = "auto", name: str = "", **place):
    options = {"name": name, "licence": licence, "column": "text", "kind": kind, "limit": limit}
    return choose_source(place, options, (".py", "md"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name in ("a.py", "b.md", "c.bin", "sub/d.py", ".hidden/e.py", "node_modules/f.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\r\n")
    (root / "latin.py").write_bytes("# caf\xe9\n".encode("latin-1"))
    (root / "zero.py").write_bytes(b"a = 1\0\n")
    (root / "empty.py").write_text("\n")
    return root


def test_a_folders_files_become_documents_with_their_metadata(project: Path, tmp_path: Path) -> None:
    done = collect(tmp_path / "raw", source(folder=project, licence="apache 2.0"), Execution(), command="the command")
    found = {d["metadata"]["path"]: d for d in read_documents(tmp_path / "raw" / "project")}
    assert set(found) == {"a.py", "b.md", "sub/d.py"}
    assert found["sub/d.py"]["text"] == "# sub/d.py\n"
    expected = {"source": "project", "path": "sub/d.py", "license": "Apache-2.0", "origin": "project"}
    assert found["sub/d.py"]["metadata"] == expected
    assert done.documents == 3 and done.bytes == len("# a.py\n# b.md\n# sub/d.py\n")
    assert done.skipped == {"not UTF-8": 1, "not text": 1, "empty": 1}
    assert collect_commands(tmp_path / "raw") == ["the command"]


def test_a_collection_goes_on_and_ends_with_the_same_bytes(project: Path, tmp_path: Path) -> None:
    raw, chosen = tmp_path / "raw", source(folder=project)
    first = collect(raw, chosen, Execution())
    before = {path: path.read_bytes() for path in raw.glob("*/*.jsonl.gz")}
    # What a killed task leaves: no file, no mark, a part beside the name.
    lost = sorted(before)[1]
    lost.unlink()
    (raw / "project" / ".collect" / "collect" / "completions" / "00001").unlink()
    (lost.parent / f".{lost.name}.77.partial").write_bytes(b"half")
    assert incomplete(raw) == ["project"]
    second = collect(raw, chosen, Execution())
    assert {path: path.read_bytes() for path in raw.glob("*/*.jsonl.gz")} == before
    assert (second.documents, second.skipped) == (first.documents, first.skipped)
    assert incomplete(raw) == [] and not list(raw.rglob("*.partial"))


def test_a_source_that_changed_is_refused_until_redo(project: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    collect(raw, source(folder=project), Execution())
    (project / "new.py").write_text("x = 1\n")
    with pytest.raises(SettingsError, match=r"files was \d+, is \d+"):
        collect(raw, source(folder=project), Execution())
    assert collect(raw, source(folder=project), Execution(), redo=True).documents == 4


def test_rows_keep_their_own_path_and_licence_unless_one_is_given(tmp_path: Path) -> None:
    rows = [
        {"text": "a", "metadata": {"path": "x.py", "license": "mit"}},
        {"text": "b", "max_stars_repo_path": "y.py", "max_stars_repo_licenses": ["MIT", "gpl-3.0"]},
        {"text": "c"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    collect(tmp_path / "raw", source(jsonl=tmp_path / "rows.jsonl", kind="code"), Execution())
    found = [d["metadata"] for d in read_documents(tmp_path / "raw" / "rows")]
    assert [m["license"] for m in found] == ["MIT", "MIT AND gpl-3.0", "unknown"]
    assert [m["path"] for m in found] == ["x.py", "y.py", ""]
    assert {(m["kind"], m["source"]) for m in found} == {("code", "rows")}
    collect(tmp_path / "raw", source(jsonl=tmp_path / "rows.jsonl", licence="ISC", name="given"), Execution())
    assert {d["metadata"]["license"] for d in read_documents(tmp_path / "raw" / "given")} == {"ISC"}


def test_parquet_and_compressed_rows_are_read_and_a_limit_counts_over_all_files(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "z").mkdir()
    for n in range(3):
        table = pyarrow.table({"text": [f"text {n} {i}" for i in range(5)]})
        pyarrow.parquet.write_table(table, tmp_path / "p" / f"{n}.parquet")
        lines = "".join(json.dumps({"text": f"line {n} {i}"}) + "\n" for i in range(5))
        (tmp_path / "z" / f"{n}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert collect(tmp_path / "raw", source(parquet=tmp_path / "p"), Execution()).documents == 15
    assert collect(tmp_path / "raw", source(jsonl=tmp_path / "z", limit=7), Execution()).documents == 7
    assert [d["text"] for d in read_documents(tmp_path / "raw" / "z")][5:] == ["line 1 0", "line 1 1"]
    assert len({d["id"] for d in read_documents(tmp_path / "raw" / "p")}) == 15


def test_the_standard_library_is_collected_without_tests_under_its_licence() -> None:
    files = standard_library()
    paths = {file.path for file in files}
    assert {"ast.py", "json/decoder.py"} < paths
    assert not any({"test", "tests", "site-packages"} & set(Path(path).parts) for path in paths)
    assert {(file.license, file.origin) for file in files} == {("PSF-2.0", f"cpython {platform.python_version()}")}


def test_installed_distributions_name_their_licence_and_version() -> None:
    import typer

    files = [file for file in installed_distributions() if file.origin.startswith("typer ")]
    assert {(file.license, file.origin) for file in files} == {("MIT", f"typer {typer.__version__}")}
    assert "typer/main.py" in {file.path for file in files}


def test_a_hub_dataset_offline_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CollectError, match="HF_HUB_OFFLINE=0 before the command"):
        source(hf="somebody/something:en:train")


def test_a_local_dataset_is_streamed_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "set").mkdir()
    rows = "".join(json.dumps({"text": f"row {n}", "license": "mit"}) + "\n" for n in range(9))
    (tmp_path / "set" / "train.jsonl").write_text(rows)
    done = collect(tmp_path / "raw", source(hf=str(tmp_path / "set"), limit=4), Execution())
    assert done.documents == 4
    assert [d["text"] for d in read_documents(tmp_path / "raw" / "set")] == [f"row {n}" for n in range(4)]


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(CollectError, match="0 places to collect from"):
        source()
    with pytest.raises(CollectError, match="2 places"):
        source(stdlib=True, installed=True)
    with pytest.raises(CollectError, match="is no folder"):
        source(folder=tmp_path / "none")
    with pytest.raises(CollectError, match="'Fancy Licence' is not recognised"):
        source(folder=tmp_path, licence="Fancy Licence")
    with pytest.raises(CollectError, match="source name 'a b'"):
        source(stdlib=True, name="a b", limit=1)
    with pytest.raises(CollectError, match="--kind is 'poem'"):
        source(stdlib=True, kind="poem")


def test_rows_of_which_a_file_is_damaged_fail_and_leave_nothing_half_written(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(2000))
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(rows.encode())[:-100])
    with pytest.raises(StepFailed, match="step collect failed"):
        collect(tmp_path / "raw", source(jsonl=tmp_path / "bad.jsonl.gz"), Execution())
    assert incomplete(tmp_path / "raw") == ["bad"]
    assert not list((tmp_path / "raw").rglob("*.gz")) and not list((tmp_path / "raw").rglob("*.partial"))
