"""One run from prepared parts to its last checkpoint: the loop's outer side, which logs, validates, saves and stops."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from laneformer.checkpoint import save_checkpoint
from laneformer.files import write_text
from laneformer.schedule import Schedule
from laneformer.terminal import say
from laneformer.train import state
from laneformer.train.loop import StepResult, Trainer, TrainingError
from laneformer.train.record import LOG, Log, Meter, line_of, progress
from laneformer.train.settings import Settings
from laneformer.train.validation import Rows
from laneformer.train.versions import versions

CHECKPOINT, RESULT = "checkpoint", "result.json"


@dataclass
class Job:
    """A run that is ready to start: everything that can be refused has been checked.

    `identity` is what a resumed run must share with the one it goes on with; `copy_tokenizer` writes the tokenizer's
    files into a folder.
    """

    settings: Settings
    trainer: Trainer
    valid: dict[str, Rows]
    identity: dict[str, Any]
    copy_tokenizer: Callable[[Path], object]
    messages: Console
    last_line: dict[str, Any] = field(default_factory=dict)
    saved_at: int = -1

    @property
    def out(self) -> Path:
        """The output folder."""
        return out_folder(self.settings)

    def run(self, stopped: Callable[[], bool]) -> Path:
        """Trains and returns the folder of the last weights; stops early, all saved, when `stopped` turns true.

        Raises TrainingError, naming the last good checkpoint, for a run that diverged.
        """
        began, trainer, speaks = time.monotonic(), self.trainer, self.trainer.place.first
        if speaks:
            self._start()
        log = Log(self.out, self.settings, trainer.finished) if speaks else None
        try:
            with progress(self.settings, trainer.finished, self.messages) as show:
                self._steps(log, show if speaks else lambda result: None, stopped)
        except TrainingError as error:
            raise TrainingError(f"{error}; the last good checkpoint is {self._last_good()}") from None
        finally:
            if log is not None:
                log.close()
        self._finish(time.monotonic() - began)
        return self.out / CHECKPOINT

    def _start(self) -> None:
        """Leaves in the output folder what describes this run."""
        self.out.mkdir(parents=True, exist_ok=True)
        if (self.out / CHECKPOINT).exists():
            shutil.rmtree(self.out / CHECKPOINT)
        (self.out / RESULT).unlink(missing_ok=True)
        write_text(self.out / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(self.settings))))
        write_text(self.out / "versions.json", json.dumps(versions(), indent=2) + "\n")

    def _steps(self, log: Log | None, show: Callable[[StepResult], None], stopped: Callable[[], bool]) -> None:
        """Runs the steps that are left; saves before it validates, so that nothing learnt hangs on a validation."""
        settings, trainer = self.settings, self.trainer
        meter = Meter(settings, trainer.model.config, trainer.place.world)
        while trainer.finished < settings.steps:
            meter.start()
            result = trainer.step(stopped())
            meter.stop()
            show(result)
            last = result.step == settings.steps
            if last or result.stop or is_multiple(result.step, settings.checkpoint.every):
                self._save()
            validates = last or (not result.stop and is_multiple(result.step, settings.log.valid_every))
            if validates or result.stop or result.step % settings.log.every == 0:
                bits = trainer.bits_per_byte(self.valid, stopped) if validates else None
                self.last_line = line_of(result, trainer.skipped, meter.take(result.step), bits)
                if log is not None:
                    log.write(self.last_line)
            if result.stop:
                return

    def _save(self) -> None:
        """Saves the state, from which the run can be resumed."""
        if self.settings.checkpoint.every and self.saved_at != self.trainer.finished:
            state.save(self.trainer, self.out, {"identity": self.identity}, self.copy_tokenizer)
            self.saved_at = self.trainer.finished

    def _finish(self, seconds: float) -> None:
        """Writes the weights in the published layout, and once all steps are done what came of them."""
        trainer, folder = self.trainer, self.out / CHECKPOINT
        tensors = state.weights(trainer)
        if not trainer.place.first:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.copy_tokenizer(folder)
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        save_checkpoint(trainer.model.config.replace(torch_dtype=dtype), tensors, folder)
        if Schedule.from_config(trainer.model.config) != trainer.model.schedule:
            name = trainer.model.schedule
            note = f"note: config.json cannot express schedule {name}; decode with --schedule {name}"
            say(note, console=self.messages)
        if trainer.finished == self.settings.steps:
            result = {**self.last_line, "seconds": round(seconds, 1), "identity": self.identity}
            write_text(self.out / RESULT, json.dumps(result, indent=1) + "\n")

    def _last_good(self) -> str:
        """The newest state on disk, in words."""
        found = state.saved(self.out)
        return str(found[-1]) if found else "none (checkpoint.every was not reached)"


def is_multiple(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (never for 0) happens now."""
    return every > 0 and step % every == 0


def out_folder(settings: Settings) -> Path:
    """The output folder."""
    return Path(settings.out).expanduser()


def holds_run(out: Path) -> bool:
    """Whether a folder holds a run already."""
    return (out / LOG).exists() or (out / CHECKPOINT).exists() or bool(state.saved(out))
