"""Does the kernel give the golden logits, and the eager runner's tokens?

Every golden case by prefill and decode in float32, float16 and bfloat16; in float32 then 64 greedy tokens.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
from common import CASES, GOLDEN, arguments, save, sizes
from safetensors.torch import load_file

from laneformer.infer.engine import all_logits, generate
from laneformer.infer.exchange import LocalExchange
from laneformer.infer.persistent import PersistentRunner
from laneformer.infer.request import Request
from laneformer.infer.runners import EagerRunner
from laneformer.infer.weights import RankWeights
from laneformer.schedule import Schedule

# Of the largest logit; the kernel and the reference round differently.
ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}
CAPACITY = 96


def runner_of(name: str, dtype: torch.dtype, device: torch.device) -> PersistentRunner:
    """The persistent runner of a golden checkpoint."""
    weights = RankWeights.load(GOLDEN / name, None, dtype, device)
    # A wait that never ends must not take the time of the other cases.
    return PersistentRunner(weights, LocalExchange(), CAPACITY, limit_s=2.0 if device.type == "cuda" else 60.0)


def compile_case(case: tuple[str, str, torch.dtype]) -> None:
    """Fills Triton's cache with both kernels of a case."""
    name, text, dtype = case
    runner = runner_of(name, dtype, torch.device("cuda", 0))
    runner._prepared(Schedule.parse(text, runner.config))


def check(name: str, text: str, expected: str, dtype: torch.dtype, s: Any) -> dict[str, Any]:
    """One case's errors."""
    wanted = load_file(GOLDEN / name / f"{expected}.safetensors")
    count = 5 if s.tiny else len(wanted["input_ids"])
    tokens, golden = wanted["input_ids"][:count].tolist(), wanted["logits"][:count]
    runner = runner_of(name, dtype, s.device)
    logits = all_logits(runner, tokens, Schedule.parse(text, runner.config), 3).double()
    error = float((logits - golden).abs().max() / golden.abs().max())
    row = {"case": name, "schedule": text, "dtype": str(dtype)[6:], "error": error, "allowed": ALLOWED[dtype]}
    row["passed"] = error < ALLOWED[dtype]
    if dtype == torch.float32:
        request = Request((5, 6, 7), 4 if s.tiny else 64, schedule=text, ignore_end=True)
        eager = EagerRunner(runner.forward.weights, LocalExchange(), CAPACITY)
        found = [[token.id for token in generate(kind, request)] for kind in (runner, eager)]
        row["greedy_tokens"] = len(found[1])
        row["same_tokens"] = found[0] == found[1]
        row["passed"] = row["passed"] and row["same_tokens"]
    return row


def main() -> None:
    """The step."""
    options = arguments(__doc__)
    s = sizes(options.tiny)
    dtypes = (torch.float32, torch.float16) if s.tiny else (torch.float32, torch.float16, torch.bfloat16)
    golden = CASES[:2] if s.tiny else CASES
    if options.compile_only:
        cases = [(name, text, dtype) for name, text, _ in golden for dtype in dtypes]
        with multiprocessing.get_context("spawn").Pool(10) as pool:
            pool.map(compile_case, cases, chunksize=1)
        return
    rows: list[dict[str, Any]] = []
    for dtype in dtypes:
        for name, text, expected in golden:
            try:
                rows.append(check(name, text, expected, dtype, s))
            except (RuntimeError, ValueError) as error:
                # The others still tell something; a wait that ran into its limit is one of these.
                rows.append({"case": name, "schedule": text, "dtype": str(dtype)[6:], "passed": False,
                             "raised": f"{type(error).__name__}: {error}"[:500]})  # fmt: skip
            print(rows[-1], flush=True)
            save(options.json, {"cases": rows, "passed": all(row["passed"] for row in rows)})


if __name__ == "__main__":
    main()
