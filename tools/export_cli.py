"""`laneformer export`: a training checkpoint as a folder that transformers loads."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laneformer.terminal import friendly_errors, say

if TYPE_CHECKING:
    from laneformer.checkpoint import Checkpoint

HELP = """\
Write a checkpoint of `train` as a folder that transformers loads: weights, code, tokenizer, chat template.

CHECKPOINT is OUT/checkpoint or OUT/checkpoints/step-N of a run. transformers needs no laneformer for the result:
`AutoModelForCausalLM.from_pretrained("hf", trust_remote_code=True)`.

Examples:

    laneformer export runs/demo/checkpoint hf

    laneformer export runs/demo/checkpoints/step-00000200 hf --max-shard-size 2GB --overwrite
"""
STATE, RESULT, TOKENIZER_CONFIG = "state.json", "result.json", "tokenizer_config.json"


def register(app: typer.Typer) -> None:
    """Adds `export` to the command."""
    app.command("export", help=HELP)(export_command)


def export_command(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder of a training run.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
    max_shard_size: Annotated[str, typer.Option(help="Most bytes of a weight file, such as 5GB or 200MB.")] = "5GB",
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier export that OUT holds.")] = False,
) -> None:
    """Exports one checkpoint."""
    with friendly_errors():
        say(export_checkpoint(checkpoint, out, max_shard_size, overwrite).summary)


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    out: Path
    parameters: int
    dtype: str
    files: int
    tokenizer: bool
    template: bool

    @property
    def summary(self) -> str:
        """The export in one line."""
        chat = "with chat template" if self.template else "without chat template"
        words = f"tokenizer {chat}" if self.tokenizer else "no tokenizer (the checkpoint has none)"
        files = f"{self.files} weight file{'s' if self.files > 1 else ''}"
        return f"{self.out}: {self.parameters / 1e6:,.2f} M parameters, {self.dtype}, {files}, {words}"


def export_checkpoint(folder: Path, out: Path, max_shard_size: str = "5GB", overwrite: bool = False) -> Exported:
    """Writes the checkpoint `folder` to `out` for transformers; `out` appears whole or not at all.

    Raises ValueError without transformers, for a folder that is no checkpoint or whose schedule config.json cannot
    express, and for an `out` that may not be replaced.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("laneformer export needs the package transformers: pip install 'laneformer[hf]'")
    from laneformer.checkpoint import parse_size
    from laneformer.hf_export import export

    size = parse_size(max_shard_size)
    checkpoint = open_checkpoint(folder)
    check_schedule(folder, checkpoint)
    check_out(folder, out, overwrite)
    beside = out.resolve().with_name(f".{out.resolve().name}.{os.getpid()}.partial")
    try:
        export(folder, beside, generation_config=generation_keys(folder, checkpoint), max_shard_size=size)
        if out.exists():
            shutil.rmtree(out)
        os.replace(beside, out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return exported(out, checkpoint)


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint; raises ValueError for another folder, naming the one that is meant where a run is given."""
    from laneformer.checkpoint import Checkpoint

    if not (folder / "config.json").is_file() and (folder / "checkpoint" / "config.json").is_file():
        raise ValueError(f"{folder} is a training run, not a checkpoint; give {folder / 'checkpoint'}")
    return Checkpoint(folder)


def check_schedule(folder: Path, checkpoint: Checkpoint) -> None:
    """Raises ValueError where the run trained another schedule than config.json says, as transformers follows that."""
    from laneformer.schedule import Schedule

    trained = trained_schedule(folder)
    if trained is not None and Schedule.parse(trained, checkpoint.config) != Schedule.from_config(checkpoint.config):
        raise ValueError(
            f"{folder} was trained with schedule {trained}, which config.json cannot express, so that transformers "
            f"would compute another model; decode it with infer generate --schedule {trained}"
        )


def trained_schedule(folder: Path) -> str | None:
    """The schedule that the run left beside a checkpoint, or None where it left none."""
    for file in (folder / STATE, folder.parent / RESULT):
        if file.is_file():
            kept = json.loads(file.read_text(encoding="utf-8"))
            return kept.get("identity", {}).get("schedule")
    return None


def check_out(folder: Path, out: Path, overwrite: bool) -> None:
    """Raises ValueError for an output folder that is, or holds, the checkpoint or anything that is not to be lost."""
    if out.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise ValueError(f"{out} holds the checkpoint itself; export to another folder")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give a folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"{out} is not empty; --overwrite replaces an earlier export, or give another folder")
    if not (out / "config.json").is_file():
        raise ValueError(f"{out} holds other files than an earlier export; give another folder")


def generation_keys(folder: Path, checkpoint: Checkpoint) -> dict[str, Any] | None:
    """What generation_config.json says: decoding ends at the document's end, and at the end of a chat's turn.

    None where the checkpoint has its own, or a tokenizer that does not name its special tokens.
    """
    tokenizer, config = folder / "tokenizer.json", folder / TOKENIZER_CONFIG
    if (folder / "generation_config.json").is_file() or not (tokenizer.is_file() and config.is_file()):
        return None
    from laneformer.data.specials import Specials
    from laneformer.data.tokenizer import read_tokenizer

    if "special_token_roles" not in json.loads(config.read_text(encoding="utf-8")):
        return None
    specials = Specials.of(*read_tokenizer(folder))
    return {"eos_token_id": [specials.end, specials.im_end], "pad_token_id": specials.pad}


def exported(out: Path, checkpoint: Checkpoint) -> Exported:
    """What the folder holds now."""
    from laneformer.checkpoint import expected_shapes

    config = out / TOKENIZER_CONFIG
    template = config.is_file() and "chat_template" in json.loads(config.read_text(encoding="utf-8"))
    return Exported(
        out,
        sum(math.prod(shape) for shape in expected_shapes(checkpoint.config).values()),
        str(checkpoint.dtype).removeprefix("torch."),
        len(list(out.glob("model*.safetensors"))),
        (out / "tokenizer.json").is_file(),
        template or (out / "chat_template.jinja").is_file(),
    )
