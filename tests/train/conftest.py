"""What the tests of training share: a small corpus that repeats itself, and a model that learns it in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from laneformer.train.settings import Settings
from laneformer.train.settings_build import build_settings

# Odd sizes; three lanes of one head each.
SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
         "head_dim": 6, "intermediate_size": 21, "vocab_size": 264, "num_lanes": 3, "broadcast_delay": 1}  # fmt: skip


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of seven small files of counting sentences."""
    folder = tmp_path_factory.mktemp("corpus")
    for n in range(7):
        lines = [f"line {n} says that {i % 5} and {i % 5} are {i % 5 * 2}\n" for i in range(25)]
        (folder / f"part{n}.txt").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def settings_for(corpus, tmp_path):
    """Settings of a small run on the corpus, with dotted keys replaced."""

    def build(**changes) -> Settings:
        values = {"corpus": str(corpus), "out": str(tmp_path / "run"), "steps": 5, "model": dict(SIZES),
                  "data": {"sequence_length": 19, "batch": 3}}  # fmt: skip
        for key, value in changes.items():
            if isinstance(value, dict):
                values.setdefault(key, {}).update(value)
            else:
                values[key] = value
        return build_settings(values, "test")

    return build


@pytest.fixture
def quick(corpus) -> list[str]:
    """Arguments of the command for two steps of a small model on the corpus."""
    sizes = [f"model.{key}={value}" for key, value in SIZES.items()]
    return [f"corpus={corpus}", *sizes, "steps=2", "data.sequence_length=19", "data.batch=3"]
