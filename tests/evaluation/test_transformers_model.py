"""Any transformers folder answers as its own generate() and logits say, and as our checkpoint of the same weights."""

from __future__ import annotations

import math

import pytest
import torch
from eval_models import write_tokenizer

from laneformer.evaluation.completers import Decoding, NotOffered
from laneformer.evaluation.transformers_model import TransformersCompleter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny llama with a tokenizer; its last hidden states are large enough for clear choices."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("llama")
    vocabulary = write_tokenizer(folder)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=20, intermediate_size=28, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=48, eos_token_id=0, bos_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return TransformersCompleter(folder)


def test_greedy_completions_are_the_likeliest_tokens_one_by_one(model):
    ids = model._tokenizer("def f(x):")["input_ids"]
    expected = list(ids)
    for _ in range(6):
        expected.append(int(model._model(torch.tensor([expected])).logits[0, -1].argmax()))
        if expected[-1] == 0:
            break
    text = model._tokenizer.decode(expected[len(ids) :], skip_special_tokens=True)
    settings = {"max_tokens": 6, "temperature": 0.0, "n": 3, "stop": (), "seed": 0}
    assert model.complete(["def f(x):"], Decoding(**settings)) == [[text] * 3]


def test_samples_differ_repeat_with_their_seed_and_leave_the_callers_random_state_alone(model):
    settings = {"max_tokens": 8, "temperature": 1.0, "n": 4, "stop": ()}
    before = torch.get_rng_state()
    first = model.complete(["a", "a"], Decoding(seed=1, **settings))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(first[0])) > 1 and first[0] != first[1]
    assert (
        model.complete(["a", "a"], Decoding(seed=1, **settings))
        == first
        != model.complete(["a", "a"], Decoding(seed=2, **settings))
    )


def test_generation_ends_at_a_stop_string(model):
    settings = {"max_tokens": 12, "temperature": 0.0, "n": 1, "seed": 0}
    whole = model.complete(["def"], Decoding(stop=(), **settings))[0][0]
    stop = whole[3:5]
    stopped = model.complete(["def"], Decoding(stop=[stop], **settings))[0][0]
    assert whole.startswith(stopped) and stop in stopped and len(stopped) < len(whole)


def test_nats_are_the_sum_over_all_tokens_after_the_end_token(model):
    text = "the cat sat"
    ids = [0, *model._tokenizer(text)["input_ids"]]
    with torch.inference_mode():
        table = model._model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    expected = -sum(float(table[at - 1, ids[at]]) for at in range(1, len(ids)))
    nats, tokens = model.nats(text)
    assert nats == pytest.approx(expected, rel=1e-5) and tokens == len(ids) - 1
    assert math.isfinite(model.nats("long " * 60)[0])


def test_infilling_uses_the_tokenizers_tokens_and_chat_needs_a_template(model, folder):
    assert model.infilling_prompt("a", "b") == "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    ids = model._tokenizer(model.infilling_prompt("a", "b"))["input_ids"]
    assert (ids[0], ids[2], ids[-1]) == (2, 3, 4)
    with pytest.raises(ValueError, match="chat template"):
        model.complete(["a"], Decoding(max_tokens=1, temperature=0.0, n=1, stop=(), seed=0, chat=True))


def test_a_folder_that_cannot_be_loaded_and_one_without_an_end_token_are_told(tmp_path, folder):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="transformers cannot load"):
        TransformersCompleter(tmp_path)
    endless = TransformersCompleter(folder)
    endless._tokenizer.eos_token = endless._tokenizer.bos_token = None
    endless._tokenizer.get_vocab = lambda: {"a": 1}
    with pytest.raises(NotOffered, match="end token"):
        endless.nats("a")
