"""The training loop: one step, the validation, and when to stop.

Shape suffixes: B batch, S positions, V vocabulary, N sequences.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneformer.train.data import IGNORED, Validation, Windows
from laneformer.train.optim import adamw, learning_rate, set_learning_rate
from laneformer.train.settings import Settings

# Steps in a row whose loss or gradient is not finite before the run is ended.
MOST_SKIPPED = 10


class TrainingError(RuntimeError):
    """A run that cannot go on."""


@dataclass(frozen=True)
class StepResult:
    """What one step measured; loss in nats a token, `skipped` where it was not finite and nothing was learnt."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    skipped: bool


def total_nats(model: nn.Module, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
    """The summed cross-entropy of all targets that are not padding, in nats, float32 []."""
    logits_BSV = model(inputs_BS)
    return F.cross_entropy(
        logits_BSV.float().flatten(0, 1), targets_BS.flatten(), ignore_index=IGNORED, reduction="sum"
    )


class Trainer:
    """A model, its optimizer, and where in the data they are: `position` counts the samples already taken."""

    def __init__(self, model: nn.Module, windows: Windows, settings: Settings) -> None:
        self.model, self.windows, self.settings = model, windows, settings
        self.optimizer = adamw(model, settings.optim)
        self.device = torch.device(settings.device)
        self.finished = self.position = self.skipped = self.skipped_in_a_row = 0

    def autocast(self) -> contextlib.AbstractContextManager:
        """bfloat16 arithmetic where the settings ask for it."""
        if self.settings.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def step(self) -> StepResult:
        """Learns from the next batch; raises TrainingError after 10 steps in a row that were not finite."""
        settings, batch = self.settings, self.settings.data.batch
        rate = learning_rate(self.finished, settings.steps, settings.optim)
        set_learning_rate(self.optimizer, rate)
        tokens = self.windows.batch(self.position, batch).to(self.device)
        with self.autocast():
            loss = total_nats(self.model, tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), settings.optim.clip)
        finite = bool(torch.isfinite(loss) & torch.isfinite(norm))
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.finished += 1
        self.position += batch
        self.count_skipped(not finite)
        return StepResult(self.finished, loss.item(), rate, norm.item(), not finite)

    def count_skipped(self, skipped: bool) -> None:
        """Keeps count; raises TrainingError when too many steps in a row were skipped."""
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if self.skipped_in_a_row == MOST_SKIPPED:
            raise TrainingError(
                f"loss or gradient was not finite in {MOST_SKIPPED} steps in a row, up to step {self.finished}; "
                f"lower optim.lr (now {self.settings.optim.lr}) or lengthen optim.warmup"
            )

    @torch.no_grad()
    def bits_per_byte(self, valid: Validation, stopped: Callable[[], bool]) -> float | None:
        """Bits to code the held-out text, document ends included, per UTF-8 byte of it; None if stopped half-way."""
        nats, batch = 0.0, self.settings.data.batch
        for start in range(0, len(valid.inputs_NS), batch):
            if stopped():
                return None
            rows = slice(start, start + batch)
            with self.autocast():
                nats += total_nats(
                    self.model, valid.inputs_NS[rows].to(self.device), valid.targets_NS[rows].to(self.device)
                ).item()
        return nats / math.log(2) / valid.num_bytes


def train(
    trainer: Trainer,
    valid: Validation,
    write: Callable[[dict[str, Any]], None],
    show: Callable[[StepResult], None],
    stopped: Callable[[], bool],
) -> None:
    """Runs the steps that are left; hands `write` one record every `log.every` steps and at each validation.

    `show` is called after every step. When `stopped` turns true the current step is finished, its record is written,
    and nothing more is done.
    """
    settings = trainer.settings
    tokens, seconds = 0, 0.0
    while trainer.finished < settings.steps and not stopped():
        began = time.perf_counter()
        result = trainer.step()
        show(result)
        seconds += time.perf_counter() - began
        tokens += settings.data.batch * settings.data.sequence_length
        last = result.step == settings.steps
        validates = last or (settings.log.valid_every > 0 and result.step % settings.log.valid_every == 0)
        if not (validates or stopped() or result.step % settings.log.every == 0):
            continue
        bits = trainer.bits_per_byte(valid, stopped) if validates else None
        write(record(result, trainer.skipped, tokens / seconds, bits))
        tokens, seconds = 0, 0.0


def record(result: StepResult, skipped: int, speed: float, bits: float | None) -> dict[str, Any]:
    """One line of the log; numbers that are not finite, which JSON has not, become null."""
    numbers = {"loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm, "tokens_per_s": round(speed, 1)}
    line: dict[str, Any] = {"step": result.step}
    line |= {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    line["skipped"] = skipped
    if bits is not None:
        line["valid_bits_per_byte"] = bits
    return line
