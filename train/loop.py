"""The training loop: one step over its micro-batches, the validation, and when to stop.

Shape suffixes: B batch, S positions, N sequences.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laneformer.model import Laneformer
from laneformer.train.loader import Batch, Loader, rank_positions
from laneformer.train.loss import IGNORED, count_targets
from laneformer.train.optim import learning_rate, optimizers, set_learning_rate
from laneformer.train.parallel import Layout, add_shared_gradients, clip_gradients, gradients_meet, wrapped
from laneformer.train.settings import Settings
from laneformer.train.validation import Rows


class TrainingError(RuntimeError):
    """A run that cannot go on."""


@dataclass(frozen=True)
class StepResult:
    """What one step measured; loss in nats a learnt token, `skipped` where it was not finite and nothing was learnt.

    `stop` says that some rank was asked to stop.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    targets: int
    skipped: bool
    stop: bool


def micro_batch(settings: Settings, place: Layout) -> int:
    """Sequences that a rank computes at once."""
    return settings.data.micro_batch or max(1, settings.data.batch // place.data)


class Trainer:
    """A model, its optimizers, and where in the run they are; `finished` steps are the whole state of the data."""

    def __init__(self, model: Laneformer, loader: Loader, settings: Settings, place: Layout | None = None) -> None:
        self.model, self.loader, self.settings, self.place = model, loader, settings, place or Layout()
        model.recompute = settings.recompute
        self.module, self.plain = wrapped(model, settings, self.place)
        self.optimizers = optimizers(model, settings.optim)
        self.device = torch.device(settings.device)
        self.finished = self.skipped = self.skipped_in_a_row = 0

    def autocast(self) -> contextlib.AbstractContextManager:
        """bfloat16 arithmetic where the settings ask for it."""
        if self.settings.precision != "bfloat16":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def micro_batches(self) -> list[Batch]:
        """What this rank learns from in the next step."""
        batch, place = self.settings.data.batch, self.place
        micro = micro_batch(self.settings, place)
        ranges = rank_positions(self.finished * batch, batch, micro, place.data, place.data_rank)
        return [self.loader.batch(part.start, len(part)) for part in ranges]

    def step(self, stop: bool = False) -> StepResult:
        """Learns from the next batch; raises TrainingError after too many steps in a row that were not finite.

        The loss is the mean over all learnt tokens of the step, however they are spread over ranks and micro-batches.
        """
        settings, batches = self.settings, self.micro_batches()
        counts = torch.tensor([sum(count_targets(b.targets_BS) for b in batches), int(stop)], dtype=torch.float64)
        counts = self.place.sum(self.place.sum(counts, "data"), "lanes")
        targets = int(counts[0]) // self.place.lanes
        share = learning_rate(self.finished, settings.steps, settings.optim)
        set_learning_rate(self.optimizers, settings.optim, share)
        nats = self.gradients(batches, max(targets, 1))
        add_shared_gradients(self.model, self.place)
        norm = clip_gradients(self.model, self.place, settings)
        loss = self.place.sum(nats, "data") / max(targets, 1)
        finite = bool(torch.isfinite(loss) & torch.isfinite(norm)) and targets > 0
        for optimizer in self.optimizers:
            if finite:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.finished += 1
        self.count_skipped(not finite)
        rate = settings.optim.lr * share
        return StepResult(self.finished, loss.item(), rate, norm.item(), targets, not finite, counts[1].item() > 0)

    def gradients(self, batches: list[Batch], targets: int) -> Tensor:
        """Adds up the micro-batches' gradients; the summed cross-entropy of this rank, in nats [1]."""
        total = torch.zeros(1, device=self.device, dtype=torch.float64 if self.device.type == "cpu" else torch.float32)
        # Data-parallel ranks take the mean of their gradients, while the loss is a sum over all of them.
        scale = self.place.data / targets
        for i, batch in enumerate(batches):
            with gradients_meet(self.module, i == len(batches) - 1, self.place, self.settings):
                loss, nats = self.summed(self.module, batch.inputs_BS, batch.targets_BS, batch.documents_BS)
                (loss * scale).backward()
            total += nats
        return total

    def summed(
        self, module: nn.Module, inputs_BS: Tensor, targets_BS: Tensor, documents_BS: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The loss and the cross-entropy of some rows, both summed."""
        documents = None if documents_BS is None else documents_BS.to(self.device)
        with self.autocast():
            return module(inputs_BS.to(self.device), targets_BS.to(self.device), documents)

    def count_skipped(self, skipped: bool) -> None:
        """Keeps count; raises TrainingError when too many steps in a row were skipped."""
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if self.skipped_in_a_row == self.settings.optim.most_skipped:
            raise TrainingError(
                f"loss or gradient was not finite in {self.skipped_in_a_row} steps in a row, up to step "
                f"{self.finished}; lower optim.lr (now {self.settings.optim.lr}) or lengthen optim.warmup"
            )

    @torch.no_grad()
    def bits_per_byte(self, valid: Mapping[str, Rows], stopped: Callable[[], bool]) -> dict[str, float] | None:
        """Bits to code each source's held-out text, document ends included, per UTF-8 byte of it.

        None if stopped half-way. Ranks take turns at the rows; each runs as many passes as any other.
        """
        self.model.eval()
        try:
            found = {}
            for source, rows in valid.items():
                nats = self.nats(rows, stopped)
                if nats is None:
                    return None
                found[source] = nats / math.log(2) / rows.num_bytes
            return found
        finally:
            self.model.train()

    def nats(self, rows: Rows, stopped: Callable[[], bool]) -> float | None:
        """The cross-entropy of rows, summed over all ranks."""
        place, at_once = self.place, micro_batch(self.settings, self.place)
        total = torch.zeros(1, dtype=torch.float64)
        for start in range(0, len(rows.inputs_NS), at_once * place.data):
            # Only a single process may leave on its own; ranks that wait for each other go on to the end.
            if place.world == 1 and stopped():
                return None
            first = start + place.data_rank * at_once
            some = slice(first, first + at_once) if first < len(rows.inputs_NS) else slice(0, 1)
            targets = rows.targets_NS[some]
            if first >= len(rows.inputs_NS):
                targets = torch.full_like(targets, IGNORED)
            documents = None if rows.documents_NS is None else rows.documents_NS[some]
            total += self.summed(self.plain, rows.inputs_NS[some], targets, documents)[1].double().cpu()
        return float(place.sum(total, "data"))
