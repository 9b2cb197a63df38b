"""Problems come from the bundled files or the user's, in four formats, and become the prompts that papers use."""

from __future__ import annotations

import json

import pytest

from laneformer.evaluation.compare import coerce, same
from laneformer.evaluation.problems import ProblemError, read_problems, read_shots, read_spans
from laneformer.evaluation.prompts import FUNCTION_STOPS, ask, cut


def test_the_bundled_sets_are_whole():
    humaneval, mbpp = read_problems("humaneval"), read_problems("mbpp")
    assert [problem.task_id for problem in humaneval] == [f"HumanEval/{i}" for i in range(164)]
    assert [problem.task_id for problem in mbpp] == [f"Mbpp/{i}" for i in range(11, 511)]
    assert (mbpp[0].entry_point, len(mbpp[0].examples)) == ("remove_Occ", 3)
    assert [shot["task_id"] for shot in read_shots()] == [2, 3, 4]
    lines, spans = read_spans("single-line"), read_spans("random-span")
    assert (len(lines), len(spans)) == (1033, 164)
    # Every span, put back, gives a problem's canonical program but for white space, and for two corrected docstrings.
    whole = {"".join((problem.prefix + problem.canonical).split()) for problem in humaneval}
    joined = {"".join((span.prefix + span.middle + span.suffix).split()) for span in [*lines, *spans]}
    assert len(joined) >= 164 and len(joined - whole) == 2


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


PLUS = {
    "task_id": "HumanEval/900", "prompt": "def f(x):\n", "entry_point": "f", "canonical_solution": "    return x\n",
    "base_input": [[1]], "plus_input": [[2], [3.5]], "contract": "", "atol": 1e-6,
}  # fmt: skip


def test_evalplus_formats_are_read_from_an_option_or_the_environment(tmp_path, monkeypatch):
    path = write(tmp_path / "plus.jsonl", PLUS, {**PLUS, "task_id": "HumanEval/901", "test": "def check(candidate): 1"})
    monkeypatch.setenv("HUMANEVAL_OVERRIDE_PATH", str(path))
    inputs, tested = read_problems("humaneval")
    assert (inputs.kind, inputs.inputs, inputs.atol) == ("inputs", ([1], [2], [3.5]), 1e-6)
    assert inputs.job("x").canonical == "def f(x):\n    return x\n"
    assert (tested.kind, tested.test) == ("check", "def check(candidate): 1")
    task = {**PLUS, "task_id": "Mbpp/2", "prompt": '"""\nSay it.\nassert f((1,), {2}) == 1\n"""\n',
            "assertion": "assert f((1,), {2}) == 1", "base_input": [[[5, 6], [7]]], "plus_input": []}  # fmt: skip
    (mbpp,) = read_problems("mbpp", write(tmp_path / "mbpp.jsonl", task))
    assert coerce([list(row) for row in mbpp.inputs], list(mbpp.example or ())) == [[(5, 6), {7}]]
    assert ask(mbpp, "few-shot", read_shots(), False).prompt == task["prompt"]


@pytest.mark.parametrize("text", ["{", "[1]\n", '{"task_id": "HumanEval/1"}\n', ""])
def test_a_file_that_holds_no_problems_is_refused_by_name(tmp_path, text):
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    with pytest.raises(ProblemError, match=r"broken\.jsonl"):
        read_problems("humaneval", path)
    with pytest.raises(ProblemError, match="absent"):
        read_problems("mbpp", tmp_path / "absent.jsonl")


def test_types_that_json_has_not_come_back_from_an_example():
    assert coerce([[[[1, 2], [3]], ["a"]]], [[(0, 0), (9,)], {"z"}]) == [[[(1, 2), (3,)], {"a"}]]
    assert coerce([["1j", {"a": [1]}]], [2j, {"b": (0,)}]) == [[1j, {"a": (1,)}]]
    assert coerce([[[1]]], None) == [[[1]]]


def test_outputs_are_compared_by_evalplus_rules():
    assert same("f", [], [1.0, 2.0000001], [1.0, 2.0], 0.0) and not same("f", [], [1.0, 2.1], [1.0, 2.0], 0.0)
    assert same("f", [], float("nan"), float("nan"), 0.0) and not same("f", [], 3, "3", 0.0)
    assert not same("f", [], True, 1.0000001, 0.0) and not same("f", [], 2, 1, 1e-6)
    assert not same("f", [], [1.0], [1.0, 2.0], 1e-6)
    assert same("f", [], float("inf"), float("inf"), 0.0) and not same("f", [], 1e308, float("inf"), 1e-6)
    assert same("find_zero", [[-6, 11, -6, 1]], 3.0000001, 1.0, 1e-4) and not same(
        "find_zero", [[1, 2]], 1.0, 1.0, 1e-4
    )
    assert same("Diff", [], [2, 1], [1, 2], 0.0) and same("check_str", [], "x", True, 0.0)


def test_prompts_are_those_of_the_papers():
    function, task = read_problems("humaneval")[0], read_problems("mbpp")[0]
    asked = ask(function, "few-shot", [], False)
    assert asked.prompt == function.prefix and asked.stops == FUNCTION_STOPS
    assert asked.sample("    return 1\n\nprint(2)").completion == "    return 1\n"
    shown = ask(task, "few-shot", read_shots(), False).prompt
    assert shown.count("[BEGIN]") == 4 and shown.count("[DONE]") == 3 and shown.endswith("[BEGIN]\n")
    assert all(example in shown for example in task.examples) and "similar_elements" in shown
    assert ask(task, "few-shot", read_shots(), False).sample("def g(): 1\n[DONE]\nx").completion == "def g(): 1\n"
    zero = ask(task, "docstring", [], False).prompt
    assert zero == f'"""\n{task.text}\n{task.examples[0]}\n"""\n'


def test_stop_strings_cut_at_the_first_of_them():
    assert cut("a\nclass B\ndef c", FUNCTION_STOPS) == "a" and cut("    x = 1\n", FUNCTION_STOPS) == "    x = 1\n"


def test_chat_answers_are_cut_out_of_their_code_blocks():
    problem = read_problems("humaneval")[0]
    asked = ask(problem, "few-shot", [], True)
    assert problem.prefix.strip() in asked.prompt and asked.stops == ()
    block = "def has_close_elements(numbers, threshold):\n    return False\n"
    sample = asked.sample(f"Sure!\n```\nx\n```\n```python\n{block}```\nDone.")
    # The prompt's import precedes the function, so that its annotations still work.
    assert sample.program(problem) == "from typing import List\n\n\n" + block
    unfinished = asked.sample(f"```python\n{block}")
    assert unfinished.solution == sample.solution
    assert asked.sample("    return False\n").program(problem) == problem.prefix + "    return False\n"
