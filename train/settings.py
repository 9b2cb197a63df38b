"""Every setting of a training run: its type, its default, what it means, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from laneformer.config import LaneConfig
from laneformer.config_json import ConfigError, nearest
from laneformer.presets import PRESETS

T = TypeVar("T")
LR_SHAPES = ("cosine", "warmup-stable-decay")
PRECISIONS = ("float32", "bfloat16")
# The tokenizer decides the first three, the training precision the last.
NOT_FOR_MODEL = ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype")


def setting(default: T, meaning: str) -> T:
    """A dataclass field with its meaning, which `train --help` shows."""
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class DataSettings:
    """Which text is read, and how it is cut into sequences."""

    suffixes: tuple[str, ...] = setting((".md", ".py", ".rst", ".txt"), "names in a folder end with one of these")
    exclude: tuple[str, ...] = setting(
        (".git", ".venv", "__pycache__", "node_modules", "site-packages"), "folders of these names are not entered"
    )
    end_token: str = setting("<|endoftext|>", "token between documents")
    valid_fraction: float = setting(0.05, "share of the files (of the text, if one file) held out for validation")
    valid_bytes: int = setting(100_000, "bytes of held-out text measured at most")
    sequence_length: int = setting(256, "tokens a sequence")
    batch: int = setting(16, "sequences a step")

    def __post_init__(self) -> None:
        at_least(self, "data", valid_bytes=1, sequence_length=1, batch=1)
        if not 0 < self.valid_fraction < 1:
            raise ConfigError(f"data.valid_fraction must lie between 0 and 1, got {self.valid_fraction}")
        if not self.end_token:
            raise ConfigError("data.end_token is empty; give the token that ends a document")


@dataclass(frozen=True)
class OptimSettings:
    """AdamW, and the learning rate over the run."""

    lr: float = setting(3e-3, "highest learning rate")
    lr_shape: str = setting("cosine", " or ".join(LR_SHAPES))
    warmup: float = setting(0.05, "share of the steps over which the rate rises")
    decay: float = setting(0.25, "share of the steps over which it falls (warmup-stable-decay only)")
    final: float = setting(0.1, "rate at the end as a share of the highest")
    beta1: float = setting(0.9, "AdamW's decay of the mean gradient")
    beta2: float = setting(0.95, "AdamW's decay of the mean squared gradient")
    eps: float = setting(1e-8, "AdamW's epsilon")
    weight_decay: float = setting(0.1, "decoupled weight decay; none on norms and the embedding")
    clip: float = setting(1.0, "largest gradient norm; larger ones are scaled down to it")

    def __post_init__(self) -> None:
        one_of("optim.lr_shape", self.lr_shape, LR_SHAPES)
        at_least(self, "optim", warmup=0, decay=0, final=0, beta1=0, beta2=0, weight_decay=0)
        for name in ("lr", "eps", "clip"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"optim.{name} must be above 0, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not getattr(self, name) < 1:
                raise ConfigError(f"optim.{name} must be below 1, got {getattr(self, name)}")
        decay = self.decay if self.lr_shape == "warmup-stable-decay" else 0
        if self.warmup + decay > 1:
            raise ConfigError(
                f"optim.warmup {self.warmup} and optim.decay {decay} are shares of one run and add up to more than 1"
            )


@dataclass(frozen=True)
class LogSettings:
    """How often something is written down."""

    every: int = setting(10, "steps between lines of log.jsonl")
    valid_every: int = setting(200, "steps between validations; 0 for one at the end only")

    def __post_init__(self) -> None:
        at_least(self, "log", every=1, valid_every=0)


@dataclass(frozen=True)
class Settings:
    """One training run on one device; raises ConfigError (a ValueError) for what cannot work."""

    corpus: str = setting("", "text to learn: a folder, walked in sorted order, or one file (required)")
    out: str = setting("", "folder for the log, the settings and the checkpoint (required)")
    tokenizer: str | None = setting(None, "tokenizer.json to adopt; one of model.vocab_size entries is trained if null")
    schedule: str = setting("checkpoint", "when lanes sync: tensor-parallel, delayed:D, ladder, silent, or the model's")
    steps: int = setting(300, "optimizer steps")
    seed: int = setting(0, "of the initial weights and of the data order")
    device: str = setting("cpu", "cpu or cuda")
    precision: str = setting("float32", "bfloat16 computes under autocast; weights stay float32")
    threads: int | None = setting(None, "CPU threads; PyTorch's own choice if null")
    overwrite: bool = setting(False, "whether a run that out holds already is deleted first")
    data: DataSettings = field(default_factory=DataSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    log: LogSettings = field(default_factory=LogSettings)
    model: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, example in (("corpus", "corpus=FOLDER_OR_FILE"), ("out", "out=FOLDER")):
            if not getattr(self, name):
                raise ConfigError(f"{name} is not given; add {example}")
        one_of("precision", self.precision, PRECISIONS)
        at_least(self, "", steps=1, seed=0)
        if self.threads is not None:
            at_least(self, "", threads=1)

    def lane_config(self) -> LaneConfig:
        """The model's sizes: the preset with what `model` changes; raises ConfigError where they cannot work."""
        changes = dict(self.model)
        preset = changes.pop("preset", "demo")
        one_of("model.preset", preset, tuple(PRESETS))
        config = LaneConfig.preset(preset, **changes)
        if self.data.sequence_length > config.max_position_embeddings:
            raise ConfigError(
                f"data.sequence_length {self.data.sequence_length} exceeds the model's max_position_embeddings "
                f"{config.max_position_embeddings}; shorten the one or raise model.max_position_embeddings"
            )
        return config


def at_least(settings: Any, section: str, **limits: float) -> None:
    """Raises ConfigError for the first setting below its limit."""
    for name, limit in limits.items():
        value = getattr(settings, name)
        if not value >= limit:
            raise ConfigError(f"{f'{section}.{name}'.lstrip('.')} must be at least {limit}, got {value}")


def one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ConfigError unless the value is among the choices."""
    if value not in choices:
        raise ConfigError(f"{key} is {value!r}, expected one of {', '.join(choices)}{nearest(value, choices)}")


def key_types() -> dict[str, Any]:
    """Every key in dotted form and its type."""
    found = {}
    for name, kind in typing.get_type_hints(Settings).items():
        if name == "model":
            found["model.preset"] = str
            lanes = typing.get_type_hints(LaneConfig)
            found |= {f"model.{key}": lanes[key] for key in lanes if key not in NOT_FOR_MODEL}
        elif dataclasses.is_dataclass(kind):
            found |= {f"{name}.{key}": inner for key, inner in typing.get_type_hints(kind).items()}
        else:
            found[name] = kind
    return found


def check_key(key: str, source: str) -> None:
    """Raises ConfigError for a key that no setting has, naming the nearest one."""
    known = key_types()
    if key in known:
        return
    # A key of the right name in the wrong section is the likelier mistake than a similar one.
    homes = [full for full in known if full.rpartition(".")[2] == key.rpartition(".")[2]]
    hint = f"; did you mean {homes[0]}?" if homes else nearest(key, known)
    if not hint:
        leaves = {full.rpartition(".")[2]: full for full in known}
        leaf = nearest(key.rpartition(".")[2], leaves)
        hint = next((f"; did you mean {full}?" for name, full in leaves.items() if f" {name}?" in leaf), "")
    raise ConfigError(f"{source}: unknown key {key!r}{hint or '; train --help lists all keys'}")


def build_settings(values: dict[str, Any], source: str) -> Settings:
    """Settings from nested values, as yaml gives them: unknown keys and wrong types raise ConfigError."""
    types_ = key_types()
    nested: dict[str, Any] = {"model": {}}
    for section, value in values.items():
        if not isinstance(value, dict):
            check_key(section, source)
            nested[section] = typed(value, types_[section], section)
            continue
        for name, inner in value.items():
            check_key(f"{section}.{name}", source)
            key = f"{section}.{name}"
            nested.setdefault(section, {})[name] = typed(inner, types_[key], key)
    hints = typing.get_type_hints(Settings)
    return Settings(**{
        name: hints[name](**value) if dataclasses.is_dataclass(hints[name]) else value
        for name, value in nested.items()
    })  # fmt: skip


def typed(value: Any, kind: Any, key: str) -> Any:
    """The value as a setting's type holds it; raises ConfigError where it is of another."""
    if isinstance(kind, types.UnionType):
        options = typing.get_args(kind)
        if value is None and type(None) in options:
            return None
        return typed(value, next(option for option in options if option is not type(None)), key)
    if typing.get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(typed(item, typing.get_args(kind)[0], key) for item in value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        inner = typing.get_type_hints(kind)
        if set(value) != set(inner):
            raise ConfigError(f"{key} needs the keys {', '.join(inner)}, got {', '.join(map(str, value)) or 'none'}")
        return kind(**{name: typed(item, inner[name], f"{key}.{name}") for name, item in value.items()})
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is kind and not (kind is float and not math.isfinite(value)):
        return value
    names = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
    raise ConfigError(f"{key} must be {names.get(kind, 'a list' if typing.get_origin(kind) else kind)}, got {value!r}")
