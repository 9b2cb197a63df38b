"""What `infer eval` does: which suites on which model, and the document that comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from laneformer.evaluation import code_suites, text_suites
from laneformer.evaluation.code_suites import Drawing
from laneformer.evaluation.completers import Completer, NotOffered
from laneformer.evaluation.problems import INFILLING, Problem, read_problems, read_spans
from laneformer.evaluation.samples import Sample, SampleFile, read_samples
from laneformer.evaluation.sandbox import Limits, Sandbox

SUITES = ("bits-per-byte", "syntax-valid", "infilling", "humaneval", "mbpp")
CODE_SUITES = ("humaneval", "mbpp")
# (suite, done, total)
Progress = Callable[[str, int, int], None]


class EvalError(ValueError):
    """An evaluation that was asked for in a way that cannot be carried out."""


@dataclass(frozen=True)
class EvalSettings:
    """Everything that is asked of one evaluation; the CLI's options."""

    suites: tuple[str, ...]
    folder: Path | None = None
    endpoint: str | None = None
    model: str | None = None
    key_variable: str = "OPENAI_API_KEY"
    canonical: bool = False
    allow_code_execution: bool = False
    weak_sandbox: bool = False
    drawing: Drawing = field(default_factory=Drawing)
    ks: tuple[int, ...] = (1,)
    limit: int | None = None
    timeout_s: float = 10.0
    workers: int | None = None
    texts: tuple[Path, ...] = ()
    humaneval: Path | None = None
    mbpp: Path | None = None
    samples_in: Path | None = None
    samples_out: Path | None = None
    ranks: int = 1
    runner: str = "eager"
    dtype: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        unknown = [suite for suite in self.suites if suite not in SUITES]
        if unknown or not self.suites:
            raise EvalError(f"no suite {', '.join(unknown) or '(none given)'}; there are {', '.join(SUITES)}")
        code = [suite for suite in self.suites if suite in CODE_SUITES]
        if code and not self.allow_code_execution:
            raise EvalError(
                f"{', '.join(code)} runs code that a model wrote. It runs in a sandbox, but only when you say so: "
                "add --allow-code-execution"
            )
        self._check_model(code)
        if min(self.ks) < 1:
            raise EvalError(f"--k has {min(self.ks)}, expected 1 or above")
        if max(self.ks) > self.drawing.samples and not (self.canonical or self.samples_in):
            raise EvalError(f"pass@{max(self.ks)} needs --samples {max(self.ks)} at least, got {self.drawing.samples}")
        if "bits-per-byte" in self.suites and not self.texts:
            raise EvalError("bits-per-byte needs --text: files or folders of texts")

    def _check_model(self, code: Sequence[str]) -> None:
        given = [self.folder is not None, self.endpoint is not None, self.canonical, self.samples_in is not None]
        if sum(given) != 1:
            raise EvalError("give one of FOLDER, --endpoint, --canonical and --samples-in")
        if (self.canonical or self.samples_in) and len(code) < len(self.suites):
            raise EvalError("--canonical and --samples-in go with humaneval and mbpp only")
        if (self.samples_in or self.samples_out) and len(self.suites) > 1:
            raise EvalError("a file of samples holds one suite's; give one --suite")
        if self.endpoint is not None and not self.model:
            raise EvalError("--endpoint needs --model, the name that the server knows the model by")


def run_eval(settings: EvalSettings, say: Callable[[str], None], progress: Progress) -> dict[str, Any]:
    """Runs the suites; a suite that the model cannot do holds `not_available` and the reason."""
    with ExitStack() as stack:
        runs = any(suite in CODE_SUITES for suite in settings.suites)
        sandbox = open_sandbox(settings) if runs else None
        if sandbox is not None and sandbox.note:
            say(sandbox.note)
        problems = {suite: chosen(settings, suite) for suite in settings.suites if suite in CODE_SUITES}
        model = stack.enter_context(open_model(settings)) if settings.folder or settings.endpoint else None
        results: dict[str, Any] = {}
        for suite in settings.suites:
            shown = lambda done, total, suite=suite: progress(suite, done, total)  # noqa: E731
            try:
                if suite in CODE_SUITES:
                    assert sandbox is not None
                    results[suite] = run_code(settings, suite, problems[suite], model, sandbox, shown)
                else:
                    assert model is not None
                    results[suite] = run_text(settings, suite, model, shown)
            except NotOffered as reason:
                results[suite] = {"not_available": str(reason)}
        name = model.name if model else "canonical solutions" if settings.canonical else str(settings.samples_in)
        return {
            "model": name, "settings": described(settings), "suites": results,
            "sandbox": None if sandbox is None else {"namespaces": sandbox.namespaces, **asdict(sandbox.limits)},
        }  # fmt: skip


def described(settings: EvalSettings) -> dict[str, Any]:
    """The settings as JSON."""
    return json.loads(json.dumps(asdict(settings), default=str))


def open_sandbox(settings: EvalSettings) -> Sandbox:
    """The sandbox, probed."""
    return Sandbox(Limits(seconds=settings.timeout_s), namespaces=False if settings.weak_sandbox else None)


@contextmanager
def open_model(settings: EvalSettings) -> Iterator[Completer]:
    """The model: an endpoint, a checkpoint of this project, or any transformers folder."""
    if settings.endpoint is not None:
        from laneformer.evaluation.endpoint import EndpointCompleter

        yield EndpointCompleter(settings.endpoint, settings.model or "", settings.key_variable)
        return
    assert settings.folder is not None
    if is_ours(settings.folder):
        from laneformer.infer.eval_session import SessionCompleter

        with SessionCompleter(
            settings.folder, settings.ranks, settings.runner, settings.dtype, settings.threads
        ) as model:
            yield model
        return
    from laneformer.evaluation.transformers_model import TransformersCompleter

    yield TransformersCompleter(settings.folder, settings.dtype)


def is_ours(folder: Path) -> bool:
    """Whether a folder's config.json is of this architecture."""
    path = folder / "config.json"
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvalError(f"{folder} is no checkpoint folder: {error}") from None
    return not isinstance(keys, dict) or keys.get("model_type", "laneformer") == "laneformer"


def chosen(settings: EvalSettings, suite: str) -> list[Problem]:
    """The first problems of a suite, all without --limit."""
    return read_problems(suite, getattr(settings, suite))[: settings.limit]


def run_code(
    settings: EvalSettings,
    suite: str,
    problems: list[Problem],
    model: Completer | None,
    sandbox: Sandbox,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """One suite of problems whose samples run in the sandbox."""
    pairs = code_suites.match(problems, samples_for(settings, suite, problems, model, progress))
    outcomes = code_suites.judge(sandbox, pairs, settings.workers, progress)
    return code_suites.summary(pairs, outcomes, settings.ks)


def samples_for(
    settings: EvalSettings,
    suite: str,
    problems: list[Problem],
    model: Completer | None,
    progress: Callable[[int, int], None],
) -> list[Sample]:
    """Samples of the canonical solutions, of a file, or of the model."""
    if settings.samples_in is not None:
        known = {problem.task_id for problem in problems}
        samples = read_samples(settings.samples_in)
        # With --limit the samples of the problems that are left out are no mistake.
        return [sample for sample in samples if sample.task_id in known] if settings.limit else samples
    if model is None:
        return code_suites.canonical_samples(problems)
    kept = None
    if settings.samples_out is not None:
        run = {"model": model.name, "suite": suite, **asdict(replace(settings.drawing, samples=0))}
        del run["samples"]
        kept = SampleFile(settings.samples_out, run)
    return code_suites.draw_samples(model, problems, settings.drawing, kept, progress)


def run_text(
    settings: EvalSettings, suite: str, model: Completer, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """One suite that runs no code."""
    if suite == "bits-per-byte":
        return text_suites.bits_per_byte(model, text_suites.read_texts(settings.texts), progress)
    if suite == "syntax-valid":
        problems = chosen(settings, "humaneval")
        samples = code_suites.draw_samples(model, problems, settings.drawing, None, progress)
        pairs = code_suites.match(problems, samples)
        return text_suites.syntax_valid([(sample, sample.program(problem)) for problem, sample in pairs])
    rows = {}
    for kind in INFILLING:
        spans = read_spans(kind)[: settings.limit]
        rows[kind] = text_suites.infilling(
            model, spans, kind == "single-line", settings.drawing.max_tokens, settings.drawing.seed, progress
        )
    return {"kinds": rows}
