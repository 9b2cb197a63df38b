"""Suites that run code: samples from a model or a file, judged in the sandbox, counted."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from laneformer.evaluation.completers import Completer, Decoding
from laneformer.evaluation.problems import Problem, read_shots
from laneformer.evaluation.prompts import ask
from laneformer.evaluation.samples import Sample, SampleError, SampleFile
from laneformer.evaluation.sandbox import STATUSES, Outcome, Sandbox
from laneformer.evaluation.scores import score_pass_at_k

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Drawing:
    """How samples are drawn: `samples` for each problem; `style` is few-shot or docstring, for MBPP."""

    samples: int = 1
    temperature: float = 0.0
    max_tokens: int = 512
    seed: int = 0
    style: str = "few-shot"
    chat: bool = False


def canonical_samples(problems: Sequence[Problem]) -> list[Sample]:
    """The solutions that the problems bring with them."""
    return [Sample(problem.task_id, completion=problem.canonical) for problem in problems]


def draw_samples(
    model: Completer, problems: Sequence[Problem], drawing: Drawing, kept: SampleFile | None, progress: Progress
) -> list[Sample]:
    """Samples in the order of the problems; those that `kept` already holds are not drawn again."""
    shots = read_shots() if any(problem.text for problem in problems) else []
    found: list[Sample] = []
    for done, problem in enumerate(problems):
        progress(done, len(problems))
        had = list((kept.found if kept else {}).get(problem.task_id, ()))[: drawing.samples]
        if len(had) < drawing.samples:
            asked = ask(problem, drawing.style, shots, drawing.chat)
            # All are drawn together and those that are there are left out, so that going on changes nothing.
            how = Decoding(
                max_tokens=drawing.max_tokens,
                temperature=drawing.temperature,
                n=drawing.samples,
                stop=asked.stops,
                seed=drawing.seed + done,
                chat=drawing.chat,
            )
            answers = model.complete([asked.prompt], how)[0]
            new = [asked.sample(answer) for answer in answers[len(had) :]]
            if kept is not None:
                kept.add(new)
            had += new
        found += had
    progress(len(problems), len(problems))
    return found


def match(problems: Sequence[Problem], samples: Sequence[Sample]) -> list[tuple[Problem, Sample]]:
    """Each sample with its problem; raises SampleError for problems without samples and samples without problems."""
    by_id = {problem.task_id: problem for problem in problems}
    unknown = sorted({sample.task_id for sample in samples} - set(by_id))
    if unknown:
        raise SampleError(f"samples of problems that are not in this set: {', '.join(unknown[:5])}")
    missing = sorted(set(by_id) - {sample.task_id for sample in samples})
    if missing:
        raise SampleError(f"no sample for {len(missing)} problems, as {', '.join(missing[:3])}; add them or --limit")
    return [(by_id[sample.task_id], sample) for sample in samples]


def judge(
    sandbox: Sandbox, pairs: Sequence[tuple[Problem, Sample]], workers: int | None, progress: Progress
) -> list[Outcome]:
    """How each sample ended, in order; `workers` run at once, one a core by default."""
    outcomes: list[Outcome] = []
    pool = ThreadPoolExecutor(workers or cores())
    try:
        jobs = [problem.job(sample.program(problem)) for problem, sample in pairs]
        for outcome in pool.map(sandbox.run, jobs):
            outcomes.append(outcome)
            progress(len(outcomes), len(pairs))
    finally:
        pool.shutdown(cancel_futures=True)
    return outcomes


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def summary(pairs: Sequence[tuple[Problem, Sample]], outcomes: Sequence[Outcome], ks: Sequence[int]) -> dict[str, Any]:
    """pass@k, the number of samples of every status, and each sample's status and reason by problem.

    A sample whose run could not be set up counts as wrong, and its status says that it was never judged.
    """
    by_problem: dict[str, list[Outcome]] = {}
    for (problem, _), outcome in zip(pairs, outcomes, strict=True):
        by_problem.setdefault(problem.task_id, []).append(outcome)
    counts = [(len(found), sum(o.status == "passed" for o in found)) for found in by_problem.values()]
    statuses = Counter(outcome.status for outcome in outcomes)
    return {
        "problems": len(by_problem),
        "samples": len(outcomes),
        "correct": sum(correct for _, correct in counts),
        "scores": {f"pass@{k}": asdict(score_pass_at_k(counts, k)) for k in ks},
        "statuses": {status: statuses[status] for status in STATUSES},
        "per_problem": [
            {"task_id": task, "statuses": [o.status for o in found], "reasons": [o.text for o in found]}
            for task, found in by_problem.items()
        ],
    }
