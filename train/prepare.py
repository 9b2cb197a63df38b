"""From settings to a run that is ready to start: data, tokenizer, model, and the state it goes on from."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from laneformer.checkpoint import Checkpoint, expected_shapes, has_lane_axis
from laneformer.config import LaneConfig
from laneformer.cost import count_parameters
from laneformer.data.build import build_shards
from laneformer.data.shards import Manifest, file_sha256, read_manifest
from laneformer.differences import differences
from laneformer.files import replace_files
from laneformer.hf_export import TOKENIZER_FILES
from laneformer.model import Laneformer
from laneformer.schedule import Schedule
from laneformer.terminal import say
from laneformer.train import state
from laneformer.train.loader import Loader, rank_positions
from laneformer.train.loop import Trainer, micro_batch
from laneformer.train.parallel import Layout, check_lanes
from laneformer.train.run import Job, holds_run, out_folder
from laneformer.train.settings import Settings
from laneformer.train.validation import validation_rows

# What may differ between a run and the one that resumes it: where and how it computes, not what.
FREE = ("out", "threads", "device", "resume", "overwrite", "compile", "recompute", "corpus", "tokenizer", "init_from",
        "data", "parallel", "log", "checkpoint", "model")  # fmt: skip


def prepare(settings: Settings, messages: Console, place: Layout) -> Job:
    """Reads data and tokenizer and builds the model, from its last state where the run is resumed.

    Raises ValueError for settings that do not fit each other, the machine, the data or the output folder.
    """
    check_early(settings, place)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    tell: Callable[[str], object] = (lambda text: say(text, console=messages)) if place.first else lambda text: None
    start = None if settings.init_from is None else Path(settings.init_from).expanduser()
    folders = data_folders(settings, start, place, tell)
    manifest = read_manifest(folders[0])
    config, schedule = model_config(settings, manifest, start)
    check_lanes(config, place.lanes)
    loader = loader_of(settings, folders)
    data = settings.data
    valid = validation_rows(folders, data.sequence_length, data.valid_bytes, data.document_mask, data.verify)
    trainer = Trainer(new_model(config, schedule, settings, start, place), loader, settings, place)
    job = Job(settings, trainer, valid, identity(settings, config, loader), tokenizer_copier(folders[0]), messages)
    if settings.resume:
        resume(job, tell)
    millions, per_step = count_parameters(config).total / 1e6, data.batch * data.sequence_length
    tell(
        f"{millions:.2f} M parameters, schedule {schedule}, {settings.steps} steps of {per_step} tokens, "
        f"{place.world} process(es)"
    )
    return job


def check_early(settings: Settings, place: Layout) -> None:
    """Raises ValueError for what is wrong before any data is read."""
    check_device(settings.device)
    check_out(out_folder(settings), settings)
    config = settings.lane_config()
    if settings.init_from is None:
        check_lanes(with_schedule(config, settings.schedule)[0], place.lanes)
    elif not Path(settings.init_from).expanduser().is_dir():
        raise ValueError(f"init_from {settings.init_from} does not exist; give a checkpoint folder")
    rank_positions(0, settings.data.batch, micro_batch(settings, place), place.data, place.data_rank)
    if place.world > 1:
        # The first rank writes to OUT only after the others have seen what it held.
        dist.barrier()


def check_device(device: str) -> None:
    """Raises ValueError for a device that this machine has not."""
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}, expected cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but PyTorch {torch.__version__} sees no GPU here; use device=cpu")


def check_out(out: Path, settings: Settings) -> None:
    """Raises ValueError where the output folder is a file, or holds a run that may be neither resumed nor replaced."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out {out} is a file; give a folder")
    if holds_run(out) and not settings.overwrite and not settings.resume:
        raise ValueError(f"out {out} holds a run already; resume=true goes on with it, overwrite=true replaces it")


def data_folders(settings: Settings, start: Path | None, place: Layout, tell: Callable[[str], object]) -> list[Path]:
    """The folders of shards; those of a corpus are made by the first rank while the others wait."""
    out, data = out_folder(settings), settings.data
    if place.first and settings.overwrite and holds_run(out):
        for name in (state.FOLDER, "checkpoint"):
            shutil.rmtree(out / name, ignore_errors=True)
    if not settings.corpus:
        return [Path(folder).expanduser() for folder in data.folders]
    folder = out / "data"
    if place.first:
        tokenizer = start / "tokenizer.json" if start is not None else None
        if settings.tokenizer is not None:
            tokenizer = Path(settings.tokenizer).expanduser()
        built = build_shards(
            Path(settings.corpus).expanduser(), folder, tokenizer=tokenizer,
            vocab_size=settings.lane_config().vocab_size, suffixes=data.suffixes, exclude=data.exclude,
            valid_fraction=data.valid_fraction,
        )  # fmt: skip
        tell(built.summary)
    if place.world > 1:
        dist.barrier()
    return [folder]


def loader_of(settings: Settings, folders: list[Path]) -> Loader:
    """What gives the batches."""
    data = settings.data
    return Loader(
        folders, sequence_length=data.sequence_length, seed=settings.seed, phases=data.phases,
        total_samples=settings.steps * data.batch, infilling=data.infilling, infilling_spm=data.infilling_spm,
        document_mask=data.document_mask, verify=data.verify,
    )  # fmt: skip


def model_config(settings: Settings, manifest: Manifest, start: Path | None) -> tuple[LaneConfig, Schedule]:
    """The model's sizes with the tokenizer's ids, and the schedule; raises ValueError where these do not fit."""
    wanted = settings.lane_config()
    if start is not None:
        config = Checkpoint(start).config
        settings.check_length(config)
        ours = start / "tokenizer.json"
        if ours.is_file() and file_sha256(ours) != manifest.tokenizer_sha256:
            raise ValueError(f"the data were tokenised with another tokenizer than {ours}; tokenise them with that one")
        wrong = [name for name, shape in expected_shapes(wanted.replace(vocab_size=config.vocab_size)).items()
                 if expected_shapes(config).get(name) != shape]  # fmt: skip
        if settings.model and wrong:
            raise ValueError(f"init_from {start} has another {wrong[0]} than model.* asks for; leave model.* out")
    elif "vocab_size" in settings.model and wanted.vocab_size < manifest.vocab_size:
        raise ValueError(
            f"model.vocab_size is {wanted.vocab_size}, but the data's tokenizer has {manifest.vocab_size} tokens; "
            "leave it out to use theirs"
        )
    elif "vocab_size" in settings.model:
        config = wanted
    else:
        config = wanted.replace(vocab_size=manifest.vocab_size)
    special = manifest.special_tokens
    pad = special.get("pad", config.pad_token_id)
    return with_schedule(config.replace(eos_token_id=manifest.end_id, pad_token_id=pad), settings.schedule)


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


def new_model(
    config: LaneConfig, schedule: Schedule, settings: Settings, start: Path | None, place: Layout
) -> Laneformer:
    """This rank's lanes with the seed's fresh weights, or a checkpoint's; the caller's random state stays as it was."""
    held = place.held(config)
    dtype = torch.float64 if settings.precision == "float64" else torch.float32
    if start is not None:
        return Laneformer.from_pretrained(start, dtype, schedule, held, settings.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        # Drawn whole and on the CPU, so that the weights are the same on every device and any number of ranks.
        whole = Laneformer(config, schedule, dtype=dtype)
    if settings.zero_outputs:
        silence(whole)
    if len(held) < config.num_lanes:
        part = Laneformer(config, schedule, held, dtype=dtype)
        tensors = dict(whole.named_parameters())
        with torch.no_grad():
            for name, parameter in part.named_parameters():
                parameter.copy_(tensors[name][held] if has_lane_axis(name, config) else tensors[name])
        whole = part
    return whole.to(settings.device)


def silence(model: Laneformer) -> None:
    """Zeroes what every module adds to the streams, so that logits depend on the embedding and the head alone."""
    for index in range(model.config.num_hidden_layers):
        layer = model.model.layer(index)
        for matrix in (layer.attention.wo, layer.feed_forward.w2):
            nn.init.zeros_(matrix.weight)


def tokenizer_copier(folder: Path) -> Callable[[Path], object]:
    """A function that copies the tokenizer's files of the data into a checkpoint."""
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return lambda target: replace_files({target / file.name: partial(shutil.copyfile, file) for file in files})


def identity(settings: Settings, config: LaneConfig, loader: Loader) -> dict[str, Any]:
    """What decides the numbers of a run, as JSON has it: only with the same may it be resumed."""
    keys = {key: value for key, value in dataclasses.asdict(settings).items() if key not in FREE}
    return {**keys, "batch": settings.data.batch, "model": config.to_dict(), "data": loader.identity}


def resume(job: Job, tell: Callable[[str], object]) -> None:
    """Puts the newest whole state into the job; raises ValueError where it belongs to another run."""
    found = state.newest(job.out, tell)
    if found is None:
        tell("nothing to resume yet: the run starts from its first step")
        return
    folder, kept = found
    changed = differences(kept["identity"], job.identity)
    if changed:
        raise ValueError(
            f"{folder} belongs to a run with other settings: {'; '.join(changed[:4])}; give the same, another out, or "
            "init_from to start a new run from its weights"
        )
    state.load(job.trainer, folder, kept)
    job.saved_at = job.trainer.finished
    tell(f"resumed from {folder}")
