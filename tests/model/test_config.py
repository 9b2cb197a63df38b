"""The config: presets, every key of config.json in and out, and what is refused with which words."""

from __future__ import annotations

import json

import pytest
import torch

from laneformer import LaneConfig, Laneformer
from laneformer.config import RopeScaling
from laneformer.config_json import REQUIRED, ConfigError

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def published(**changes):
    """A config.json of the published family with odd sizes and some keys changed; `...` leaves a key out."""
    keys = {
        "architectures": ["LaneformerForCausalLM"],
        "model_type": "laneformer",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
        "hidden_size": 66,
        "num_hidden_layers": 5,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "intermediate_size": 129,
        "vocab_size": 97,
        "max_position_embeddings": 251,
        "rope_theta": 5e5,
        "rope_scaling": None,
        "norm_eps": 1e-6,
        "num_lanes": 3,
        "broadcast_delay": 2,
        "use_early_comm": True,
        "use_attention_comm": False,
        "use_mlp_comm": True,
        "lm_head_type": "replicate",
        "pre_norm_lane_agg": False,
        "replicated_rmsn_scale": False,
        "tie_word_embeddings": True,
        "sliding_window": 13,
        "swa_layers": [3, 0],
    } | changes
    return {key: value for key, value in keys.items() if value is not ...}


@pytest.mark.parametrize(("name", "low", "high"), [
    ("2b", 2_320_069_632, 2_320_069_632), ("small", 145e6, 155e6), ("demo", 1.4e6, 1.7e6),
])  # fmt: skip
def test_a_preset_has_the_parameters_it_names(name, low, high):
    model = Laneformer(LaneConfig.preset(name), device="meta")
    assert low <= sum(p.numel() for p in model.parameters()) <= high


def test_the_published_2b_has_its_published_shape():
    config = LaneConfig.preset("2b")
    assert (config.head_size, config.kv_heads, config.num_lanes, config.broadcast_delay) == (96, 16, 8, 2)
    assert [config.window(i) for i in range(15)] == [2048] * 10 + [None] * 5


def test_a_preset_takes_changes_and_refuses_keys_it_does_not_have():
    assert LaneConfig.preset("demo", num_lanes=2).num_lanes == 2
    with pytest.raises(ConfigError, match=r"unknown key 'num_lane'; did you mean num_lanes\?"):
        LaneConfig.preset("demo", num_lane=2)
    with pytest.raises(ConfigError, match="no preset '7b'; there are 2b, small, demo"):
        LaneConfig.preset("7b")


def test_every_published_key_reaches_its_field():
    config = LaneConfig.from_dict(published())
    fields = {**published(), "swa_layers": (0, 3), "eos_token_id": (2, 7)}
    del fields["architectures"], fields["model_type"]
    assert {key: getattr(config, key) for key in fields} == fields
    assert config.eos_ids == (2, 7)
    assert [config.window(i) for i in range(5)] == [13, None, None, 13, None]


def test_sizes_that_are_left_out_follow_from_the_others():
    config = LaneConfig.from_dict(published(num_key_value_heads=..., head_dim=..., hidden_size=72))
    assert (config.kv_heads, config.head_size) == (9, 8)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_scaling_args", "rope_parameters"])
@pytest.mark.parametrize("kind", [{"rope_type": "llama3"}, {"type": "llama3"}, {}])
def test_the_rope_block_is_read_under_each_of_its_names(name, kind):
    keys = published(rope_scaling=...) | {name: {**kind, **LLAMA3}}
    assert LaneConfig.from_dict(keys).rope_scaling == RopeScaling(**LLAMA3)


def test_rope_parameters_may_carry_theta_and_older_names_of_its_fields():
    block = {"rope_theta": 7e4, "scale_factor": 8.0, "old_context_len": 64, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0}  # fmt: skip
    config = LaneConfig.from_dict(published(rope_scaling=..., rope_theta=...) | {"rope_parameters": block})
    assert config.rope_theta == 7e4
    assert config.rope_scaling == RopeScaling(**LLAMA3)


@pytest.mark.parametrize("block", [None, {}, {"rope_type": "default"}, {"rope_type": "default", "rope_theta": 5e5}])
def test_a_default_rope_block_means_no_scaling(block):
    assert LaneConfig.from_dict(published(rope_scaling=block)).rope_scaling is None


@pytest.mark.parametrize(("changes", "words"), [
    ({"rope_scaling": {"rope_type": "yarn", **LLAMA3}}, "rope type yarn, expected llama3"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling lacks low_freq_factor"),
    ({"rope_scaling": {**LLAMA3, "facto": 2.0}}, r"unknown key 'facto'; did you mean factor\?"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor=1.0"),
    ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "a value has the wrong type"),
    ({"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 2.0}}, "and rope_parameters disagree"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "500000.0 but rope_parameters says"),
    ({"rope_scaling": 8.0}, "rope_scaling is 8.0, expected an object"),
])  # fmt: skip
def test_a_rope_block_that_cannot_be_meant_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        LaneConfig.from_dict(published(**changes), "somewhere/config.json")
    assert str(refusal.value).startswith("somewhere/config.json")


@pytest.mark.parametrize("uses", [True, False])
def test_the_older_family_has_one_switch_for_both_kinds(uses):
    config = LaneConfig.from_dict(published(use_attention_comm=..., use_mlp_comm=..., use_comm=uses))
    assert (config.use_attention_comm, config.use_mlp_comm) == (uses, uses)


@pytest.mark.parametrize(("count", "layers"), [
    (2, (0, 1)), (-2, (3, 4)), (5, (0, 1, 2, 3, 4)), (-5, (0, 1, 2, 3, 4)), (0, ()), (-1, (4,)),
])  # fmt: skip
def test_the_older_family_counts_window_layers_from_the_front_or_the_back(count, layers):
    config = LaneConfig.from_dict(published(swa_layers=..., sliding_window_n_layers=count))
    assert config.swa_layers == layers


@pytest.mark.parametrize(("changes", "words"), [
    ({"use_comm": True}, "use_comm is True but use_attention_comm is False"),
    ({"sliding_window_n_layers": 2}, r"sliding_window_n_layers 2 and swa_layers \[3, 0\] disagree"),
    ({"swa_layers": ..., "sliding_window_n_layers": 6}, r"sliding_window_n_layers is 6, expected -5\.\.5"),
    ({"swa_layers": ...}, "sliding_window is 13 but swa_layers does not say"),
    ({"num_lane": 3}, r"unknown key 'num_lane'; did you mean num_lanes\?"),
    ({"qqqqqq": 3}, "unknown key 'qqqqqq'$"),
    ({"model_type": "llama"}, "model_type must be 'laneformer'"),
    ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
    ({"attention_bias": True}, "attention_bias must be False"),
    ({"num_lanes": 2}, "num_lanes 2 does not divide num_attention_heads 9"),
    ({"num_key_value_heads": 6}, "num_key_value_heads 6 does not divide num_attention_heads 9"),
    ({"num_key_value_heads": 1}, "num_lanes 3 does not divide num_key_value_heads 1"),
    ({"intermediate_size": 128}, "num_lanes 3 does not divide intermediate_size 128"),
    ({"head_dim": 7}, "head size must be even for rotary pairs, got 7"),
    ({"head_dim": ...}, "num_attention_heads 9 does not divide hidden_size 66"),
    ({"hidden_size": 0}, "hidden_size must be a whole number of at least 1, got 0"),
    ({"num_hidden_layers": 2.5}, "num_hidden_layers must be a whole number of at least 1, got 2.5"),
    ({"vocab_size": "97"}, "vocab_size must be a whole number of at least 1, got '97'"),
    ({"lm_head_type": "split"}, "lm_head_type is 'split', expected one of replicate, lane, vocab_parallel"),
    ({"lm_head_type": "vocab_parallel"}, "num_lanes 3 does not divide vocab_size 97"),
    ({"lm_head_type": "lane"}, "tie_word_embeddings cannot hold with lm_head_type lane"),
    ({"lm_head_type": "vocab_parallel", "vocab_size": 99, "pre_norm_lane_agg": True}, "pre_norm_lane_agg needs"),
    ({"broadcast_delay": -1}, "broadcast_delay must be a whole number of layers >= 0, got -1"),
    ({"broadcast_delay": 1.5}, "broadcast_delay must be a whole number of layers >= 0, got 1.5"),
    ({"sliding_window": 0}, "sliding_window must be at least 1 position, got 0"),
    ({"sliding_window": None}, r"swa_layers lists \[0, 3\] but sliding_window is not given"),
    ({"swa_layers": [1, 5]}, r"swa_layers \[5\] lie outside the layers 0\.\.4"),
    ({"rope_theta": -1.0}, "rope_theta must be positive, got -1.0"),
    ({"rope_theta": "10000"}, "a value has the wrong type"),
    ({"norm_eps": "1e-5"}, "a value has the wrong type"),
    ({"norm_eps": -1e-5}, "norm_eps must be a finite number >= 0, got -1e-05"),
    ({"use_early_comm": "false"}, "use_early_comm must be true or false, got 'false'"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
])  # fmt: skip
def test_a_wrong_value_is_refused_with_what_was_given_and_expected(changes, words):
    with pytest.raises(ConfigError, match=words):
        LaneConfig.from_dict(published(**changes))


@pytest.mark.parametrize("key", REQUIRED)
def test_a_key_whose_default_is_not_known_must_be_there(key):
    with pytest.raises(ConfigError, match=f"missing {key}; nothing is assumed"):
        LaneConfig.from_dict(published(**{key: ...}))


def test_keys_that_other_tools_write_are_ignored():
    keys = published(
        transformers_version="5.0", use_cache=True, initializer_range=0.02, torch_dtype=..., dtype="float16"
    )
    assert LaneConfig.from_dict(keys) == LaneConfig.from_dict(published(torch_dtype="float16"))


@pytest.mark.parametrize("changes", [
    {}, {"rope_scaling": LLAMA3}, {"head_norms": True}, {"eos_token_id": 2}, {"sliding_window": None, "swa_layers": []},
    {"head_dim": ..., "hidden_size": 72},
])  # fmt: skip
def test_to_dict_is_json_that_from_dict_reads_back(changes):
    config = LaneConfig.from_dict(published(**changes))
    assert LaneConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_replace_checks_again():
    config = LaneConfig.from_dict(published())
    assert config.replace(num_lanes=1).num_lanes == 1
    with pytest.raises(ConfigError, match="num_lanes 5 does not divide"):
        config.replace(num_lanes=5)


@pytest.mark.parametrize(("content", "words"), [
    (None, "does not exist"), ("{", "cannot be read"), ("[1]", "holds a list, expected an object"),
    (b"\xff\xfe\x00", "cannot be read"),
])  # fmt: skip
def test_a_config_file_that_is_no_config_is_refused_by_path(tmp_path, content, words):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=words) as refusal:
        LaneConfig.from_pretrained(tmp_path)
    assert str(path) in str(refusal.value)


def test_the_golden_configs_load_and_name_their_own_type(golden):
    for path in sorted(golden.glob("*/config.json")):
        assert torch.float32 == getattr(torch, LaneConfig.from_pretrained(path.parent).torch_dtype)
