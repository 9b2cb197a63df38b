"""What a model is asked for each problem, and what of its answer is code."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from laneformer.evaluation.problems import Problem
from laneformer.evaluation.samples import Sample

# Where a completed function ends (arXiv 2107.03374, section 2).
FUNCTION_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
# A whole program may define several functions; it ends where something else begins.
PROGRAM_STOPS = ('\n"""', "\nassert", "\n# Test", "\nif __name__", "\nprint")
SHOT_STOPS = ("[DONE]",)
STYLES = ("few-shot", "docstring")
FENCE = re.compile(r"```(?:python|py|Python)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Asked:
    """A prompt, the strings that end its answer, and how the answer becomes a sample."""

    prompt: str
    stops: tuple[str, ...]
    sample: Callable[[str], Sample]


def ask(problem: Problem, style: str, shots: Sequence[dict[str, Any]], chat: bool) -> Asked:
    """What to ask for a problem: `style` is few-shot or docstring, for tasks told in words; `chat` asks as a user."""
    if chat:
        return Asked(chat_question(problem), (), lambda answer: chat_sample(problem, answer))
    if not problem.text:
        return Asked(problem.prefix, FUNCTION_STOPS, completion(problem, FUNCTION_STOPS))
    if problem.prefix or style == "docstring":
        prompt = problem.prefix or f'"""\n{problem.text}\n{problem.examples[0]}\n"""\n'
        return Asked(prompt, PROGRAM_STOPS, completion(problem, PROGRAM_STOPS))
    return Asked(few_shot(problem, shots), SHOT_STOPS, completion(problem, SHOT_STOPS))


def completion(problem: Problem, stops: Sequence[str]) -> Callable[[str], Sample]:
    """From an answer to a sample that follows the problem's prefix."""
    return lambda answer: Sample(problem.task_id, completion=cut(answer, stops))


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before its first stop string."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def few_shot(problem: Problem, shots: Sequence[dict[str, Any]]) -> str:
    """The prompt of MBPP's paper (arXiv 2108.07732, section 4): three solved tasks, then this one."""
    parts = [
        task_in_words(shot["text"], shot["test_list"]) + shot["code"].replace("\r\n", "\n") + "\n[DONE]\n\n"
        for shot in shots
    ]
    return "".join(parts) + task_in_words(problem.text, problem.examples)


def task_in_words(text: str, tests: Sequence[str]) -> str:
    """One task as MBPP's paper puts it."""
    shown = "\n".join(tests)
    return (
        f"You are an expert Python programmer, and here is your task: {text} "
        f"Your code should pass these tests:\n\n{shown}\n[BEGIN]\n"
    )


def chat_question(problem: Problem) -> str:
    """What a user would ask."""
    if problem.text:
        shown = "\n".join(problem.examples)
        tests = f"\nThe code has to pass these tests:\n```python\n{shown}\n```" if shown else ""
        return f"Write Python code for this task. Answer with one code block.\n\n{problem.text}{tests}"
    return (
        "Complete this Python function. Answer with one code block that holds the whole function.\n\n"
        f"```python\n{problem.prefix.strip()}\n```"
    )


def chat_sample(problem: Problem, answer: str) -> Sample:
    """The first code block that defines the function, or the first one, or the whole answer."""
    blocks = FENCE.findall(answer) or [answer]
    defines = f"def {problem.entry_point}"
    code = next((block for block in blocks if defines in block), blocks[0])
    if problem.text:
        return Sample(problem.task_id, solution=code)
    if defines not in code:
        return Sample(problem.task_id, completion=code)
    # The imports and helpers that the problem gives precede what was written.
    return Sample(problem.task_id, solution=problem.prefix.partition(defines)[0] + code)
