"""transformers' interface: Auto classes, every kind of cache, loss and gradient, and saving."""

from __future__ import annotations

import importlib
import json
import sys
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import relative_error
from hf_models import save_tiny, tiny_config
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from laneformer import Laneformer, hf

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
WINDOWED = "dtp-delay2-swa"
CACHES = {
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
}


@cache
def golden_model(name, dtype=torch.float64):
    return AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=dtype)


@pytest.fixture
def tiny(tmp_path):
    """Saves a random tiny model when called, with its arguments as changes; returns it with its folder."""
    return partial(save_tiny, tmp_path / "tiny")


def prompt(batch, length, seed=5):
    return torch.randint(8, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def greedy(model, ids, count=20, **options):
    mask = options.pop("attention_mask", torch.ones_like(ids))
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, **options
    )
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize("name", CASES)
def test_a_published_folder_loads_whole_and_gives_the_expected_logits(name):
    model, info = AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float64, output_loading_info=True)
    assert type(model) is hf.LaneformerForCausalLM
    assert not any(info.values()), info
    assert model.state_dict().keys() == Laneformer.from_pretrained(GOLDEN / name).state_dict().keys()
    expected = load_file(GOLDEN / name / "expected.safetensors")
    assert relative_error(model(expected["input_ids"][None]).logits[0], expected["logits"]) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_equal_with_every_cache_and_without(name):
    ids = load_file(GOLDEN / name / "expected.safetensors")["input_ids"][None, :7]
    lanes, tokens = Laneformer.from_pretrained(GOLDEN / name, dtype=torch.float64), ids
    for _ in range(20):
        logits_V = lanes(tokens)[0, -1]
        logits_V[list(lanes.config.eos_ids)] = -torch.inf
        tokens = torch.cat((tokens, logits_V.argmax()[None, None]), 1)
    for kind, options in CACHES.items():
        assert torch.equal(greedy(golden_model(name), ids, **options), tokens[:, 7:]), kind


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", [WINDOWED, "lane-norms-vocab-parallel"])
def test_a_left_padded_batch_gives_the_tokens_of_single_prompts(name, kind):
    model = golden_model(name)
    prompts = [prompt(1, length, seed=length) for length in (3, 17, 9)]
    ids = torch.cat([F.pad(p, (17 - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([F.pad(torch.ones_like(p), (17 - p.shape[1], 0)) for p in prompts])
    together = greedy(model, ids, attention_mask=mask, **CACHES[kind])
    for row, single in zip(together, prompts, strict=True):
        assert torch.equal(row, greedy(model, single, use_cache=False)[0])


def test_a_padded_forward_pass_needs_no_position_ids():
    model, ids = golden_model(WINDOWED), prompt(1, 9)
    padded, mask = F.pad(ids, (4, 0)), F.pad(torch.ones_like(ids), (4, 0))
    assert relative_error(model(padded, attention_mask=mask).logits[:, 4:], model(ids).logits) < 1e-12


@pytest.mark.parametrize("kind", ["plain dynamic", "dynamic", "static"])
def test_pieces_of_any_length_through_a_cache_are_the_whole(kind):
    model, ids = golden_model(WINDOWED), prompt(2, 40)
    whole = model(ids, use_cache=False)
    assert whole.cache is None
    kv = {
        "plain dynamic": DynamicCache,
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=45),
    }[kind]()
    edges = [0, 5, 6, 15, 16, 31, 32, 33, 40]
    parts = []
    for start, end in pairwise(edges):
        parts.append(model(ids[:, start:end], cache=kv).logits)
    assert relative_error(torch.cat(parts, 1), whole.logits) < 1e-12
    # Window layers (of 12 positions) keep no more than they need, where the cache was told of them.
    stored = {"plain dynamic": (40, 40), "dynamic": (11, 40), "static": (12, 45)}[kind]
    assert (kv.layers[0].keys.shape, kv.layers[5].keys.shape) == tuple((2, 4, length, 8) for length in stored)


def test_a_long_prompt_may_be_prefilled_in_chunks_and_a_beam_search_reorders_the_cache():
    model, ids = golden_model(WINDOWED), prompt(2, 26)
    expected = greedy(model, ids, use_cache=False)
    for options in CACHES.values():
        chunk = {} if options.get("use_cache") is False else {"prefill_chunk_size": 7}
        assert torch.equal(greedy(model, ids, **options, **chunk), expected)
    beams = {kind: greedy(model, ids, num_beams=3, **options) for kind, options in CACHES.items()}
    assert torch.equal(beams["dynamic"], beams["none"]) and torch.equal(beams["static"], beams["none"])


def test_position_ids_are_what_rope_turns_by(tiny):
    # Frequencies divided by one half turn as far as positions twice as far apart do.
    double = {"rope_type": "llama3", "factor": 0.5, "low_freq_factor": 100.0, "high_freq_factor": 101.0,
              "original_max_position_embeddings": 1}  # fmt: skip
    lanes, folder = tiny(rope_scaling=None)
    fast = Laneformer(tiny_config(rope_scaling=double), dtype=torch.float64)
    fast.load_state_dict(lanes.state_dict())
    model, ids = AutoModelForCausalLM.from_pretrained(folder), prompt(2, 11)
    assert relative_error(model(ids, position_ids=2 * torch.arange(11)[None]).logits, fast(ids)) < 1e-12
    assert relative_error(model(ids).logits, fast(ids)) > 1e-3


def test_the_cache_has_two_names():
    model, ids = golden_model(WINDOWED), prompt(1, 9)
    first = model(ids[:, :8])
    old = model(ids[:, 8:], past_key_values=model(ids[:, :8]).cache).logits
    assert torch.equal(old, model(ids[:, 8:], cache=first.cache).logits)
    with pytest.raises(ValueError, match="two names"):
        model(ids, cache=DynamicCache(), past_key_values=DynamicCache())


def test_labels_give_the_shifted_cross_entropy_and_the_gradient_of_the_lane_model(tiny):
    lanes, folder = tiny()
    model, ids = AutoModelForCausalLM.from_pretrained(folder), prompt(2, 11)
    labels = ids.clone()
    labels[0, :4] = -100
    loss = model(ids, labels=labels).loss
    expected = F.cross_entropy(lanes(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    assert relative_error(loss, expected) < 1e-6  # transformers sums the loss in float32
    loss.backward()
    expected.backward()
    theirs = dict(model.named_parameters())
    for name, parameter in lanes.named_parameters():
        assert relative_error(theirs[name].grad, parameter.grad) < 1e-5, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("head", ["replicate", "vocab_parallel"])
def test_tied_embeddings_are_one_parameter_and_a_copy_in_the_file_is_welcome(tiny, head):
    lanes, folder = tiny(tie_word_embeddings=True, lm_head_type=head)
    state = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in state
    save_file({**state, "lm_head.weight": state["model.tok_embeddings.weight"].clone()}, folder / "model.safetensors")
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(model(prompt(2, 9)).logits, lanes(prompt(2, 9)))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.state_dict().keys() == state.keys()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": None, "eos_token_id": 2, "pad_token_id": 0},
        {"lm_head_type": "lane", "replicated_rmsn_scale": False},
        {"pre_norm_lane_agg": True, "num_key_value_heads": 6},
        {"head_norms": True, "use_mlp_comm": False},
        {"swa_layers": [], "sliding_window": 4},
        {"swa_layers": [], "sliding_window": None, "broadcast_delay": 0},
    ],
    ids=str,
)
def test_what_transformers_saves_the_lane_model_reads_and_the_other_way_round(tiny, tmp_path, changes):
    lanes, folder = tiny(**changes)
    model, ids = AutoModelForCausalLM.from_pretrained(folder), prompt(2, 9)
    assert model.dtype is torch.float64
    # One stream stands for all lanes where they are equal, so sums are formed in another order.
    torch.testing.assert_close(model(ids).logits, lanes(ids), rtol=1e-12, atol=1e-12)
    model.save_pretrained(tmp_path / "saved")
    again = Laneformer.from_pretrained(tmp_path / "saved")
    assert again.config == Laneformer.from_pretrained(folder).config
    assert again.schedule == lanes.schedule
    assert torch.equal(again(ids), lanes(ids))
    once_more = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert once_more.config.lane_config() == again.config.replace(torch_dtype="float32")
    assert relative_error(once_more(ids).logits, lanes(ids)) < 1e-5


def test_a_new_model_is_drawn_as_the_lane_model_is():
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(GOLDEN / WINDOWED))
    w2 = model.model.layer(2).feed_forward.w2.weight
    assert 0.9 / 160**0.5 < w2.abs().max() <= 1 / 160**0.5
    assert abs(w2.std().item() * (3 * 160) ** 0.5 - 1) < 0.05
    assert torch.equal(model.model.norm.weight, torch.ones(64))


def test_a_weight_that_a_file_lacks_is_reported_and_drawn(tiny):
    _, folder = tiny()
    state, name = load_file(folder / "model.safetensors"), "model.layers.1.feed_forward.w2.weight"
    del state[name]
    save_file(state, folder / "model.safetensors")
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert info["missing_keys"] == {name}
    weight = model.get_parameter(name)
    assert 0.8 / 33**0.5 < weight.abs().max() <= 1 / 33**0.5 and len(weight.unique()) == weight.numel()


def test_embeddings_may_be_given_and_the_last_logits_alone_asked_for():
    model, ids = golden_model(WINDOWED), prompt(2, 9)
    whole = model(ids).logits
    rows = F.embedding(ids, model.get_input_embeddings().weight)
    assert torch.equal(model(inputs_embeds=rows).logits, whole)
    assert relative_error(model(ids, logits_to_keep=2).logits, whole[:, -2:]) < 1e-12
    assert relative_error(model(ids, logits_to_keep=torch.tensor([0, 5])).logits, whole[:, [0, 5]]) < 1e-12
    assert torch.equal(model(ids, return_dict=False)[0], whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.ones(2, 8)}, r"is \[2, 8\], expected \[2, 9\]"),
        ({"attention_mask": torch.ones(2, 1, 9, 9)}, r"expected \[2, 9\]"),
        ({"output_hidden_states": True}, "output_hidden_states is not available"),
        ({"output_attentions": True}, "output_attentions is not available"),
        ({"inputs_embeds": torch.ones(2, 9, 64)}, "got both"),
        ({"input_ids": None}, "got none"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_what_was_expected(arguments, message):
    with pytest.raises(ValueError, match=message):
        golden_model(WINDOWED)(**{"input_ids": prompt(2, 9), **arguments})


def test_a_mask_must_cover_the_cache_as_well():
    model, ids = golden_model(WINDOWED), prompt(1, 9)
    kv = model(ids[:, :6]).cache
    with pytest.raises(ValueError, match=r"is \[1, 3\], expected \[1, 9\].*cached position \(6\)"):
        model(ids[:, 6:], cache=kv, attention_mask=torch.ones(1, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"norm_eps": None}, "missing norm_eps"), ({"num_lane": 4}, "did you mean num_lanes"), ({"num_lanes": 3}, "3")],
    ids=str,
)
def test_a_config_that_cannot_work_is_refused(tmp_path, change, message):
    keys = json.loads((GOLDEN / WINDOWED / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**keys, **change}))
    with pytest.raises(ValueError, match=message):
        AutoConfig.from_pretrained(tmp_path)


def test_without_transformers_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "laneformer.hf")
    with pytest.raises(ImportError, match=r"pip install 'laneformer\[hf\]'"):
        importlib.import_module("laneformer.hf")
