"""The model against a twin written with loops over lanes, heads and positions: values, gradients, halves, layout."""

from __future__ import annotations

import math
import threading
from queue import Queue

import pytest
import torch
from helpers import assert_close, relative_error
from loop_twin import Twin

from laneformer import LaneConfig, Laneformer, Schedule
from laneformer.checkpoint import expected_shapes
from laneformer.ops import tree_sum

TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5, 8], [17, 2, 11, 23, 4, 0, 28]])
TERMS = 40 * 6
SCHEDULES = ["tensor-parallel", "delayed:1", "delayed:3", "delayed:2:early", "ladder", "silent"]
HEADS = [
    {}, {"pre_norm_lane_agg": True}, {"lm_head_type": "lane"}, {"lm_head_type": "vocab_parallel"},
    {"tie_word_embeddings": True}, {"lm_head_type": "vocab_parallel", "tie_word_embeddings": True},
    {"replicated_rmsn_scale": False}, {"replicated_rmsn_scale": False, "pre_norm_lane_agg": True},
    {"head_norms": True}, {"sliding_window": 3, "swa_layers": (0, 2)},
]  # fmt: skip


def name(changes):
    return "-".join(f"{key}" for key in changes) or "plain"


def config(**changes):
    keys = {
        "hidden_size": 14, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4,
        "intermediate_size": 15, "vocab_size": 30, "num_lanes": 3, "broadcast_delay": 1, "rope_theta": 50.0,
        "norm_eps": 1e-3,
    }  # fmt: skip
    return LaneConfig(**{**keys, **changes})


def build(seed=0, schedule=None, dtype=torch.float64, **changes):
    """A model whose weights, norms included, are large enough that every one of them shows."""
    torch.manual_seed(seed)
    model = Laneformer(config(**changes), schedule=schedule, dtype=dtype)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.4)
    return model


def both(model):
    """Logits of the model and of its twin, [B, S, V]."""
    return model(TOKENS), torch.stack([Twin(model)(row) for row in TOKENS])


@pytest.mark.parametrize("changes", HEADS, ids=name)
def test_every_kind_of_head_and_norm_gives_the_twins_logits_and_gradients(changes):
    model = build(**changes)
    got, expected = both(model)
    assert_close(got, expected, TERMS)
    towards = torch.linspace(-1, 2, got.numel(), dtype=torch.float64).view_as(got).cos()
    slopes = torch.autograd.grad((expected * towards).sum(), list(model.parameters()))
    (got * towards).sum().backward()
    for (key, parameter), slope in zip(model.named_parameters(), slopes, strict=True):
        assert relative_error(parameter.grad, slope) < 1e-11, key
        assert slope.abs().max() > 0, key


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_twins_logits_and_gradients(schedule):
    model = build(schedule=schedule)
    got, expected = both(model)
    assert_close(got, expected, TERMS)
    slopes = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    got.square().sum().backward()
    for (key, parameter), slope in zip(model.named_parameters(), slopes, strict=True):
        assert relative_error(parameter.grad, slope) < 1e-11, key


def test_the_schedules_give_different_functions():
    outputs = [build(schedule=schedule)(TOKENS) for schedule in SCHEDULES]
    for i, one in enumerate(outputs):
        assert all(relative_error(one, other) > 1e-3 for other in outputs[:i])


def test_gradients_are_the_slopes_that_finite_differences_show():
    model = build(schedule="delayed:3", head_norms=True, replicated_rmsn_scale=False)
    loss = torch.nn.functional.cross_entropy(model(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    loss.backward()
    step = 1e-6
    for key, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        values = []
        with torch.no_grad():
            for sign in (1, -2):
                parameter += sign * step * direction
                logits = model(TOKENS)[:, :-1].flatten(0, 1)
                values.append(torch.nn.functional.cross_entropy(logits, TOKENS[:, 1:].flatten()).item())
            parameter += step * direction
        slope = (values[0] - values[1]) / (2 * step)
        assert (parameter.grad * direction).sum().item() == pytest.approx(slope, rel=1e-5, abs=1e-8), key


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 1e-1)])
@pytest.mark.parametrize("schedule", ["tensor-parallel", "delayed:3"])
def test_narrower_types_stay_near_float64(dtype, limit, schedule):
    exact = build(schedule=schedule)
    narrow = build(schedule=schedule, dtype=dtype)
    narrow.load_state_dict(exact.state_dict())
    with torch.no_grad():
        got = narrow(TOKENS)
    assert got.dtype == dtype
    assert relative_error(got, exact(TOKENS).detach()) < limit


def test_a_later_token_changes_no_earlier_logit():
    model = build(schedule="delayed:3").requires_grad_(False)
    before = model(TOKENS)
    for position in range(1, 7):
        changed = TOKENS.clone()
        changed[:, position] = 29 - changed[:, position]
        after = model(changed)
        assert torch.equal(before[:, :position], after[:, :position])
        assert not torch.equal(before[:, position], after[:, position])


def test_standard_tensor_parallelism_is_the_unsplit_model_cut_along_lanes():
    model = build(schedule="tensor-parallel")
    whole = Laneformer(config(num_lanes=1), schedule="tensor-parallel", dtype=torch.float64)
    merged = {}
    for key, tensor in model.state_dict().items():
        columns = key.endswith(("wo.weight", "w2.weight"))
        merged[key] = torch.cat(list(tensor), 1 if columns else 0)[None] if tensor.dim() == 3 else tensor
    whole.load_state_dict(merged)
    assert_close(model(TOKENS), whole(TOKENS), TERMS)


@pytest.mark.parametrize("changes", HEADS, ids=name)
def test_the_state_dict_has_the_published_names_and_shapes(changes):
    state = Laneformer(config(**changes), device="meta").state_dict()
    assert {key: tuple(tensor.shape) for key, tensor in state.items()} == expected_shapes(config(**changes))


def test_weights_are_drawn_uniformly_within_the_root_of_the_unsplit_fan_in():
    torch.manual_seed(1)
    c = config(hidden_size=60, num_attention_heads=12, head_dim=10, intermediate_size=150, vocab_size=300,
               replicated_rmsn_scale=False)  # fmt: skip
    fan_in = {"wo": 120, "w2": 150}
    for key, parameter in Laneformer(c).named_parameters():
        if "norm" in key:
            assert torch.equal(parameter, torch.ones_like(parameter)), key
            continue
        bound = 1 / math.sqrt(fan_in.get(key.split(".")[-2], 60))
        assert 0.99 * bound < parameter.abs().max().item() <= bound, key
        assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), key
        assert abs(parameter.mean().item()) < 5 * bound / math.sqrt(parameter.numel()), key


def test_lanes_are_drawn_differently_and_a_seed_draws_the_same_again():
    torch.manual_seed(5)
    one = Laneformer(config()).state_dict()
    torch.manual_seed(5)
    two = Laneformer(config()).state_dict()
    assert all(torch.equal(one[key], two[key]) for key in one)
    wq = one["model.layers.0.attention.wq.weight"]
    assert not torch.equal(wq[0], wq[1])


class Desk:
    """Where the parts of one model lay down what they send: every part reads all of it once all have written."""

    def __init__(self, parts, lanes):
        self.parts, self.lanes = parts, lanes
        self.inboxes = {part: {other: Queue() for other in parts} for part in parts}

    def swap(self, part, x_L):
        for other in self.parts:
            self.inboxes[other][part].put(x_L.clone())
        by_lane = {}
        for other in self.parts:
            by_lane |= dict(zip(other, self.inboxes[part][other].get(timeout=20), strict=True))
        return torch.stack([by_lane[lane] for lane in range(self.lanes)])


class Part:
    """The exchange of a part of the lanes, by hand: partials are laid down when posted and read when they land."""

    def __init__(self, desk, lanes):
        self.desk, self.lanes, self.posted = desk, lanes, {}

    def post(self, module, partial_L):
        self.posted[module] = self.desk.swap(self.lanes, partial_L)

    def land(self, module):
        return tree_sum(self.posted.pop(module))

    def sum_lanes(self, x_L):
        return tree_sum(self.desk.swap(self.lanes, x_L))

    def gather_lanes(self, x_L):
        return self.desk.swap(self.lanes, x_L)

    def shared(self, x):
        return x


def run_in_parts(whole, parts):
    """Prefill and two decode steps of a model whose lanes are spread over threads: the logits each part sees."""
    desk, results = Desk(parts, whole.config.num_lanes), {}

    def work(lanes):
        model = Laneformer(whole.config, whole.schedule, lanes, dtype=torch.float64)
        state = whole.state_dict()
        for key, parameter in model.state_dict().items():
            parameter.copy_(state[key] if state[key].shape == parameter.shape else state[key][list(lanes)])
        cache, exchange = model.new_cache(9, batch=2), Part(desk, lanes)
        with torch.no_grad():
            chunks = (TOKENS[:, :5], TOKENS[:, 5:6], TOKENS[:, 6:])
            results[lanes] = torch.cat([model(chunk, cache=cache, exchange=exchange) for chunk in chunks], 1)

    threads = [threading.Thread(target=work, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[part] for part in parts]


@pytest.mark.parametrize("parts", [((0, 1), (2,)), ((2, 0), (1,)), ((0,), (1,), (2,))], ids=str)
@pytest.mark.parametrize("changes", HEADS[:8], ids=name)
def test_parts_of_the_lanes_that_exchange_partials_equal_the_whole(parts, changes):
    whole = build(schedule="delayed:3", **changes).requires_grad_(False)
    for logits in run_in_parts(whole, parts):
        assert_close(logits, whole(TOKENS), TERMS)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_halves_equal_the_whole_under_every_schedule(schedule):
    whole = build(schedule=schedule).requires_grad_(False)
    for logits in run_in_parts(whole, ((0, 2), (1,))):
        assert_close(logits, whole(TOKENS), TERMS)


@pytest.mark.parametrize(("call", "words"), [
    (lambda: build()(TOKENS[0]), r"tokens must be \[B, S\] with at least one token, got \[7\]"),
    (lambda: build()(TOKENS[:, :0]), r"at least one token, got \[2, 0\]"),
    (lambda: Laneformer(config(), lanes=[0, 2])(TOKENS), r"holds lanes \[0, 2\] of 3; give an exchange"),
    (lambda: Laneformer(config(), lanes=[0, 3]), r"among 0\.\.2, got \[0, 3\]"),
    (lambda: Laneformer(config(), lanes=[1, 1]), r"lanes must be distinct .* got \[1, 1\]"),
    (lambda: Laneformer(config(), lanes=[]), r"got \[\]"),
    (lambda: Laneformer(config(), Schedule.ladder(4)), "the schedule has 4 layers, the model 3"),
    (lambda: Laneformer(config(), "delayed:7"), r"0\.\.6 for 3 layers, got 7"),
    (lambda: build()(TOKENS, attention_mask=torch.ones(2, 6)), r"attention_mask is \[2, 6\], expected \[2, 7\]"),
])  # fmt: skip
def test_a_call_that_cannot_work_says_what_was_given_and_expected(call, words):
    with pytest.raises(ValueError, match=words):
        call()
