"""Cleaned documents to shards: what is in them, what is held out, and what a kill changes (nothing)."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter

import pytest

pytest.importorskip("datatrove")

from laneformer.data.executors import Execution
from laneformer.data.held_out import HASHES, content_hash
from laneformer.data.shards import ShardError, open_shard, read_manifest
from laneformer.data.tokenize import begin, steps, tokenize_documents
from laneformer.data.tokenize_plan import TokenizeError
from laneformer.data.tokenizer import read_tokenizer, save_tokenizer, train_tokenizer

TEXTS = {
    "code": [f"def f{n}(x):\n    return '<|endoftext|>' + x * {n}\n" * (1 + n % 3) for n in range(60)],
    "prose/é": [f"Number {n} is ☃ a number.\n" for n in range(25)],
    "pair": ["one", "two"],
    "single": ["alone", "alone"],
}


def write(folder, texts=TEXTS, files=3):
    """Documents of all sources, dealt out to files."""
    documents = [
        {"text": text, "id": f"{source}/{n}", "metadata": {"source": source, "license": "MIT"}}
        for source, several in texts.items()
        for n, text in enumerate(several)
    ]
    (folder / "documents").mkdir(parents=True, exist_ok=True)
    for number in range(files):
        lines = "".join(json.dumps(document) + "\n" for document in documents[number::files])
        path = folder / "documents" / f"{number:05d}.jsonl.gz"
        path.write_bytes(gzip.compress(lines.encode(), mtime=0))
    return folder


@pytest.fixture
def corpus(tmp_path):
    return write(tmp_path / "corpus")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, train_tokenizer([text for texts in TEXTS.values() for text in texts], 300))
    return folder


def decoded(folder):
    """The documents of each source and split, decoded, with their shards' names and sizes."""
    manifest, (tokenizer, _) = read_manifest(folder), read_tokenizer(folder)
    found = {}
    for info in manifest.shards:
        shard = open_shard(folder, info, manifest)
        ends = shard.documents[:, 0]
        assert shard.tokens[0] == 0 and (shard.tokens == 0).sum() == len(ends) + 1 and shard.learn is None
        texts = [tokenizer.decode(shard.tokens[a : b - 1]) for a, b in zip([1, *ends[:-1]], ends, strict=True)]
        assert [len(text.encode()) for text in texts] == shard.documents[:, 1].tolist()
        found.setdefault((info.source, info.split), []).extend(texts)
    return found


def contents(folder):
    """Every file's bytes, but for the place of the documents."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    plan = json.loads(files.pop("tokenize.json"))
    return {**files, "plan": {**plan, "folder": ""}}


def test_every_document_is_in_the_shards_of_its_source_once(tmp_path, corpus, tokenizer):
    done = tokenize_documents(corpus, tmp_path / "out", tokenizer, valid_fraction=0.2)
    found = decoded(tmp_path / "out")
    for source, texts in TEXTS.items():
        both = found.get((source, "train"), []) + found.get((source, "valid"), [])
        assert Counter(both) == Counter(texts)
    assert done.manifest == read_manifest(tmp_path / "out")
    assert done.num_bytes == sum(len(text.encode()) for texts in TEXTS.values() for text in texts)
    assert done.num_tokens == sum(shard.num_tokens for shard in done.manifest.shards)
    left = sorted(path.suffix for path in (tmp_path / "out").iterdir())
    assert set(left) == {".bin", ".json"} and left.count(".json") == 4


def test_a_share_of_each_source_is_held_out_by_its_content(tmp_path, corpus, tokenizer):
    tokenize_documents(corpus, tmp_path / "out", tokenizer, valid_fraction=0.2)
    found = decoded(tmp_path / "out")
    for source in ("code", "prose/é"):
        expected = sorted(text for text in TEXTS[source] if content_hash(text) < 0.2 * HASHES)
        assert expected and sorted(found[source, "valid"]) == expected
    assert len(found["pair", "train"]) == len(found["pair", "valid"]) == 1
    assert found["single", "train"] == ["alone", "alone"] and ("single", "valid") not in found


@pytest.mark.parametrize("fraction", [0, 1e-12, 0.999999])
def test_one_document_stays_on_either_side_unless_nothing_is_to_be_held_out(tmp_path, corpus, tokenizer, fraction):
    tokenize_documents(corpus, tmp_path / "out", tokenizer, valid_fraction=fraction)
    found = decoded(tmp_path / "out")
    for source, texts in TEXTS.items():
        held_out = len(found.get((source, "valid"), []))
        few = 1 if fraction < 0.5 else len(texts) - 1
        assert held_out == (0 if fraction == 0 or source == "single" else few)


def test_shards_are_limited_in_size_and_named_by_their_place(tmp_path, corpus, tokenizer):
    out = tmp_path / "out"
    tokenize_documents(corpus, out, tokenizer, shard_tokens=90, tasks=2)
    shards = read_manifest(out).shards
    assert all(shard.num_tokens <= 90 or shard.num_documents == 1 for shard in shards)
    names = [shard.name for shard in shards if (shard.source, shard.split) == ("code", "train")]
    first = [name for name in names if name.startswith("code-train-00000")]
    assert first == [f"code-train-00000-{n:04d}" for n in range(len(first))] and len(first) > 3
    assert {name[:16] for name in names} == {"code-train-00000", "code-train-00001"}
    large = tmp_path / "large"
    tokenize_documents(corpus, large, tokenizer, tasks=2)
    assert {key: sorted(texts) for key, texts in decoded(out).items()} == {
        key: sorted(texts) for key, texts in decoded(large).items()
    }


def test_two_workers_write_what_one_does(tmp_path, corpus, tokenizer):
    for name, workers in (("one", 1), ("two", 2)):
        tokenize_documents(corpus, tmp_path / name, tokenizer, shard_tokens=200, execution=Execution(workers=workers))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


# Each child is killed at its N-th rename, so that every kind of moment is met; the last one comes to the end.
KILLED = """
import os, signal, sys
from pathlib import Path
from laneformer.data.tokenize import tokenize_documents
corpus, out, tokenizer = map(Path, sys.argv[1:])
kills = 0
while True:
    child = os.fork()
    if child == 0:
        left, replace = [6 + 3 * (kills % 4)], os.replace
        def killing(old, new):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(old, new)
        os.replace = killing
        tokenize_documents(corpus, out, tokenizer, shard_tokens=250)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    kills += 1
    assert not (out / "manifest.json").exists()
print(kills)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_job_that_is_killed_again_and_again_ends_up_the_same(tmp_path, corpus, tokenizer):
    command = [sys.executable, "-c", KILLED, str(corpus), str(tmp_path / "killed"), str(tokenizer)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 6
    tokenize_documents(corpus, tmp_path / "whole", tokenizer, shard_tokens=250)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_finished_job_is_found_finished_and_another_is_refused(tmp_path, corpus, tokenizer):
    out = tmp_path / "out"
    tokenize_documents(corpus, out, tokenizer)
    before = contents(out)
    assert tokenize_documents(corpus, out, tokenizer).num_tokens == 0
    # The documents may have moved; the tokenizer in the folder is the same one.
    corpus = corpus.rename(tmp_path / "moved")
    assert tokenize_documents(corpus, out, out).num_tokens == 0
    for change, message in [
        ({"valid_fraction": 0.1}, "valid_fraction was 0.05, is 0.1"),
        ({"shard_tokens": 999}, "shard_tokens was 67108864, is 999"),
        ({"tasks": 2}, "tasks was 3, is 2"),
    ]:
        with pytest.raises(TokenizeError, match=message):
            tokenize_documents(corpus, out, tokenizer, **change)
    save_tokenizer(tmp_path / "other", train_tokenizer(["x"], 263))
    with pytest.raises(TokenizeError, match="tokenizer was"):
        tokenize_documents(corpus, out, tmp_path / "other")
    write(corpus, {**TEXTS, "pair": ["one", "three"]}, files=3)
    (corpus / "documents" / "more.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(TokenizeError, match=r"documents added: more.jsonl; documents changed: \d+.jsonl.gz"):
        tokenize_documents(corpus, out, tokenizer, tasks=3)
    assert contents(out) == before


def test_a_begun_job_refuses_other_settings_too(tmp_path, corpus, tokenizer):
    begin(corpus, tmp_path / "out", tokenizer)
    with pytest.raises(TokenizeError, match="shard_tokens was 67108864, is 100"):
        begin(corpus, tmp_path / "out", tokenizer, shard_tokens=100)
    with pytest.raises(ShardError, match="holds no manifest"):
        read_manifest(tmp_path / "out")


@pytest.mark.parametrize("line", ["{", "[]", '{"id": "a"}', '{"text": 3}', '{"text": "\\ud800"}'])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_line_that_cannot_be_read_is_an_error_with_its_place(tmp_path, corpus, tokenizer, line, workers):
    (corpus / "documents" / "bad.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(TokenizeError, match=r"bad.jsonl, line 2"):
        tokenize_documents(corpus, tmp_path / "out", tokenizer, execution=Execution(workers=workers))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_file_cut_short_is_an_error(tmp_path, corpus, tokenizer):
    path = corpus / "documents" / "00001.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(TokenizeError, match=r"00001.jsonl.gz is damaged after line \d+"):
        tokenize_documents(corpus, tmp_path / "out", tokenizer)


def test_folders_that_cannot_serve_are_refused(tmp_path, corpus, tokenizer):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years")
    with pytest.raises(TokenizeError, match="not made by tokenising"):
        tokenize_documents(corpus, tmp_path / "out", tokenizer)
    with pytest.raises(TokenizeError, match="no file of documents"):
        tokenize_documents(tmp_path / "out", tmp_path / "new", tokenizer)
    with pytest.raises(TokenizeError, match="at least 0 and below 1, got 1"):
        tokenize_documents(corpus, tmp_path / "new", tokenizer, valid_fraction=1)


def test_the_steps_can_be_given_to_any_executor(tmp_path, corpus, tokenizer):
    from datatrove.executor import LocalPipelineExecutor

    plan = begin(corpus, tmp_path / "out", tokenizer)
    assert plan is not None
    last = None
    for step in steps(tmp_path / "out", plan.tasks):
        logs = str(tmp_path / "logs" / step.name)
        last = LocalPipelineExecutor(list(step.pipeline), step.tasks, 1, logging_dir=logs, depends=last)
    assert last is not None
    last.run()
    tokenize_documents(corpus, tmp_path / "whole", tokenizer)
    assert tokenize_documents(corpus, tmp_path / "out", tokenizer).num_tokens == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
