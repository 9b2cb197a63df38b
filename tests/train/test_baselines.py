"""The n-grams that a run is compared with are measured on the very text that the run is measured on."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
from shard_folders import END, VOCABULARY, finish, two_sources, write_shard

from laneformer.evaluation.ngram import NgramModel
from laneformer.train.folders import read_folders
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
    # What is learnt holds the tokens of some held-out documents, so that long contexts count.
    return two_sources(tmp_path, learnt_first=98)


@pytest.mark.parametrize("limit", [10, 28, 36, 1000])
def test_both_meet_the_same_targets_and_bytes(folder, program, limit):
    rows = validation_rows([folder], 4, limit)
    found = held_out(read_folders([folder]), limit)
    assert list(found) == list(rows)
    for source, parts in found.items():
        targets = rows[source].targets_NS.flatten()
        tokens = np.concatenate([part.tokens[1:] for part in parts])
        assert targets[targets != IGNORED].tolist() == tokens.tolist()
    num_bytes = sum(some.num_bytes for some in rows.values())
    assert {row["measured_bytes"] for row in program.baselines(folder, 10, limit)} == {num_bytes}


def test_the_rows_are_the_model_fitted_to_the_text_and_measured_on_the_first_documents(folder, program):
    rows = program.baselines(folder, 10, 28)
    assert [row["model"] for row in rows] == ["unigram", "5-gram"] * 2
    # 28 bytes: two documents of code, one of prose.
    code, prose = [END, *range(100, 105), END, *range(105, 114), END], [END, 300, 301, END]
    model = NgramModel(5, VOCABULARY, END).fit(np.array([END, *range(98, 148), END]))
    nats = model.nats(np.array(code)) + model.nats(np.array(prose))
    assert rows[-1]["bits_per_byte"] == pytest.approx(nats / math.log(2) / (28 + 4), rel=1e-12)


def test_shards_of_which_a_part_is_learnt_are_refused(tmp_path, program):
    shards = [
        write_shard(tmp_path, "t", "chat", [[100, 101]]),
        write_shard(tmp_path, "v", "chat", [[100, 101]], split="valid", learn=[[0, 1, 1]]),
    ]
    with pytest.raises(SystemExit, match="marks what is learnt"):
        program.baselines(finish(tmp_path, shards), 2, 1000)
