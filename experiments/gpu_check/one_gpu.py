"""How fast is the 2B on one GPU with all 8 lanes: persistent against graph against eager, and against the bandwidth?"""

from __future__ import annotations

import time
from typing import Any

import torch
from common import SCHEDULES, arguments, random_weights, save, sizes, speeds, spread

from laneformer.infer.bandwidth import device_bandwidth
from laneformer.infer.engine import generate
from laneformer.infer.exchange import LocalExchange
from laneformer.infer.graph import CaptureError, GraphRunner
from laneformer.infer.persistent import PersistentRunner
from laneformer.infer.request import Request
from laneformer.infer.runners import EagerRunner
from laneformer.schedule import Schedule

ALLOWED = 3e-2


def main() -> None:
    """The step."""
    options = arguments(__doc__)
    s = sizes(options.tiny)
    weights = random_weights(s, range(s.config.num_lanes))
    schedules = [Schedule.parse(text, s.config) for text in SCHEDULES[: 2 if s.tiny else 3]]
    persistent = PersistentRunner(weights, LocalExchange(), s.capacity)
    if options.compile_only:
        for schedule in schedules:
            persistent._launch(schedule).compile(True)
            persistent._launch(schedule).compile(False)
        return
    runners: dict[str, Any] = {"persistent": persistent, "eager": EagerRunner(weights, LocalExchange(), s.capacity)}
    notes = []
    try:
        runners["graph"] = GraphRunner(weights, LocalExchange(), s.capacity, schedules)
        notes += runners["graph"].notes
    except CaptureError as error:
        notes.append(f"no graph runner: {error}")
    gates = gate(s, runners, schedules)
    bandwidth = None if s.tiny else device_bandwidth(s.device)
    found: dict[str, Any] = {
        "device": "interpreter" if s.tiny else torch.cuda.get_device_name(0), "dtype": str(s.dtype)[6:],
        "position": s.position, "tokens": s.tokens, "streamed_bytes": weights.streamed_bytes, "notes": notes,
        "gates": gates, "bandwidth_gb_s": bandwidth and bandwidth / 1e9, "rows": [],
    }  # fmt: skip
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(s.rounds):
        for text in SCHEDULES[: len(schedules)]:
            for name, runner in runners.items():
                if not gates[f"{name}, {text}"]["passed"] or (name == "eager" and number > 1):
                    continue
                times.setdefault((name, text), []).append(time_of(s, runner, text, 16 if name == "eager" else s.tokens))
    for (name, text), values in times.items():
        us = spread(values[1:] or values)
        row = {"runner": name, "schedule": text, "us_per_token": us}
        found["rows"].append(row | speeds(us, weights.streamed_bytes, bandwidth))
        print(found["rows"][-1], flush=True)
    for schedule, text in zip(schedules, SCHEDULES, strict=False):
        found.setdefault("polls", {})[text] = persistent._launch(schedule).polls()
    save(options.json, found)


def gate(s: Any, runners: dict[str, Any], schedules: list[Schedule]) -> dict[str, Any]:
    """Logits of a few decoded tokens against the eager runner's; what is wrong is not timed."""
    found = {}
    for schedule, text in zip(schedules, SCHEDULES, strict=False):
        logits = {}
        for name in sorted(runners, key=lambda name: name != "eager"):
            runner = runners[name]
            with torch.inference_mode():
                runner.reset()
                runner.prefill(torch.tensor([5, 6, 7, 8]), schedule, head="none")
                logits[name] = torch.stack([runner.step(token, schedule).float().cpu() for token in (9, 10, 11)])
            error = float((logits[name] - logits["eager"]).abs().max() / logits["eager"].abs().max())
            found[f"{name}, {text}"] = {"error": error, "passed": error < ALLOWED}
            print(name, text, error, flush=True)
    return found


def time_of(s: Any, runner: Any, text: str, count: int) -> float:
    """Microseconds between two tokens of a request whose prompt fills the cache up to `position`."""
    request = Request(tuple(5 + i % 11 for i in range(s.position)), count + 1, schedule=text, ignore_end=True)
    at = [token.at_s for token in generate(runner, request, chunk=64 if s.tiny else 512)]
    if not s.tiny:
        torch.cuda.synchronize()
    return 1e6 * (at[-1] - at[0]) / count


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.0f} s")
