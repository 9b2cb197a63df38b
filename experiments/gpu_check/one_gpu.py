"""How fast is the 2B on one GPU with all 8 lanes: persistent against graph against eager, and against the bandwidth?"""

from __future__ import annotations

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
# Tokens of an eager request, which is slow and whose time does not swing.
EAGER_TOKENS = 16


class Comparison:
    """Runners of the same weights; what is measured is saved after every round."""

    def __init__(self, options: Any) -> None:
        self.s, self.path = sizes(options.tiny), options.json
        s = self.s
        self.weights = random_weights(s, range(s.config.num_lanes))
        self.schedules = {text: Schedule.parse(text, s.config) for text in SCHEDULES[: 2 if s.tiny else 3]}
        self.persistent = PersistentRunner(self.weights, LocalExchange(), s.capacity, limit_s=60.0 if s.tiny else 5.0)
        self.times: dict[tuple[str, str], list[float]] = {}
        self.gates: dict[str, Any] = {}
        self.notes: list[str] = []
        self.polls: dict[str, Any] = {}
        self.bandwidth = None if s.tiny else device_bandwidth(s.device)

    def graph(self) -> GraphRunner | None:
        """The graph runner with one bucket that holds all positions, or None."""
        try:
            runner = GraphRunner(
                self.weights, LocalExchange(), self.s.capacity, list(self.schedules.values()), self.s.capacity
            )
        except CaptureError as error:
            self.notes.append(f"no graph runner: {error}")
            return None
        self.notes += runner.notes
        return runner

    def gate(self, runner: Any, reference: Any) -> None:
        """Logits of a few decoded tokens against another runner's; what is wrong is not timed."""
        for text, schedule in self.schedules.items():
            logits = []
            for each in (runner, reference):
                with torch.inference_mode():
                    each.reset()
                    each.prefill(torch.tensor([5, 6, 7, 8]), schedule, head="none")
                    logits.append(torch.stack([each.step(token, schedule).float().cpu() for token in (9, 10, 11)]))
            error = float((logits[0] - logits[1]).abs().max() / logits[1].abs().max())
            self.gates[f"{runner.name}, {text}"] = {"error": error, "passed": error < ALLOWED}
            print(runner.name, text, error, flush=True)

    def rounds(self, runners: list[Any], count: int) -> None:
        """Times every runner and schedule in turn, `count` times."""
        for _ in range(count):
            for text in self.schedules:
                for runner in runners:
                    if self.gates.get(f"{runner.name}, {text}", {"passed": True})["passed"]:
                        self.times.setdefault((runner.name, text), []).append(self.time_of(runner, text))
                        if runner is self.persistent:
                            self.polls[text] = runner._prepared(self.schedules[text]).polls()
            save(self.path, self.document())

    def time_of(self, runner: Any, text: str) -> float:
        """Microseconds between two tokens of a request whose prompt fills the cache up to `position`."""
        s = self.s
        count = EAGER_TOKENS if runner.name == "eager" and not s.tiny else s.tokens
        prompt = tuple(5 + i % 11 for i in range(s.position))
        request = Request(prompt, count + 1, schedule=text, ignore_end=True)
        at = [token.at_s for token in generate(runner, request, chunk=64 if s.tiny else 512)]
        return 1e6 * (at[-1] - at[0]) / count

    def document(self) -> dict[str, Any]:
        """What is known so far; the first round of each is a warm-up once there are more."""
        s = self.s
        rows = []
        for (name, text), values in self.times.items():
            us = spread(values[1:] or values)
            row = {"runner": name, "schedule": text, "rounds": len(values), "us_per_token": us}
            rows.append(row | speeds(us, self.weights.streamed_bytes, self.bandwidth))
        return {
            "device": "interpreter" if s.tiny else torch.cuda.get_device_name(0), "dtype": str(s.dtype)[6:],
            "position": s.position, "tokens": s.tokens, "streamed_bytes": self.weights.streamed_bytes,
            "notes": self.notes, "gates": self.gates, "bandwidth_gb_s": self.bandwidth and self.bandwidth / 1e9,
            "polls": self.polls, "rows": rows,
        }  # fmt: skip


def main() -> None:
    """The step."""
    options = arguments(__doc__)
    comparison = Comparison(options)
    if options.compile_only:
        for schedule in comparison.schedules.values():
            comparison.persistent._prepared(schedule)
        return
    eager = EagerRunner(comparison.weights, LocalExchange(), comparison.s.capacity)
    comparison.gate(comparison.persistent, eager)
    # Alone first: capturing the graph runner's steps takes long, and may fail.
    comparison.rounds([comparison.persistent], 2)
    comparison.rounds([eager], 2)
    graph = comparison.graph()
    if graph is not None:
        comparison.gate(graph, eager)
        comparison.rounds([graph, comparison.persistent], comparison.s.rounds)
    for row in comparison.document()["rows"]:
        print(row, flush=True)


if __name__ == "__main__":
    main()
