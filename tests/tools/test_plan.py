"""`laneformer plan`: its numbers against ones worked out by hand, what it refuses, and what it prints."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from laneformer import LaneConfig
from laneformer.cost import Parameters, count_parameters, parse_machine
from laneformer.tools import plan as planning
from laneformer.tools.cli import app
from laneformer.tools.plan import built_parameters, plan, read_run
from laneformer.tools.plan_step import layouts, repeated_head_flops, variants
from laneformer.training_cost import training_memory

MACHINE = "192xh100"
LANES_APART = ("parallel.shard=ddp", "data.micro_batch=6")


@pytest.fixture(scope="module")
def run():
    """The first run of the 2B."""
    return read_run("2b-pretrain", MACHINE)


@pytest.fixture(scope="module")
def document(run):
    """Its plan."""
    return plan(run, MACHINE)


@pytest.fixture(scope="module")
def apart():
    """The same with a lane on each device."""
    return read_run("2b-pretrain", MACHINE, lanes_per_rank=1, overrides=LANES_APART)


def invoke(*arguments):
    """The finished command."""
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_2b_has_its_parameters_flops_and_tokens(document):
    assert document["parameters"]["total"] == 2_320_069_632
    # 6 a weight but the embedding's and the norms', and attention: 12 a head element and position seen.
    weights = 6 * (2_320_069_632 - 98_304_000 - 95_232)
    assert document["flops"]["per_token_without_attention"] == weights
    full = (4096 + 1) / 2
    window = (2048 * 2049 / 2 + 2048 * 2048) / 4096
    assert document["flops"]["per_token"] == pytest.approx(weights + 12 * 3072 * (10 * window + 5 * full))
    assert document["tokens"] == document["steps"] * 1152 * 4096
    assert document["tokens"] == pytest.approx(4e12, rel=1e-5)


def test_speed_days_and_cost_follow_from_the_stated_mfu(document, run):
    speed, flops = document["speed"], document["flops"]
    assert speed["tokens_per_s"] * flops["per_token"] == pytest.approx(0.4 * 192 * 989e12)
    assert speed["days"] * 86400 == pytest.approx(document["tokens"] / speed["tokens_per_s"])
    assert speed["cost"] == pytest.approx(2.5 * 192 * 24 * speed["days"])
    half = plan(run, MACHINE, mfu=0.2, gpu_hour=5.0)["speed"]
    assert half["days"] == pytest.approx(2 * speed["days"]) and half["cost"] == pytest.approx(4 * speed["cost"])


def test_the_published_days_imply_an_mfu_at_which_the_plan_takes_as_long(document, run):
    published = document["published"]
    assert 0.2 < published["implied_mfu"] < 0.3
    at_that = plan(run, MACHINE, mfu=published["implied_mfu"])["published"]
    assert at_that["days_here"] == pytest.approx(21.0)
    assert plan(read_run("demo", "1xh100"), "1xh100")["published"] is None


def test_memory_by_term_adds_up_and_decides_whether_it_fits(document, run):
    memory = document["memory"]
    terms = [value for key, value in memory.items() if key not in ("total", "device", "fits")]
    assert sum(terms) == pytest.approx(memory["total"]) and memory["fits"] and memory["device"] == 80e9
    whole = plan(read_run("2b-pretrain", MACHINE, overrides=["parallel.shard=ddp"]), MACHINE)
    assert not whole["memory"]["fits"] and any("does not fit" in line for line in whole["warnings"])


def test_a_delay_hides_what_standard_tensor_parallelism_waits_for(apart):
    document = plan(apart, MACHINE)
    delayed, blocking = document["step"]["delayed:4"], document["step"]["tensor-parallel"]
    assert document["layout"]["lanes_per_rank"] == 1 and document["layout"]["replicas"] == 24
    # Only the two messages at the ends are waited for.
    assert delayed["lanes"]["hidden"] == pytest.approx(1 - 2 / 54)
    assert blocking["lane_wait_s"] == pytest.approx(blocking["lanes"]["link_s_a_step"])
    for step in (delayed, blocking):
        parts = ("compute_s", "recompute_s", "repeated_head_s", "lane_wait_s", "weights_exposed_s")
        assert step["total_s"] == pytest.approx(sum(step[key] for key in parts))
    assert delayed["compute_s"] == pytest.approx(document["speed"]["step_s"])


def test_ranks_that_form_the_same_logits_are_counted_and_warned_of(apart, run):
    assert repeated_head_flops(run.config, run.layout) == 0
    assert repeated_head_flops(apart.config, apart.layout) == 7 * 6 * 32000 * 3072
    assert repeated_head_flops(apart.config.replace(lm_head_type="vocab_parallel"), apart.layout) == 0
    assert any("forms all logits" in line for line in plan(apart, MACHINE)["warnings"])


def test_other_layouts_fit_and_keep_the_batch(document, run):
    assert [row["lanes_per_rank"] for row in document["layouts"]] == [8, 4, 2, 1]
    assert all(row["memory"] <= 80e9 and row["step_s"] <= row["blocking_step_s"] for row in document["layouts"])
    assert document["layouts"][0]["step_s"] == pytest.approx(document["step"]["delayed:4"]["total_s"])
    for other in variants(run.layout, 4):
        assert other.replicas == 48 and other.micro_batch * other.accumulation * 48 == 1152
    assert list(variants(dataclasses.replace(run.layout, devices=6, batch=6), 4)) == []


def test_computing_anew_costs_a_forward_pass_of_the_modules(run):
    machine = parse_machine("1xh100")
    layout = dataclasses.replace(run.layout, devices=1, batch=1, micro_batch=1, shard="ddp", recompute=True)
    (row, *_) = layouts(run.config, run.schedule, layout, machine, 4e14)
    assert row["recompute"] and training_memory(run.config, run.schedule, layout).total == row["memory"]
    head = 6 * 32000 * 3072
    tokens = 4096 / 4e14
    assert row["recompute_s"] * 3 + tokens * head == pytest.approx(row["step_s"] - row["recompute_s"])


@pytest.mark.parametrize(
    "changes",
    [{}, {"lm_head_type": "lane"}, {"tie_word_embeddings": True}, {"replicated_rmsn_scale": False},
     {"lm_head_type": "vocab_parallel"}, {"head_norms": True}],
)  # fmt: skip
def test_the_meta_devices_count_is_the_arithmetics(changes):
    config = LaneConfig.preset("demo", **changes)
    assert built_parameters(config, None) == count_parameters(config)


def test_a_count_that_differs_from_the_models_is_refused(run, monkeypatch):
    monkeypatch.setattr(planning, "count_parameters", lambda config: Parameters(1, 2, 3, 4, 5))
    with pytest.raises(ValueError, match="no plan from that"):
        plan(run, MACHINE)


def test_the_command_prints_every_part_and_writes_the_same_as_json(tmp_path, document):
    result = invoke("2b-pretrain", "--machine", MACHINE, "--json", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.output
    parts = ("2,320,069,632", "tokens/s at 40% MFU", "Memory of one device (fits)", "partials sent", "epochs",
             "about 21 days on 192xh100", "fineweb-edu", "ODC-BY-1.0", "Assumed:", "H100 data sheet")  # fmt: skip
    for part in parts:
        assert part in result.stdout, part
    assert json.loads((tmp_path / "plan.json").read_text()) == json.loads(json.dumps(document))


def test_changes_and_lanes_on_a_device_reach_the_plan():
    result = invoke("2b-pretrain", *LANES_APART, "--lanes-per-rank", "1", "--json", "-")
    layout = json.loads(result.stdout)["layout"]
    assert (layout["micro_batch"], layout["lane_ranks"], layout["shard"]) == (6, 8, "ddp")


def test_a_run_that_does_not_fit_is_a_failure():
    result = invoke("2b-pretrain", "parallel.shard=ddp")
    assert result.exit_code == 1 and "does not fit" in result.stderr and "DOES NOT FIT" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2b-pretran",), "did you mean 2b-pretrain?"),
        (("2b-pretrain", "--machine", "8xh10"), "did you mean h100?"),
        (("2b-pretrain", "--machine", "this"), "peak FLOP/s and memory of 'this' are not known"),
        (("2b-pretrain", "--machine", "100xh100"), "the nearest that does is 1200"),
        (("2b-pretrain", "--lanes-per-rank", "3"), "do not divide the model's 8 lanes"),
        (("2b-pretrain", "--mfu", "40"), "mfu must lie in (0, 1]"),
        (("2b-pretrain", "optim.lrr=1"), "did you mean optim.lr?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_help_names_the_experiments_and_shows_examples():
    result = invoke("--help")
    assert result.exit_code == 0
    for part in ("2b-pretrain", "2b-code", "2b-instruct", "laneformer plan 2b-pretrain --machine 192xh100"):
        assert part in result.stdout
