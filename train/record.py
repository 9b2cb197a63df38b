"""What a run writes down: a line of log.jsonl every few steps, the same to Weights & Biases where asked, and speed.

tokens_per_s counts all tokens of a step, learnt or not; mfu is the share of the devices' peak FLOP/s that the model's
arithmetic alone explains (null where the peak is unknown); memory is the most this rank held so far.
"""

from __future__ import annotations

import json
import math
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from laneformer.config import LaneConfig
from laneformer.cost import MACHINES, training_flops
from laneformer.files import write_text
from laneformer.terminal import progress_bar
from laneformer.train.loop import StepResult
from laneformer.train.settings import Settings

LOG = "log.jsonl"


class Meter:
    """Speed since the last line, without the time that validations and checkpoints take."""

    def __init__(self, settings: Settings, config: LaneConfig, ranks: int) -> None:
        self.settings, self.per_step = settings, settings.data.batch * settings.data.sequence_length
        self.flops = training_flops(config, settings.data.sequence_length)
        peak = settings.log.peak_flops or device_peak(settings.device)
        self.peak = None if peak is None else peak * ranks
        self.tokens, self.seconds = 0, 0.0
        self._began: float | None = None

    def start(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def stop(self) -> None:
        """A step is done."""
        assert self._began is not None
        self.seconds += time.perf_counter() - self._began
        self.tokens += self.per_step

    def take(self, finished: int) -> dict[str, Any]:
        """tokens/s, MFU, seconds to go and peak memory in bytes since last asked."""
        speed = self.tokens / self.seconds if self.seconds else 0.0
        self.tokens, self.seconds = 0, 0.0
        left = (self.settings.steps - finished) * self.per_step
        return {
            "tokens_per_s": round(speed, 1),
            "mfu": None if self.peak is None else round(speed * self.flops / self.peak, 4),
            "eta_s": round(left / speed, 1) if speed else None,
            "memory_bytes": peak_memory(self.settings.device),
        }


def device_peak(device: str) -> float | None:
    """Dense 16-bit FLOP/s of the device in use, by its name; None for what is not known, such as a CPU."""
    if not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(device).lower()
    return next((d.peak_flops for key, d in MACHINES.items() if key in name), None)


def peak_memory(device: str) -> int:
    """The most bytes this process held so far: on its GPU, or resident."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def line_of(result: StepResult, skipped: int, speed: dict[str, Any], bits: dict[str, float] | None) -> dict[str, Any]:
    """One line of the log; numbers that are not finite, which JSON has not, become null."""
    numbers = {"loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm}
    line: dict[str, Any] = {"step": result.step}
    line |= {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    line |= {"targets": result.targets, "skipped": skipped, **speed}
    if bits is not None:
        line["valid_bits_per_byte"] = bits
    return line


class Log:
    """log.jsonl of a run, gone on with after its line of step `finished`, and Weights & Biases where asked."""

    def __init__(self, out: Path, settings: Settings, finished: int) -> None:
        path = out / LOG
        lines = path.read_text(encoding="utf-8").splitlines() if finished and path.exists() else []
        # Steps after the checkpoint are done again, and so are their lines.
        write_text(path, "".join(line + "\n" for line in lines if is_before(line, finished)))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._wandb = start_wandb(out, settings) if settings.log.wandb != "off" else None

    def write(self, line: dict[str, Any]) -> None:
        """Writes one line, at once."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log({key: value for key, value in line.items() if key != "step"}, step=line["step"])

    def close(self) -> None:
        """Ends the log."""
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()


def is_before(line: str, finished: int) -> bool:
    """Whether a line is whole and of a step up to `finished`."""
    try:
        return json.loads(line)["step"] <= finished
    except (ValueError, KeyError):
        return False


def start_wandb(out: Path, settings: Settings) -> Any:
    """A Weights & Biases run that writes below OUT; offline unless the settings say online."""
    try:
        import wandb
    except ImportError:
        raise ValueError(
            f"log.wandb={settings.log.wandb} needs the package wandb; pip install 'laneformer[wandb]', or log.wandb=off"
        ) from None
    os.environ.setdefault("WANDB_SILENT", "true")
    mode: Any = settings.log.wandb
    return wandb.init(project=settings.log.project, dir=str(out), mode=mode, name=out.name, settings={"silent": True})


@contextmanager
def progress(settings: Settings, finished: int, messages: Console) -> Iterator[Any]:
    """A function to call after every step, which moves a bar on standard error; silent where that is no terminal."""
    with progress_bar(messages) as bar:
        task = bar.add_task("training", total=settings.steps, completed=finished)
        yield lambda result: bar.update(task, completed=result.step, description=f"loss {result.loss:.3f}")
