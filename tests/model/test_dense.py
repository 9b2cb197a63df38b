"""Standard tensor parallelism against transformers' Llama and Qwen3: the same function, and the same bits back."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from dense_twin import put_float64_inside
from helpers import relative_error
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from laneformer import LaneConfig, Laneformer
from laneformer.config import RopeScaling
from laneformer.dense import from_llama, to_llama
from laneformer.schedule import Landing, Own, Schedule, Step

# transformers computes norms and rope in float32; with that put right both sides agree to float64.
FLOAT32_INSIDE = 1e-5
EXACT = 1e-12
SCALED = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 20,
}  # fmt: skip
SCALING = RopeScaling(4.0, 1.0, 3.0, 20)
VARIANTS = {
    "plain": {},
    "scaled rope": {"rope_theta": 500.0, "rope_scaling": SCALING},
    "tied": {"tie_word_embeddings": True},
    "vocab-parallel head": {"lm_head_type": "vocab_parallel"},
    "tied vocab-parallel head": {"lm_head_type": "vocab_parallel", "tie_word_embeddings": True},
    "lane head": {"lm_head_type": "lane"},
    "scales of every lane": {"replicated_rmsn_scale": False},
    "head norms": {"head_norms": True},
    "head norms, wide heads": {"head_norms": True, "head_dim": 14},
    "head norms, windows": {"head_norms": True, "sliding_window": 5, "swa_layers": (0, 2)},
}


def lane_model(num_lanes, dtype=torch.float64, **changes):
    """A random standard-TP model, loud enough that a wrong order of rows shows in the logits."""
    torch.manual_seed(7)
    config = LaneConfig(
        **{
            "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
            "intermediate_size": 44, "vocab_size": 52, "max_position_embeddings": 64, "num_lanes": num_lanes,
            "broadcast_delay": 0, "norm_eps": 1e-3, "torch_dtype": str(dtype).removeprefix("torch."), **changes,
        }
    )  # fmt: skip
    model = Laneformer(config, dtype=dtype)
    shake(model)
    return model


@torch.no_grad()
def shake(model):
    """Weights three times as large, and norms that are not one: the same in every lane."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(1 + 0.5 * torch.rand(parameter.shape[-1], dtype=parameter.dtype))
        else:
            parameter.mul_(3)


def llama(kind=LlamaForCausalLM, dtype=torch.float64, **changes):
    """A random Llama or Qwen3."""
    torch.manual_seed(8)
    keys = {
        "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 44, "vocab_size": 52, "max_position_embeddings": 64, "rms_norm_eps": 1e-3,
        "initializer_range": 0.3, "eos_token_id": [3, 5], "head_dim": 6, **changes,
    }  # fmt: skip
    model = kind((LlamaConfig if kind is LlamaForCausalLM else Qwen3Config)(**keys)).to(dtype).eval()
    shake(model)
    return model


@pytest.fixture
def float64_inside(monkeypatch):
    """Makes transformers' norms and rope tables float64."""
    put_float64_inside(monkeypatch)


def tokens():
    return torch.randint(52, (2, 29), generator=torch.Generator().manual_seed(9))


@torch.no_grad()
def error(dense, lanes):
    return relative_error(dense(tokens()).logits, lanes(tokens()))


def same_weights(one, other):
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("num_lanes", [1, 2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_lane_model_is_the_llama_it_becomes(variant, num_lanes, float64_inside):
    lanes = lane_model(num_lanes, **VARIANTS[variant])
    dense = to_llama(lanes)
    assert isinstance(dense, Qwen3ForCausalLM if "head_norms" in VARIANTS[variant] else LlamaForCausalLM)
    assert error(dense, lanes) < EXACT


@pytest.mark.parametrize("variant", ["plain", "scaled rope", "head norms, windows"])
def test_transformers_as_it_is_differs_by_its_float32_norms_and_rope_only(variant):
    lanes = lane_model(2, **VARIANTS[variant])
    assert error(to_llama(lanes), lanes) < FLOAT32_INSIDE


@pytest.mark.parametrize("num_lanes", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (LlamaForCausalLM, {}),
        (LlamaForCausalLM, {"rope_parameters": SCALED, "tie_word_embeddings": True}),
        (LlamaForCausalLM, {"head_dim": 10, "num_key_value_heads": 8}),
        (Qwen3ForCausalLM, {"rope_parameters": SCALED}),
        (Qwen3ForCausalLM, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ],
    ids=["llama", "llama scaled tied", "llama wide heads", "qwen3 scaled", "qwen3 windows"],
)
def test_a_dense_model_is_the_lane_model_it_becomes_and_comes_back_in_the_same_bits(
    kind, changes, num_lanes, float64_inside
):
    dense = llama(kind, **changes)
    lanes = from_llama(dense, num_lanes)
    assert (lanes.config.num_lanes, lanes.config.eos_ids) == (num_lanes, (3, 5))
    assert error(dense, lanes) < EXACT
    back = to_llama(lanes)
    assert same_weights(back, dense)
    for key in ("rope_parameters", "rms_norm_eps", "eos_token_id", "head_dim", "tie_word_embeddings"):
        assert getattr(back.config, key) == getattr(dense.config, key)


@pytest.mark.parametrize("variant", ["plain", "scaled rope", "tied", "head norms, wide heads", "head norms, windows"])
@pytest.mark.parametrize("num_lanes", [1, 4])
def test_a_lane_model_comes_back_in_the_same_bits_with_the_same_config(variant, num_lanes):
    lanes = lane_model(num_lanes, **VARIANTS[variant])
    back = from_llama(to_llama(lanes), num_lanes)
    assert same_weights(back, lanes)
    assert back.config == lanes.config
    assert back.schedule == lanes.schedule


def test_folders_go_there_and_back_in_their_own_type(tmp_path):
    lanes = lane_model(4, torch.bfloat16, tie_word_embeddings=True)
    lanes.save_pretrained(tmp_path / "lanes")
    dense = to_llama(tmp_path / "lanes")
    assert dense.dtype is torch.bfloat16 and dense.config.dtype is torch.bfloat16
    dense.save_pretrained(tmp_path / "dense")
    back = from_llama(tmp_path / "dense", 4)
    assert same_weights(back, lanes)
    assert back.config == lanes.config
    assert from_llama(tmp_path / "dense", 2, torch.float32).model.layer(0).attention.wq.weight.dtype is torch.float32


def test_a_folder_is_let_go_of_as_it_is_read(tmp_path, monkeypatch):
    llama().save_pretrained(tmp_path)
    opened = LlamaForCausalLM.from_pretrained(tmp_path)
    monkeypatch.setattr("laneformer.dense.AutoModelForCausalLM.from_pretrained", lambda *_, **__: opened)
    assert same_weights(from_llama(tmp_path, 2), from_llama(llama(), 2))
    assert sum(parameter.numel() for parameter in opened.parameters()) == 0


def test_a_tied_model_stays_tied_and_its_rope_tables_are_whole(tmp_path):
    dense = to_llama(lane_model(2, tie_word_embeddings=True))
    assert dense.lm_head.weight is dense.model.embed_tokens.weight
    dense.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert relative_error(again(tokens()).logits, dense(tokens()).logits) < EXACT


def test_the_golden_standard_tp_checkpoint_is_a_llama(golden, float64_inside):
    expected = load_file(golden / "standard-tp" / "expected.safetensors")
    dense = to_llama(golden / "standard-tp").double()
    assert relative_error(dense(expected["input_ids"][None]).logits[0], expected["logits"]) < EXACT


def test_models_share_no_storage_with_what_they_came_from():
    lanes = lane_model(1)
    dense = to_llama(lanes)
    again = from_llama(dense, 1)
    before = lanes(tokens())
    with torch.no_grad():
        for parameter in [*dense.parameters()]:
            parameter.zero_()
    assert torch.equal(lanes(tokens()), before)
    assert same_weights(again, lanes)


ONE_LANE = [{"broadcast_delay": 2}, {"broadcast_delay": 1, "use_early_comm": True}, {"pre_norm_lane_agg": True}]


@pytest.mark.parametrize("changes", ONE_LANE, ids=str)
def test_one_lane_is_a_llama_whatever_its_delay_and_its_sum(changes, float64_inside):
    lanes = lane_model(1, **changes)
    assert error(to_llama(lanes), lanes) < EXACT


def test_a_delay_can_be_asked_for_and_makes_another_function(float64_inside):
    dense = llama()
    lanes = from_llama(dense, 4, broadcast_delay=1, use_early_comm=True)
    assert str(lanes.schedule) == "delayed:2:early"
    assert same_weights(lanes, from_llama(dense, 4))
    assert error(dense, lanes) > 0.01


def test_a_weight_is_translated_within_its_head_and_its_lane():
    dense = llama()
    lanes = from_llama(dense, 4)
    q = dense.model.layers[1].self_attn.q_proj.weight
    # Query head 5 is the second one of lane 2; pair 1 of its three is rows 1 and 1 + 3 there, 2 and 3 here.
    ours = lanes.model.layer(1).attention.wq.weight
    assert torch.equal(ours[2, 6 + 2], q[5 * 6 + 1]) and torch.equal(ours[2, 6 + 3], q[5 * 6 + 4])
    down = dense.model.layers[1].mlp.down_proj.weight
    assert torch.equal(lanes.model.layer(1).feed_forward.w2.weight[3, 17], down[17, 33:])


def different_norms():
    model = lane_model(4, replicated_rmsn_scale=False)
    with torch.no_grad():
        model.model.layer(1).ffn_norm.scale[2, 5] += 0.25
    return model


def one_lane(*steps):
    return Laneformer(lane_model(1).config, Schedule((Step(Own.ONE),) * 4 + steps))


REFUSED = {
    "dropped output": (lambda: one_lane(Step(Own.ONE), Step(Own.NONE)), "custom .* over 1 lanes"),
    "doubled output": (lambda: one_lane(Step(Own.ONE), Step(Own.ONE, (Landing(5, True),), True)), "over 1 lanes"),
    "late output": (lambda: one_lane(Step(Own.ONE, (), True), Step(Own.ONE, (Landing(4, True),))), "over 1 lanes"),
    "delay": (lambda: lane_model(4, broadcast_delay=1), "delayed:2 over 4 lanes"),
    "ladder": (lambda: Laneformer(lane_model(1).config, "ladder"), "ladder over 1 lanes"),
    "half silent": (lambda: lane_model(2, use_mlp_comm=False), "over 2 lanes"),
    "norms": (different_norms, "norms differ by up to 0.25"),
    "sum before norm": (lambda: lane_model(2, pre_norm_lane_agg=True), "sum of 2 lanes"),
    "windows": (lambda: lane_model(2, sliding_window=9, swa_layers=(1,)), r"layers \[1\] see 9 positions"),
    "odd width": (lambda: lane_model(2, hidden_size=50, head_dim=6), "8 does not divide hidden_size 50"),
    "half a model": (lambda: Laneformer(lane_model(4).config, lanes=(0, 1)), r"lanes \[0, 1\] of 4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_llama_computes_is_refused(case):
    build, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        to_llama(build())


def untied_in_fact():
    model = llama(tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    return model


def quantized():
    model = llama()
    model.config.quantization_config = {"quant_method": "none"}
    return model


def with_adapter():
    model = llama()
    model.model.layers[2].mlp.extra = torch.nn.Linear(2, 2)
    return model


UNFIT = {
    "architecture": (lambda: GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9)), "gpt2"),
    "attention bias": (lambda: llama(attention_bias=True), "attention_bias is True"),
    "mlp bias": (lambda: llama(mlp_bias=True), "mlp_bias is True"),
    "activation": (lambda: llama(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "rope": (lambda: llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "'linear'"),
    "lanes": (llama, "num_lanes 3 does not divide num_attention_heads 8"),
    "tied in name": (untied_in_fact, "differs from the embedding"),
    "quantized": (quantized, "quantized"),
    "adapter": (with_adapter, "model.layers.2.mlp.extra.weight"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_lanes_cannot_compute_is_refused(case):
    build, message = UNFIT[case]
    with pytest.raises(ValueError, match=message):
        from_llama(build(), 3 if case == "lanes" else 2)


def test_without_transformers_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "laneformer.dense")
    with pytest.raises(ImportError, match=r"pip install 'laneformer\[hf\]'"):
        importlib.import_module("laneformer.dense")
