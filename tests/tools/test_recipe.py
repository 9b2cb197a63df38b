"""The recipe's data sets: that they are fully described, that the experiments use them, and how often each is read."""

from __future__ import annotations

import re

import pytest

from laneformer.tools.recipe import DataSet, read_recipe, shares, too_often
from laneformer.train.cli import settings_from

RUNS = ("2b-pretrain", "2b-code", "2b-instruct")
# What Kog published of each run.
TOKENS = {"2b-pretrain": 4e12, "2b-code": 2e12, "2b-instruct": 210e6}


def settings(name):
    """An experiment's settings."""
    return settings_from([f"experiment={name}", "out=plan", "data.folders=[plan]"])


def phases(name):
    """An experiment's mixtures."""
    return [(phase.until, phase.weights) for phase in settings(name).data.phases]


def made_up(name, tokens):
    """A data set of so many tokens."""
    return DataSet(name, f"a/{name}", "default", "train", "text", "MIT", "words", tokens, "counted")


def test_every_data_set_says_where_it_is_what_it_is_and_what_may_be_done_with_it():
    recipe = read_recipe()
    for data in recipe.values():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", data.id) and data.tokens > 1e8
        assert all((data.config, data.split, data.text, data.licence, data.what, data.source))
    assert len({(data.id, data.config) for data in recipe.values()}) == len(recipe), "a set is listed twice"


@pytest.mark.parametrize("name", RUNS)
def test_an_experiment_mixes_described_sets_and_its_weights_are_shares(name):
    recipe = read_recipe()
    for until, weights in phases(name):
        assert set(weights) <= set(recipe) and sum(weights.values()) == pytest.approx(1.0), until
    assert phases(name)[-1][0] == 1.0


def test_every_described_set_is_used_by_an_experiment():
    used = {source for name in RUNS for _, weights in phases(name) for source in weights}
    assert used == set(read_recipe())


@pytest.mark.parametrize("name", RUNS)
def test_an_experiment_learns_as_many_tokens_as_was_published(name):
    run = settings(name)
    step = run.data.batch * run.data.sequence_length
    assert abs(run.steps * step - TOKENS[name]) <= step / 2
    assert run.schedule == "delayed:4" and run.lane_config().window(9) == 2048 and run.lane_config().window(10) is None


def test_no_set_is_read_too_often_over_the_three_runs_together():
    recipe, read = read_recipe(), {}
    for name in RUNS:
        for share in shares(recipe, phases(name), TOKENS[name]):
            read[share.data.name] = read.get(share.data.name, 0.0) + share.epochs
    assert max(read.values()) < 4.05, read


def test_shares_average_over_phases_of_different_length():
    recipe = {"a": made_up("a", 100.0), "b": made_up("b", 1000.0)}
    found = shares(recipe, [(0.75, {"a": 1.0, "b": 3.0}), (1.0, {"b": 2.0})], tokens=800.0)
    assert [(share.data.name, share.weight, share.tokens) for share in found] == [
        ("b", pytest.approx(0.8125), pytest.approx(650.0)),
        ("a", pytest.approx(0.1875), pytest.approx(150.0)),
    ]
    assert [share.epochs for share in found] == [pytest.approx(0.65), pytest.approx(1.5)]


def test_a_set_repeated_too_often_is_named():
    recipe = {"a": made_up("a", 100.0), "b": made_up("b", 1000.0)}
    (line,) = too_often(shares(recipe, [(1.0, {"a": 1.0, "b": 1.0})], tokens=1000.0))
    assert line.startswith("a is read 5.0 times") and "50.0%" in line
    assert too_often(shares(recipe, [(1.0, {"a": 4.0, "b": 6.0})], tokens=1000.0)) == []


def test_an_unknown_source_names_the_nearest():
    with pytest.raises(ValueError, match=r"no data set 'fineweb-edo'; did you mean fineweb-edu\?"):
        shares(read_recipe(), [(1.0, {"fineweb-edo": 1.0})], tokens=1.0)
