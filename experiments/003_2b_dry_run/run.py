"""Runs two real training steps of the 2B at its true sizes on a CPU and writes results.json beside this file.

Weights, arithmetic and gradients are float32. The two AdamW moments are bfloat16, and each parameter is updated as
soon as its gradient is complete, so that no two gradients are kept: 20 GB instead of 37. Gradients are therefore
measured but not clipped. `python experiments/003_2b_dry_run/run.py`; it needs 21 GB of free memory and no GPU.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import platform
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneformer import LaneConfig, Laneformer
from laneformer.cost import count_parameters
from laneformer.infer.report import commit
from laneformer.training_cost import Layout, inner_bytes, saved_bytes

HERE = Path(__file__).parent
SCHEDULE, BATCH, SEQUENCE, SEED = "delayed:4", 1, 128, 0
LR, BETA1, BETA2, EPS, WEIGHT_DECAY = 3e-4, 0.9, 0.95, 1e-8, 0.1
# Elements updated at once, so that the update's own temporaries stay small.
CHUNK = 1 << 23
NEEDED, LEAST_LEFT = 21e9, 0.7e9
# glibc's mallopt: allocations from this size on go back to the system when freed, so that what is resident is in use.
M_MMAP_THRESHOLD, FROM_BYTES = -3, 1 << 20


class Update:
    """AdamW (arXiv 1711.05101) of one parameter, run by autograd when its gradient is complete."""

    def __init__(self, model: nn.Module) -> None:
        self.moments: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        self.step = 0
        self.squared_norm = 0.0
        self.not_finite: list[str] = []
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.seen: set[nn.Parameter] = set()
        for parameter in model.parameters():
            mean, square = (torch.zeros(parameter.numel(), dtype=torch.bfloat16) for _ in range(2))
            self.moments[parameter] = (mean, square)
            parameter.register_post_accumulate_grad_hook(self)

    def begin(self) -> None:
        """Starts a step: nothing seen yet."""
        self.step += 1
        self.squared_norm, self.not_finite, self.seen = 0.0, [], set()

    @torch.no_grad()
    def __call__(self, parameter: nn.Parameter) -> None:
        """Measures the gradient, moves the parameter, and frees the gradient."""
        assert parameter.grad is not None and parameter not in self.seen
        self.seen.add(parameter)
        name = self.names[parameter]
        decay = 0.0 if "norm" in name or "tok_embeddings" in name else WEIGHT_DECAY
        pieces = zip(*(t.view(-1).split(CHUNK) for t in (parameter, parameter.grad, *self.moments[parameter])),
                     strict=True)  # fmt: skip
        squares = 0.0
        for weight, grad, mean, square in pieces:
            squares += grad.square().sum(dtype=torch.float64).item()
            wide_mean = mean.float().lerp_(grad, 1 - BETA1)
            wide_square = square.float().mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
            mean.copy_(wide_mean)
            square.copy_(wide_square)
            size = wide_square.div_(1 - BETA2**self.step).sqrt_().add_(EPS)
            weight.mul_(1 - LR * decay).addcdiv_(wide_mean, size, value=-LR / (1 - BETA1**self.step))
        self.squared_norm += squares
        if not math.isfinite(squares):
            self.not_finite.append(name)
        parameter.grad = None


def available() -> int:
    """Bytes of memory that the machine can still give."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/meminfo has no MemAvailable: this runs on Linux only")


def guard() -> None:
    """Ends this process before the machine runs out of memory, and lets the kernel take it first."""
    Path("/proc/self/oom_score_adj").write_text("1000")

    def watch() -> None:
        while available() > LEAST_LEFT:
            time.sleep(0.1)
        print("error: memory ran short, stopped so that nothing else is killed", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """The most bytes of this process that were ever in memory."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def expected(config: LaneConfig, model: Laneformer) -> dict[str, float]:
    """Bytes by term from the planner's formulas, for this run's types."""
    layout = Layout(1, 1, "ddp", BATCH, BATCH, SEQUENCE, "float32", recompute=True, document_mask=False)
    total = count_parameters(config).total
    attention, feed_forward, _ = inner_bytes(config, model.schedule, layout)
    return {
        "weights": 4.0 * total,
        "moments": 4.0 * total,
        "largest_gradient": 4.0 * max(parameter.numel() for parameter in model.parameters()),
        "saved_activations": saved_bytes(config, model.schedule, layout).total,
        "one_module_recomputed": 2 * max(attention, feed_forward),
        "update_temporaries": 4.0 * 4 * CHUNK,
    }


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """A result and the seconds it took."""
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def train_step(model: Laneformer, update: Update, inputs_BS: Tensor, targets_BS: Tensor) -> dict[str, Any]:
    """One forward and backward pass with its updates: loss before it, seconds, gradient norm, what was reached."""
    update.begin()
    loss, forward_s = timed(lambda: loss_of(model, inputs_BS, targets_BS))
    _, backward_s = timed(loss.backward)
    left = [name for parameter, name in update.names.items() if parameter not in update.seen]
    record = {"loss": loss.item(), "forward_s": forward_s, "backward_and_update_s": backward_s,
              "gradient_norm": math.sqrt(update.squared_norm), "parameters_without_gradient": left,
              "parameters_not_finite": update.not_finite, "resident_bytes": resident()}  # fmt: skip
    print(json.dumps(record), flush=True)
    return record


def loss_of(model: Laneformer, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token."""
    return F.cross_entropy(model(inputs_BS).float().flatten(0, 1), targets_BS.flatten())


def main() -> None:
    """Runs and records it; exits with 1 where the machine has too little memory free."""
    free = available()
    if free < NEEDED:
        sys.exit(f"error: {free / 1e9:.1f} GB of memory are free, this needs {NEEDED / 1e9:.0f}; free some and rerun")
    guard()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, FROM_BYTES)
    torch.manual_seed(SEED)
    config = LaneConfig.preset("2b")
    baseline = resident()
    model, build_s = timed(lambda: Laneformer(config, schedule=SCHEDULE))
    model.train()
    model.recompute = True
    count = sum(parameter.numel() for parameter in model.parameters())
    terms = expected(config, model)
    update = Update(model)
    tokens = torch.randint(config.vocab_size, (BATCH, SEQUENCE + 1))
    inputs_BS, targets_BS = tokens[:, :-1], tokens[:, 1:]
    steps = [train_step(model, update, inputs_BS, targets_BS) for _ in range(2)]
    with torch.no_grad():
        after, _ = timed(lambda: loss_of(model, inputs_BS, targets_BS).item())
    gc.collect()
    measured = peak() - baseline
    results = {
        "parameters": count, "commit": commit(), "schedule": SCHEDULE, "batch": BATCH, "sequence": SEQUENCE, "lr": LR,
        "recompute": True, "types": "float32 weights, arithmetic and gradients; bfloat16 AdamW moments",
        "build_s": build_s, "steps": steps, "loss_after": after,
        "memory": {"peak_bytes": peak(), "before_model_bytes": baseline, "measured_bytes": measured,
                   "expected_bytes": sum(terms.values()), "expected": terms,
                   "measured_over_expected": measured / sum(terms.values())},
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
    }  # fmt: skip
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results["memory"]), f"loss after {after:.4f}", flush=True)


if __name__ == "__main__":
    main()
