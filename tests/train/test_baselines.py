"""The n-grams that a run is compared with are measured on the very text that the run is measured on."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
from shard_folders import END, counting, finish, write_shard

from laneformer.evaluation.ngram import NgramModel
from laneformer.train.loss import IGNORED
from laneformer.train.validation import held_out, validation_rows

SOURCE = Path(__file__).parents[2] / "experiments" / "baselines.py"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("baselines", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path):
    """Held-out documents of 10, 18, 8 and 6 bytes, and one to learn that holds some of the same tokens."""
    shards = [
        write_shard(tmp_path, "v0", "code", counting(100, [5, 9]), split="valid"),
        write_shard(tmp_path, "t", "code", counting(98, [50])),
        write_shard(tmp_path, "v1", "code", counting(200, [4, 3]), split="valid"),
    ]
    return finish(tmp_path, shards)


@pytest.mark.parametrize("limit", [10, 28, 36, 1000])
def test_both_meet_the_same_targets_and_bytes(folder, program, limit):
    rows = validation_rows([folder], 4, limit)["code"]
    parts = held_out([folder], limit)["code"]
    targets = rows.targets_NS.flatten()
    assert targets[targets != IGNORED].tolist() == np.concatenate([part.tokens[1:] for part in parts]).tolist()
    assert {row["measured_bytes"] for row in program.baselines(folder, 10, limit)} == {rows.num_bytes}


def test_the_rows_are_the_model_fitted_to_the_text_and_measured_on_the_first_documents(folder, program):
    rows = program.baselines(folder, 10, 28)
    assert [row["model"] for row in rows] == ["unigram", "5-gram"] * 2
    parts = held_out([folder], 28)["code"]
    assert [part.tokens.tolist() for part in parts] == [[END, *range(100, 105), END, *range(105, 114), END]]
    manifest = program.read_manifest(folder)
    model = NgramModel(5, manifest.vocab_size, END).fit(np.array([END, *range(98, 148), END]))
    expected = model.nats(parts[0].tokens) / math.log(2) / 28
    assert rows[-1]["bits_per_byte"] == pytest.approx(expected, rel=1e-12)
