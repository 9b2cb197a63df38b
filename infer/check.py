"""What `infer check` does: a runner's logits against the reference, by prefill and by decoding token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from laneformer.config import LaneConfig
from laneformer.infer.ranks import RankSettings
from laneformer.infer.reference import expected_file, gate_tokens, judge, reference_logits
from laneformer.infer.session import Session

CHECK_TOKENS = 48


def run_check(
    folder: Path, schedule: str, expected: Path | None, settings: dict[str, Any], console: Console
) -> dict[str, Any]:
    """Compares the whole prompt in prefill, then half prefill and half decode; prints and returns the verdict."""
    config = LaneConfig.from_pretrained(folder)
    dtype = settings["dtype"] or config.torch_dtype
    if expected is not None:
        tokens, wanted = expected_file(expected)
        reference = expected.name
    else:
        tokens = gate_tokens(config, CHECK_TOKENS)
        wanted, reference = reference_logits(folder, tokens, schedule, dtype)
    verdicts = {}
    with Session(RankSettings(str(folder), capacity=len(tokens), **settings)) as session:
        for note in session.notes:
            console.print(f"note: {note}", style="yellow", markup=False)
        for name, prefill in (("prefill", len(tokens)), ("decode", max(1, len(tokens) // 2))):
            verdicts[name] = judge(session.logits(tokens, schedule, prefill), wanted, dtype, reference)
        runner = session.runner
    for name, verdict in verdicts.items():
        console.print(
            f"{name}: largest error / largest logit {verdict.error:.2e}, allowed {verdict.tolerance:.0e} for {dtype}"
        )
    passed = all(verdict.passed for verdict in verdicts.values())
    console.print(
        f"{'PASS' if passed else 'FAIL'}: {schedule}, {runner}, {settings['ranks']} ranks against {reference}",
        style="green" if passed else "red",
    )
    return {
        "passed": passed,
        "schedule": schedule,
        "runner": runner,
        "ranks": settings["ranks"],
        "dtype": dtype,
        "reference": reference,
        "errors": {name: verdict.error for name, verdict in verdicts.items()},
        "tolerance": verdicts["prefill"].tolerance,
    }
