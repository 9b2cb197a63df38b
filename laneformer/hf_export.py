"""Writing a checkpoint folder that carries its own code, so that it loads where this package is not installed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint, save_checkpoint
from .config import LaneConfig
from .files import Writer, replace_files, text_writer

AUTO_MAP = {"AutoConfig": "hf.LaneformerConfig", "AutoModelForCausalLM": "hf.LaneformerForCausalLM"}
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def export(
    folder: str | os.PathLike,
    out: str | os.PathLike,
    tokenizer: Any = None,
    generation_config: Any = None,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Writes the checkpoint `folder` to `out` with this package's code beside it; returns `out`.

    AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True) then needs torch and transformers alone.
    tokenizer: a folder, or an object of transformers or tokenizers; the checkpoint's own files by default.
    generation_config: a mapping or a transformers GenerationConfig; the checkpoint's own file by default, or else the
    special ids of its config.json. max_shard_size: bytes, or a text such as 5GB. Each file is complete under its name
    or not there. Raises CheckpointError for a checkpoint that is not whole, ValueError for a tokenizer that is none.
    """
    folder, out = Path(folder), Path(out)
    if out.resolve() == folder.resolve():
        raise ValueError(f"the checkpoint and the export are both {folder}; export to another folder")
    checkpoint = Checkpoint(folder)
    config = checkpoint.config.replace(torch_dtype=str(checkpoint.dtype).removeprefix("torch."))
    generation = _generation_text(generation_config, folder, config.to_dict())
    with tempfile.TemporaryDirectory() as scratch:
        files = {**_code_files(), **_tokenizer_files(tokenizer, folder, Path(scratch))}
        out.mkdir(parents=True, exist_ok=True)
        writers = {out / name: _copy_of(file) for name, file in files.items()}
        replace_files({**writers, out / "generation_config.json": text_writer(generation)})
    save_checkpoint(config, dict(checkpoint.tensors(checkpoint.names)), out, max_shard_size)
    replace_files({out / "config.json": text_writer(json.dumps(_config_keys(config), indent=2) + "\n")})
    return out


def _config_keys(config: LaneConfig) -> dict[str, Any]:
    """The keys of config.json with the code's classes, and rope in the form of transformers 5.

    The older form makes AutoTokenizer fail where it may not run the code, as it then reads rope_scaling by itself.
    """
    keys = {key: value for key, value in config.to_dict().items() if key not in ("rope_theta", "rope_scaling")}
    return {**keys, "rope_parameters": rope_parameters(config), "auto_map": AUTO_MAP}


def rope_parameters(config: LaneConfig) -> dict[str, Any]:
    """The rope block of transformers 5: rope_type, rope_theta and, for llama3, the scaling's four numbers."""
    if config.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    return {"rope_type": "llama3", "rope_theta": config.rope_theta, **dataclasses.asdict(config.rope_scaling)}


def _copy_of(file: Path) -> Writer:
    return lambda path: shutil.copyfile(file, path)


def _code_files() -> dict[str, Path]:
    """hf.py and every file it imports from this package, by name, found as transformers finds them when it loads."""
    from transformers.dynamic_module_utils import get_relative_import_files

    main = Path(__file__).with_name("hf.py")
    return {file.name: file for file in (main, *map(Path, get_relative_import_files(main)))}


def _generation_text(given: Any, folder: Path, config: dict[str, Any]) -> str:
    """The text of generation_config.json."""
    if hasattr(given, "to_json_string"):
        return given.to_json_string()
    if isinstance(given, Mapping):
        return json.dumps(dict(given), indent=2) + "\n"
    if given is not None:
        raise ValueError(f"generation_config is a {type(given).__name__}, expected a mapping or a GenerationConfig")
    own = folder / "generation_config.json"
    if own.exists():
        return own.read_text(encoding="utf-8")
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None}
    return json.dumps(ids, indent=2) + "\n"


def _tokenizer_files(tokenizer: Any, folder: Path, scratch: Path) -> dict[str, Path]:
    """The tokenizer's files by name; those that have to be made are made in `scratch`."""
    if isinstance(tokenizer, str | os.PathLike):
        files = _named_in(Path(tokenizer))
        if not files:
            raise ValueError(f"{tokenizer} holds no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}")
    elif tokenizer is None:
        files = _named_in(folder)
    elif hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(scratch)
        files = {file.name: file for file in scratch.iterdir() if file.is_file()}
    elif hasattr(tokenizer, "to_str"):
        (scratch / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        files = _named_in(scratch)
    else:
        raise ValueError(f"tokenizer is a {type(tokenizer).__name__}, expected a folder or a tokenizer with files")
    if "tokenizer.json" in files and "tokenizer_config.json" not in files:
        # AutoTokenizer cannot tell the class from the model type, which it does not know.
        files["tokenizer_config.json"] = scratch / "tokenizer_config.json"
        files["tokenizer_config.json"].write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n', encoding="utf-8")
    return files


def _named_in(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
