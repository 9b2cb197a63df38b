"""Settings from text and nested values: unknown keys and wrong types are refused, naming the nearest key."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

from laneformer.config import LaneConfig
from laneformer.config_json import ConfigError, nearest
from laneformer.train.settings import NOT_FOR_MODEL, Settings


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
    if typing.get_origin(kind) is dict and isinstance(value, dict):
        return {str(name): typed(item, typing.get_args(kind)[1], f"{key}.{name}") for name, item in value.items()}
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
