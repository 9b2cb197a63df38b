"""The published checkpoint layout on disk: which tensors, of which shapes, and how a process reads only its lanes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import LaneConfig
from .config_json import nearest
from .files import replace_files, tensors_writer, text_writer
from .model import check_lanes
from .schedule import Schedule

if TYPE_CHECKING:
    from .model import Laneformer

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EMBEDDING, HEAD = "model.tok_embeddings.weight", "lm_head.weight"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as its config says; the message names file, key, found and expected."""


def expected_shapes(config: LaneConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint and its whole shape, lane-first as published (spec: [lane, out, in])."""
    lanes, hidden, head = config.num_lanes, config.hidden_size, config.head_size
    q_rows = config.num_attention_heads * head // lanes
    kv_rows, units = config.kv_heads * head // lanes, config.intermediate_size // lanes
    norm = ("weight", (hidden,)) if config.replicated_rmsn_scale else ("scale", (lanes, hidden))
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        shapes[at + "attention.wq.weight"] = (lanes, q_rows, hidden)
        shapes[at + "attention.wk.weight"] = shapes[at + "attention.wv.weight"] = (lanes, kv_rows, hidden)
        shapes[at + "attention.wo.weight"] = (lanes, hidden, q_rows)
        if config.head_norms:
            shapes[at + "attention.q_norm.weight"] = shapes[at + "attention.k_norm.weight"] = (head,)
        shapes[at + "feed_forward.w1.weight"] = shapes[at + "feed_forward.w3.weight"] = (lanes, units, hidden)
        shapes[at + "feed_forward.w2.weight"] = (lanes, hidden, units)
        shapes[at + f"attention_norm.{norm[0]}"] = shapes[at + f"ffn_norm.{norm[0]}"] = norm[1]
    last = ("weight", (hidden,)) if config.pre_norm_lane_agg else norm
    shapes[f"model.norm.{last[0]}"] = last[1]
    if config.lm_head_type == "lane":
        shapes["lm_head.linear.weight"] = (config.vocab_size, lanes * hidden)
    elif not config.tie_word_embeddings:
        vocab = config.vocab_size
        shapes[HEAD] = (lanes, vocab // lanes, hidden) if config.lm_head_type == "vocab_parallel" else (vocab, hidden)
    return shapes


def has_lane_axis(name: str, config: LaneConfig) -> bool:
    """Whether a tensor's first dimension is the lane."""
    if name == HEAD:
        return config.lm_head_type == "vocab_parallel"
    return name.endswith(".scale") or (".layers." in name and "norm" not in name)


class Checkpoint:
    """An open checkpoint folder: checks its tensors against its config, then reads whole tensors or parts of them.

    Raises CheckpointError for missing or extra tensors, wrong shapes or types, and truncated or absent files.
    Files are mapped, never unpickled; a part of a tensor reads only that part's bytes.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} is not a folder; a checkpoint folder holds config.json and safetensors"
            )
        self.config = LaneConfig.from_pretrained(self.folder)
        self._files = dict(self._locate())
        self._check_names()
        self.dtype = self._check_tensors()

    def _locate(self) -> Iterator[tuple[str, Path]]:
        """Pairs of tensor name and file."""
        index, single = self.folder / INDEX, self.folder / SINGLE
        if not index.exists():
            if not single.exists():
                raise CheckpointError(f"{self.folder} holds neither {SINGLE} nor {INDEX}")
            with self._open(single) as handle:
                yield from ((name, single) for name in handle.keys())
            return
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            pairs = [(name, self.folder / file) for name, file in weight_map.items()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not an index of safetensors: {error!r}") from None
        for file in sorted({file for _, file in pairs}):
            if file.parent != self.folder:
                raise CheckpointError(f"{index} names {file.name} outside the folder")
            if not file.exists():
                raise CheckpointError(f"{index} names {file.name}, which does not exist")
            with self._open(file) as handle:
                there = set(handle.keys())
            for name in (name for name, at in pairs if at == file):
                if name not in there:
                    raise CheckpointError(f"{index} says that {file.name} holds {name}, but it does not")
        yield from pairs

    def _open(self, path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} ({path.stat().st_size} bytes) is not a whole safetensors file: {error}; download it again"
            ) from None

    def _check_names(self) -> None:
        expected = expected_shapes(self.config)
        extra = [name for name in self._files if name not in expected and not self._is_tied_copy(name)]
        missing = [name for name in expected if name not in self._files]
        if missing:
            raise CheckpointError(
                f"{self.folder}: {len(missing)} of {len(expected)} tensors missing, first {missing[0]}"
                + (f"; {len(extra)} extra, first {extra[0]}" if extra else "")
            )
        if extra:
            raise CheckpointError(
                f"{self._files[extra[0]]}: {len(extra)} tensors that config.json does not expect, first {extra[0]}"
                f"{nearest(extra[0], expected)}"
            )

    def _is_tied_copy(self, name: str) -> bool:
        return name == HEAD and self.config.tie_word_embeddings

    def _check_tensors(self) -> torch.dtype:
        expected = expected_shapes(self.config)
        types: dict[str, str] = {}
        for file in sorted(set(self._files.values())):
            with self._open(file) as handle:
                for name in (n for n, at in self._files.items() if at == file and n in expected):
                    part = handle.get_slice(name)
                    if tuple(part.get_shape()) != expected[name]:
                        raise CheckpointError(
                            f"{file}: {name} has shape {part.get_shape()}, config.json expects {list(expected[name])}"
                        )
                    types[name] = part.get_dtype()
                    if types[name] not in FLOATS:
                        raise CheckpointError(f"{file}: {name} is {types[name]}, expected one of {', '.join(FLOATS)}")
                if HEAD in handle.keys() and self._is_tied_copy(HEAD):
                    self._check_tied(handle.get_tensor(HEAD), file)
        return FLOATS[types["model.layers.0.attention.wq.weight"]]

    def _check_tied(self, head: Tensor, file: Path) -> None:
        with self._open(self._files[EMBEDDING]) as handle:
            same = torch.equal(head.flatten(), handle.get_tensor(EMBEDDING).flatten())
        if not same:
            raise CheckpointError(f"{file}: {HEAD} differs from the embedding although tie_word_embeddings is true")

    @property
    def names(self) -> list[str]:
        """Every tensor the config expects, in layout order."""
        return list(expected_shapes(self.config))

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor files."""
        return sum(file.stat().st_size for file in set(self._files.values()))

    def tensor(
        self,
        name: str,
        lanes: Sequence[int] | None = None,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> Tensor:
        """A whole tensor, or `lanes` of it where it has a lane axis, or rows (first dimension), or columns (second).

        The file is mapped for this one tensor only, so that what was read does not stay resident beside its copy.
        """
        with self._open(self._files[name]) as handle:
            part = handle.get_slice(name)
            if columns is not None:
                return part[:, columns]
            return self._lanes_of(part, name, lanes) if rows is None else part[rows]

    def tensors(self, names: Sequence[str], lanes: Sequence[int] | None = None) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of several names in order, with only `lanes` of those that have a lane axis."""
        for name in names:
            yield name, self.tensor(name, lanes)

    def _lanes_of(self, part: Any, name: str, lanes: Sequence[int] | None) -> Tensor:
        if lanes is None or not has_lane_axis(name, self.config):
            return part[:]
        if list(lanes) == list(range(lanes[0], lanes[0] + len(lanes))):
            return part[lanes[0] : lanes[0] + len(lanes)]
        return torch.cat([part[lane : lane + 1] for lane in lanes])


def load_model(
    cls: type[Laneformer],
    folder: str | os.PathLike,
    dtype: torch.dtype | None,
    schedule: Schedule | str | None,
    lanes: Sequence[int] | None,
    device: torch.device | str | None,
) -> Laneformer:
    """Builds the model on the meta device and fills it tensor by tensor, so that two copies never exist."""
    checkpoint = Checkpoint(folder)
    held = check_lanes(checkpoint.config, lanes)
    model = cls(checkpoint.config, schedule, held, device="meta", dtype=dtype or checkpoint.dtype)
    targets = dict(model.named_parameters())
    for name, tensor in checkpoint.tensors(list(targets), held):
        # A copy of one's own: a view would keep the whole file mapped.
        own = torch.empty(tensor.shape, dtype=targets[name].dtype, device=device).copy_(tensor)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(own))
    return model


def save_model(model: Laneformer, folder: str | os.PathLike, max_shard_size: int | str = "5GB") -> None:
    """Writes a model that holds all its lanes in the published layout."""
    if len(model.lanes) < model.config.num_lanes:
        raise ValueError(f"this model holds lanes {list(model.lanes)} of {model.config.num_lanes}; save a whole one")
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    dtype = next(iter(state.values())).dtype
    save_checkpoint(model.config.replace(torch_dtype=str(dtype).removeprefix("torch.")), state, folder, max_shard_size)


def save_checkpoint(
    config: LaneConfig, state: Mapping[str, Tensor], folder: str | os.PathLike, max_shard_size: int | str = "5GB"
) -> None:
    """Writes config.json and safetensors shards: all beside and synced first, then renamed; what is stale goes last.

    A save that fails while writing leaves an earlier checkpoint in the folder as it was.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = split_into_shards(state, parse_size(max_shard_size))
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    writers = {
        folder / file: tensors_writer({name: state[name].contiguous() for name in names})
        for file, names in zip(files, shards, strict=True)
    }
    if count > 1:
        total = sum(state[name].numel() * state[name].element_size() for name in state)
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        writers[folder / INDEX] = text_writer(json.dumps(index, indent=2) + "\n")
    writers[folder / "config.json"] = text_writer(json.dumps(config.to_dict(), indent=2) + "\n")
    replace_files(writers)
    if count == 1:
        (folder / INDEX).unlink(missing_ok=True)
    for stale in folder.glob("model*.safetensors"):
        if stale.name not in files:
            stale.unlink()


def split_into_shards(state: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Names in order, cut so that each shard stays within `limit` bytes (a larger tensor has a shard of its own)."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def parse_size(size: int | str) -> int:
    """Bytes from a number or a text such as 200MB or 5GB (powers of ten)."""
    units = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}
    if isinstance(size, int):
        value = size
    else:
        text = size.strip().upper()
        unit = next((u for u in units if text.endswith(u)), "")
        try:
            value = int(float(text.removesuffix(unit)) * units.get(unit, 1))
        except ValueError:
            raise ValueError(f"max_shard_size is {size!r}, expected a number of bytes or a text such as 5GB") from None
    if value < 1:
        raise ValueError(f"max_shard_size is {size!r}, expected at least 1 byte")
    return value
