"""The whole state of a run on disk: OUT/checkpoints/step-N, written so that a kill at any moment leaves a good one.

A folder holds the weights in the published layout (so that `infer` decodes it), optimizer.safetensors and state.json.
It is filled under another name, synced, and renamed last. Tensors are whole, whatever the number of ranks: a run can be
resumed on another number.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from laneformer.checkpoint import Checkpoint, has_lane_axis, save_checkpoint
from laneformer.files import replace_files, tensors_writer, text_writer
from laneformer.train.loop import Trainer

FOLDER, STATE, OPTIMIZER = "checkpoints", "state.json", "optimizer.safetensors"


def whole(tensor: Tensor, name: str, trainer: Trainer) -> Tensor:
    """A parameter (or what an optimizer keeps of its shape) over all ranks, on the CPU."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    place = trainer.place
    if place.lanes > 1 and tensor.dim() and has_lane_axis(name, trainer.model.config):
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(place.lanes)]
        dist.all_gather(parts, tensor.contiguous(), group=place.group("lanes"))
        tensor = torch.cat(parts)
    return tensor.detach().cpu().contiguous()


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """The whole model's tensors under their published names; every rank takes part."""
    return {name: whole(parameter, name, trainer) for name, parameter in trainer.model.named_parameters()}


def optimizer_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """What the optimizers keep, as `parameter:key`; every rank takes part."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    found = {}
    for optimizer in trainer.optimizers:
        for parameter, kept in optimizer.state.items():
            for key, value in kept.items():
                name = names[id(parameter)]
                found[f"{name}:{key}"] = whole(value, name, trainer)
    return found


def save(trainer: Trainer, out: Path, extra: dict[str, Any], files: Callable[[Path], object]) -> Path | None:
    """Writes the state after `finished` steps; every rank takes part, the first writes and gets the folder.

    `files` adds what else belongs there (the tokenizer). `extra` goes into state.json.
    """
    settings, place = trainer.settings, trainer.place
    tensors, kept = weights(trainer), optimizer_tensors(trainer)
    if not place.first:
        return None
    folder = out / FOLDER / f"step-{trainer.finished:08d}"
    beside = folder.with_name(f".{folder.name}.partial")
    for torn in folder.parent.glob(".step-*.partial"):
        shutil.rmtree(torn)
    beside.mkdir(parents=True)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    save_checkpoint(trainer.model.config.replace(torch_dtype=dtype), tensors, beside)
    files(beside)
    state = {
        "finished": trainer.finished, "skipped": trainer.skipped, "skipped_in_a_row": trainer.skipped_in_a_row,
        "random_state": torch.get_rng_state().numpy().tobytes().hex(), **extra,
    }  # fmt: skip
    replace_files({
        beside / OPTIMIZER: tensors_writer(kept),
        beside / STATE: text_writer(json.dumps(state, indent=1) + "\n"),
    })  # fmt: skip
    sync(beside)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)
    sync(folder.parent)
    for old in superseded(out, settings.checkpoint.keep, settings.checkpoint.permanent):
        shutil.rmtree(old)
    return folder


def sync(folder: Path) -> None:
    """Makes a folder's entries last through a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def saved(out: Path) -> list[Path]:
    """The complete folders of a run, oldest first."""
    return sorted((out / FOLDER).glob("step-*"))


def superseded(out: Path, keep: int, permanent: int) -> Iterator[Path]:
    """What may go: all but the newest `keep` and every one of a multiple of `permanent` steps."""
    for folder in saved(out)[:-keep]:
        if not (permanent and int(folder.name.removeprefix("step-")) % permanent == 0):
            yield folder


def newest(out: Path, warn: Callable[[str], object]) -> tuple[Path, dict[str, Any]] | None:
    """The newest state that is whole, with its state.json; a torn one is skipped with a warning."""
    for folder in reversed(saved(out)):
        try:
            state = json.loads((folder / STATE).read_text(encoding="utf-8"))
            Checkpoint(folder)
            with safe_open(folder / OPTIMIZER, "pt") as handle:
                handle.keys()
            return folder, state
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            warn(f"warning: {folder} is not whole and is skipped ({error})")
    return None


def load(trainer: Trainer, folder: Path, state: dict[str, Any]) -> None:
    """Puts a saved state into a trainer, each rank reading what it holds."""
    lanes = list(trainer.model.lanes)
    parameters = dict(trainer.model.named_parameters())
    with torch.no_grad():
        for name, tensor in Checkpoint(folder).tensors(list(parameters), lanes):
            parameters[name].copy_(like(tensor, parameters[name]))
    owners = {id(p): optimizer for optimizer in trainer.optimizers for g in optimizer.param_groups for p in g["params"]}
    with safe_open(folder / OPTIMIZER, "pt") as handle:
        for full_name in handle.keys():
            name, _, key = full_name.rpartition(":")
            tensor = handle.get_tensor(full_name)
            if tensor.dim() and has_lane_axis(name, trainer.model.config):
                tensor = tensor[lanes]
            parameter = parameters[name]
            # A scalar, such as a count of steps, is no part of a parameter.
            value = like(tensor, parameter) if tensor.dim() else tensor.clone()
            owners[id(parameter)].state[parameter][key] = value
    trainer.finished, trainer.skipped = state["finished"], state["skipped"]
    trainer.skipped_in_a_row = state["skipped_in_a_row"]
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["random_state"]), dtype=torch.uint8).clone())


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor as this rank holds it: on the parameter's device, and sharded as it is."""
    tensor = tensor.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return tensor.clone()
