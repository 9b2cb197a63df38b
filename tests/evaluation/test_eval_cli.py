"""`infer eval` as its users meet it."""

from __future__ import annotations

import json
import math

import pytest
import torch
from eval_models import write_checkpoint
from typer.testing import CliRunner

from laneformer import Laneformer
from laneformer.evaluation.completers import Decoding
from laneformer.evaluation.problems import read_problems
from laneformer.evaluation.sandbox import Sandbox, SandboxError
from laneformer.infer import cli
from laneformer.infer.eval_session import SessionCompleter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("eval") / "tiny")


@pytest.fixture
def evaluate(monkeypatch):
    """Runs `infer eval` in this process."""
    monkeypatch.setattr(cli.messages, "_file", None)
    return lambda *words: CliRunner().invoke(cli.app, ["eval", *[str(word) for word in words]])


@pytest.fixture(scope="module")
def runs_code():
    try:
        Sandbox()
    except SandboxError as error:
        pytest.skip(str(error))


def document(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_code_runs_only_when_the_user_says_so(evaluate, folder):
    for words in (["--canonical"], [folder]):
        result = evaluate(*words, "--suite", "humaneval")
        assert result.exit_code == 2 and "--allow-code-execution" in result.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--suite", "nonsense"], "nonsense"),
        (["--suite", "humaneval", "--allow-code-execution"], "give one of FOLDER"),
        (["--suite", "infilling", "--canonical"], "--canonical"),
        (["--suite", "bits-per-byte", "FOLDER"], "--text"),
        (["--suite", "infilling", "--endpoint", "http://x"], "--model"),
        (["--suite", "humaneval", "--allow-code-execution", "FOLDER", "--k", "1,10"], "--samples 10"),
        (["--suite", "humaneval", "--allow-code-execution", "--canonical", "--humaneval", "absent.jsonl"], "absent"),
        (["--suite", "infilling", "FOLDER", "--mbpp-prompt", "zero"], "few-shot"),
        (["--suite", "infilling", "absent-folder"], "absent-folder"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(evaluate, folder, words, told, runs_code):
    result = evaluate(*[str(folder) if word == "FOLDER" else word for word in words])
    assert result.exit_code == 2 and told in result.stderr and "Traceback" not in result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_canonical_solutions_need_no_checkpoint(evaluate, runs_code):
    result = evaluate(
        "--suite", "humaneval,mbpp", "--canonical", "--allow-code-execution", "--limit", "3", "--json", "-"
    )
    found = document(result)
    assert "3/3" in result.stdout and "humaneval" in result.stdout
    for suite in ("humaneval", "mbpp"):
        row = found["suites"][suite]
        assert (row["correct"], row["problems"], row["statuses"]["passed"]) == (3, 3, 3)
        assert row["scores"]["pass@1"]["mean"] == 1.0
    assert found["settings"]["limit"] == 3 and found["sandbox"]["seconds"] == 10.0


def test_a_checkpoint_is_sampled_and_judged_and_its_samples_are_kept(evaluate, folder, tmp_path, runs_code):
    out = tmp_path / "samples.jsonl"
    words = [folder, "--suite", "humaneval", "--allow-code-execution", "--limit", "2", "--max-tokens", "9", "--samples",
             "3", "--temperature", "1", "--k", "1,2", "--samples-out", out, "--json", "-"]  # fmt: skip
    found = document(evaluate(*words))
    row = found["suites"]["humaneval"]
    assert (row["samples"], row["problems"], sum(row["statuses"].values())) == (6, 2, 6)
    assert row["scores"]["pass@2"]["method"].startswith("bootstrap")
    lines = out.read_text().splitlines()
    assert [json.loads(line)["task_id"] for line in lines] == ["HumanEval/0"] * 3 + ["HumanEval/1"] * 3
    assert len({json.loads(line)["completion"] for line in lines[:3]}) > 1


def test_samples_of_a_file_are_judged_without_a_model(evaluate, tmp_path, runs_code):
    first, second = read_problems("humaneval")[:2]
    path = tmp_path / "theirs.jsonl"
    rows = [
        {"task_id": first.task_id, "completion": first.canonical},
        {"task_id": first.task_id, "completion": "    return None\n"},
        {"task_id": second.task_id, "solution": second.prefix + second.canonical},
        {"task_id": second.task_id, "solution": "def"},
        {"task_id": "HumanEval/9", "completion": ""},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--samples-in", path, "--suite", "humaneval", "--allow-code-execution", "--limit", "2", "--json", "-"]
    row = document(evaluate(*words))["suites"]["humaneval"]
    assert [found["statuses"] for found in row["per_problem"]] == [["passed", "failed"], ["passed", "syntax"]]
    assert row["scores"]["pass@1"]["mean"] == 0.5


def test_texts_infilling_and_syntax_need_no_permission(evaluate, folder, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.py").write_text("def f(x):\n    return x + 1  # é\n" * 9)
    words = [folder, "--suite", "bits-per-byte,infilling,syntax-valid", "--text", tmp_path / "texts", "--limit", "2",
             "--max-tokens", "5", "--threads", "1", "--json", tmp_path / "out.json"]  # fmt: skip
    result = evaluate(*words)
    assert result.exit_code == 0, result.stderr
    found = json.loads((tmp_path / "out.json").read_text())["suites"]
    assert 0 < found["bits-per-byte"]["sources"]["py"]["bits_per_byte"] < 20
    assert {kind: row["problems"] for kind, row in found["infilling"]["kinds"].items()} == {
        "single-line": 2, "random-span": 2,
    }  # fmt: skip
    assert found["syntax-valid"]["samples"] == 2
    assert "exact match, random-span" in result.stdout


def test_what_a_model_cannot_do_is_not_available_with_the_reason(evaluate):
    words = ["--endpoint", "http://127.0.0.1:9", "--model", "m", "--suite", "infilling", "--json", "-"]
    found = document(evaluate(*words))["suites"]["infilling"]
    assert "infilling tokens" in found["not_available"]


@pytest.fixture(scope="module")
def session(folder):
    with SessionCompleter(folder, threads=1) as session:
        yield session


def test_a_session_scores_texts_as_the_model_itself(session, folder):
    text = "def f(x):\n    return x + 1\n"
    ids = [0, *session.text.encode(text)]
    nats, tokens = session.nats(text)
    with torch.inference_mode():
        table = Laneformer.from_pretrained(folder)(torch.tensor([ids])).double().log_softmax(-1)[0]
    expected = -sum(float(table[at - 1, ids[at]]) for at in range(1, len(ids)))
    assert nats == pytest.approx(expected, rel=1e-4) and tokens == len(ids) - 1
    assert math.isfinite(session.nats("long " * 99)[0])


def test_a_session_samples_by_seed_greedily_once_and_cuts_what_does_not_fit(session):
    settings = {"max_tokens": 6, "stop": (), "n": 3}
    greedy = session.complete(["def"], Decoding(temperature=0.0, seed=0, **settings))[0]
    assert len(set(greedy)) == 1 and len(greedy) == 3
    drawn = session.complete(["def", "def"], Decoding(temperature=1.5, seed=0, **settings))
    assert len({*drawn[0], *drawn[1]}) > 3
    assert session.complete(["def", "def"], Decoding(temperature=1.5, seed=0, **settings)) == drawn
    long, short = "word " * 500, ("word " * 500)[-300:]
    ends = [session.complete([text], Decoding(temperature=0.0, seed=0, **settings))[0][0] for text in (long, short)]
    assert ends[0] == ends[1]


def test_special_tokens_in_prompts_are_single_ids(session):
    prompt = session.text.encode(session.infilling_prompt("a", "b"))
    assert (prompt[0], prompt[2], prompt[-1]) == (2, 3, 4)
    assert session._chat("hi") == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert session.text.encode(session._chat("hi"))[0] == 5
