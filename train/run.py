"""One run from settings to checkpoint: text, tokenizer, model, loop, and what is left in the output folder."""

from __future__ import annotations

import dataclasses
import itertools
import json
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

import laneformer
from laneformer import LaneConfig, Laneformer, Schedule
from laneformer.files import write_text
from laneformer.train.data import Documents, Validation, Windows, first_bytes, read_documents, validation_set
from laneformer.train.loop import StepResult, Trainer, train
from laneformer.train.settings import Settings
from laneformer.train.tokens import encode_documents, read_tokenizer, train_tokenizer

LOG, CHECKPOINT = "log.jsonl", "checkpoint"


@dataclass(frozen=True)
class Job:
    """A run that is ready to start: everything that can be refused has been checked, and nothing is written yet."""

    settings: Settings
    trainer: Trainer
    model: Laneformer
    valid: Validation
    tokenizer: Tokenizer

    def run(self, messages: Console, stopped: Callable[[], bool]) -> Path:
        """Trains and returns the checkpoint's folder; when `stopped` turns true, with the weights of that step.

        Raises TrainingError for a run that diverged.
        """
        out = out_folder(self.settings)
        self._start(out)
        with open(out / LOG, "w", encoding="utf-8") as log, progress(self.settings.steps, messages) as show:

            def write(line: dict[str, Any]) -> None:
                log.write(json.dumps(line) + "\n")
                log.flush()

            train(self.trainer, self.valid, write, show, stopped)
        save(self.model, self.tokenizer, out / CHECKPOINT)
        if Schedule.from_config(self.model.config) != self.model.schedule:
            name = self.model.schedule
            say(messages, f"note: config.json cannot express schedule {name}; decode with --schedule {name}")
        return out / CHECKPOINT

    def _start(self, out: Path) -> None:
        """Leaves in the output folder what describes this run, and nothing of a run that it replaces."""
        out.mkdir(parents=True, exist_ok=True)
        if (out / CHECKPOINT).exists():
            shutil.rmtree(out / CHECKPOINT)
        write_text(out / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(self.settings))))
        write_text(out / "versions.json", json.dumps(versions(), indent=2) + "\n")


def prepare(settings: Settings, messages: Console) -> Job:
    """Reads the corpus and builds tokenizer, sequences and model.

    Raises ValueError for settings that do not fit each other, the machine, the corpus or the output folder.
    """
    config, schedule = with_schedule(settings.lane_config(), settings.schedule)
    check_device(settings.device)
    check_out(out_folder(settings), settings.overwrite)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    documents = read_documents(Path(settings.corpus).expanduser(), settings.data)
    say(messages, documents.summary())
    tokenizer, config = fit_tokenizer(settings, documents, config)
    windows, valid = sequences(settings, documents, tokenizer)
    model = new_model(config, schedule, settings)
    millions = {"tokens": len(windows.tokens), "parameters": sum(p.numel() for p in model.parameters())}
    sizes = ", ".join(f"{count / 1e6:.2f} M {name}" for name, count in millions.items())
    per_step = settings.data.batch * settings.data.sequence_length
    say(messages, f"{sizes}, schedule {schedule}, {settings.steps} steps of {per_step} tokens")
    return Job(settings, Trainer(model, windows, settings), model, valid, tokenizer)


def say(messages: Console, text: str) -> None:
    """One line, as it is."""
    messages.print(text, markup=False, highlight=False, soft_wrap=True)


def out_folder(settings: Settings) -> Path:
    """The output folder."""
    return Path(settings.out).expanduser()


def with_schedule(config: LaneConfig, text: str) -> tuple[LaneConfig, Schedule]:
    """The schedule of a text form, and the config whose own schedule it is, so that a checkpoint loads as trained.

    A config counts its delay in layers: a schedule it cannot express (ladder, an odd delay) leaves it as it was.
    """
    schedule = Schedule.parse(text, config)
    delays, yes_no = range(config.num_hidden_layers + 1), (True, False)
    for delay, early, attention, mlp in itertools.product(delays, (False, True), yes_no, yes_no):
        candidate = config.replace(
            broadcast_delay=delay, use_early_comm=early, use_attention_comm=attention, use_mlp_comm=mlp
        )
        if Schedule.from_config(candidate) == schedule:
            return (config if Schedule.from_config(config) == schedule else candidate), schedule
    return config, schedule


def check_device(device: str) -> None:
    """Raises ValueError for a device that this machine has not."""
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}, expected cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but PyTorch {torch.__version__} sees no GPU here; use device=cpu")


def check_out(out: Path, overwrite: bool) -> None:
    """Raises ValueError where the output folder is a file, or holds a run that may not be replaced."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out {out} is a file; give a folder")
    if ((out / LOG).exists() or (out / CHECKPOINT).exists()) and not overwrite:
        raise ValueError(f"out {out} holds a run already; give another folder, or overwrite=true")


def fit_tokenizer(settings: Settings, documents: Documents, config: LaneConfig) -> tuple[Tokenizer, LaneConfig]:
    """The tokenizer, adopted or trained on what is learnt, and the config with its end token and vocabulary size."""
    end_token = settings.data.end_token
    if settings.tokenizer is None:
        tokenizer = train_tokenizer(documents.train, config.vocab_size, end_token)
    else:
        tokenizer = read_tokenizer(Path(settings.tokenizer).expanduser(), end_token)
        size = tokenizer.get_vocab_size()
        if "vocab_size" not in settings.model:
            config = config.replace(vocab_size=size)
        elif config.vocab_size < size:
            raise ValueError(
                f"model.vocab_size is {config.vocab_size}, but {settings.tokenizer} has {size} tokens; leave it out "
                "to use theirs"
            )
    return tokenizer, config.replace(eos_token_id=tokenizer.token_to_id(end_token))


def sequences(settings: Settings, documents: Documents, tokenizer: Tokenizer) -> tuple[Windows, Validation]:
    """What is learnt and what is measured, as token sequences."""
    data = settings.data
    held_out = first_bytes(documents.valid, data.valid_bytes)
    valid_N = encode_documents(tokenizer, held_out, data.end_token)
    valid = validation_set(valid_N, data.sequence_length, sum(len(text.encode()) for text in held_out))
    train_N = encode_documents(tokenizer, documents.train, data.end_token)
    return Windows(train_N, data.sequence_length, settings.seed), valid


def new_model(config: LaneConfig, schedule: Schedule, settings: Settings) -> Laneformer:
    """A model with fresh weights of the seed, float32; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        # Drawn on the CPU, so that the weights are the same on every device.
        return Laneformer(config, schedule, dtype=torch.float32).to(settings.device)


def save(model: Laneformer, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the published layout with tokenizer.json; every file is whole or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    model.save_pretrained(folder)


def versions() -> dict[str, str]:
    """What the run was made with."""
    packages = {name: version(name) for name in ("torch", "numpy", "tokenizers", "safetensors", "hydra-core")}
    return {"laneformer": laneformer.__version__, "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}", **packages}  # fmt: skip


@contextmanager
def progress(steps: int, messages: Console) -> Iterator[Callable[[StepResult], None]]:
    """A bar on standard error with loss and time left, silent where that is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=messages, disable=not messages.is_terminal, transient=True) as bar:
        task = bar.add_task("training", total=steps)
        yield lambda result: bar.update(task, completed=result.step, description=f"loss {result.loss:.3f}")
