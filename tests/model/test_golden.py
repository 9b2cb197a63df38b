"""The golden checkpoints: the logits they must give, by every way of asking for them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from helpers import relative_error
from safetensors.torch import load_file

from laneformer import Laneformer

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(
    f"{path.parent.name}/{path.stem.removeprefix('expected').lstrip('-') or 'checkpoint'}"
    for path in GOLDEN.glob("*/expected*.safetensors")
)
LIMITS = {torch.float64: 1e-12, torch.float32: 2e-4}
WINDOWED = "dtp-delay2-swa/checkpoint"


@cache
def case(name, dtype=torch.float64):
    """A golden model with the tokens [S] and logits [S, V] of one of its expected files."""
    folder, schedule = name.split("/")
    suffix = "" if schedule == "checkpoint" else f"-{schedule}"
    expected = load_file(GOLDEN / folder / f"expected{suffix}.safetensors")
    text = schedule.replace("delayed", "delayed:")
    model = Laneformer.from_pretrained(GOLDEN / folder, dtype=dtype, schedule=text)
    return model.requires_grad_(False), expected["input_ids"], expected["logits"]


def decode(model, tokens_S, split, capacity=None):
    """Logits of a prefill of `split` tokens followed by the rest one by one, [S, V]."""
    kv = model.new_cache(capacity or len(tokens_S))
    rows = [model(tokens_S[None, :split], cache=kv)[0]] if split else []
    rows += [model(tokens_S[None, i : i + 1], cache=kv)[0] for i in range(split, len(tokens_S))]
    return torch.cat(rows)


def test_there_is_a_case_for_every_expected_file():
    assert len(CASES) >= 11
    assert "dtp-delay1/delayed3" in CASES


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_full_forward_pass_gives_the_expected_logits(name, dtype):
    model, tokens_S, expected_SV = case(name, dtype)
    assert relative_error(model(tokens_S[None])[0], expected_SV) < LIMITS[dtype]


@pytest.mark.parametrize("name", CASES)
def test_decoding_gives_the_expected_logits_wherever_the_prompt_ends(name):
    model, tokens_S, expected_SV = case(name)
    # Each split decodes on for a few tokens, and past a whole window where there is one.
    more = 14 if name == WINDOWED else 4
    for split in range(1, 48):
        end = min(48, split + more)
        got_SV = decode(model, tokens_S[:end], split)
        assert relative_error(got_SV, expected_SV[:end]) < LIMITS[torch.float64], f"split at {split}"


@pytest.mark.parametrize("name", CASES)
def test_decoding_from_the_first_token_on_gives_the_expected_logits(name):
    model, tokens_S, expected_SV = case(name)
    assert relative_error(decode(model, tokens_S, 0), expected_SV) < LIMITS[torch.float64]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("split", [1, 17, 47])
def test_decoding_in_float32_stays_within_its_tolerance(name, split):
    model, tokens_S, expected_SV = case(name, torch.float32)
    assert relative_error(decode(model, tokens_S, split, capacity=61), expected_SV) < LIMITS[torch.float32]


@pytest.mark.parametrize("sizes", [(1, 2, 3, 42), (5, 5, 5, 33), (24, 1, 23), (47, 1), (13, 35), (12, 12, 12, 12)])
@pytest.mark.parametrize("name", [WINDOWED, "dtp-delay1/ladder"])
def test_a_prompt_may_come_in_chunks(name, sizes):
    model, tokens_S, expected_SV = case(name)
    kv = model.new_cache(48)
    got = torch.cat([model(chunk[None], cache=kv)[0] for chunk in tokens_S.split(sizes)])
    assert relative_error(got, expected_SV) < LIMITS[torch.float64]
    assert kv.length == 48


@pytest.mark.parametrize("window", [1, 2, 7, 47, 48, 49, 1000])
def test_any_window_gives_with_a_cache_what_it_gives_without(window):
    whole, tokens_S, expected_SV = case(WINDOWED)
    model = Laneformer(whole.config.replace(sliding_window=window), dtype=torch.float64)
    model.load_state_dict(whole.state_dict())
    model.requires_grad_(False)
    full_SV = model(tokens_S[None])[0]
    for split in (1, 8, 30):
        assert relative_error(decode(model, tokens_S, split), full_SV) < LIMITS[torch.float64]
    assert (relative_error(full_SV, expected_SV) < 1e-12) == (window == whole.config.sliding_window)


def test_a_ring_far_beyond_its_window_still_agrees_with_a_full_forward_pass():
    model, tokens_S, _ = case(WINDOWED)
    long_S = torch.cat((tokens_S, tokens_S.flip(0), tokens_S.roll(5)))[:131]
    kv = model.new_cache(131)
    assert min(k.shape[3] for k in kv.k) == model.config.sliding_window
    full_SV = model(long_S[None])[0]
    assert relative_error(decode(model, long_S, 3), full_SV) < LIMITS[torch.float64]
    in_chunks = torch.cat([model(chunk[None], cache=kv)[0] for chunk in long_S.split(29)])
    assert relative_error(in_chunks, full_SV) < LIMITS[torch.float64]


@pytest.mark.parametrize("name", CASES)
def test_a_batch_with_left_padding_gives_each_row_its_own_logits(name):
    model, tokens_S, expected_SV = case(name)
    lengths, width, more = (31, 5, 1), 31, 6
    tokens_BS = torch.stack([torch.cat((tokens_S[:1].repeat(width - n), tokens_S[:n])) for n in lengths])
    mask_BS = torch.stack([torch.arange(width) >= width - n for n in lengths]).long()
    kv = model.new_cache(width + more, batch=3)
    prompt_BSV = model(tokens_BS, cache=kv, attention_mask=mask_BS)
    steps = [model(torch.stack([tokens_S[n + i] for n in lengths])[:, None], cache=kv) for i in range(more)]
    got_BSV = torch.cat((prompt_BSV, *steps), 1)
    for row, n in enumerate(lengths):
        assert relative_error(got_BSV[row, width - n :], expected_SV[: n + more]) < LIMITS[torch.float64], f"{n} tokens"


def test_a_padded_batch_without_a_cache_and_with_the_whole_mask_each_step_agree():
    model, tokens_S, expected_SV = case(WINDOWED)
    tokens_BS = torch.stack((tokens_S[:20], torch.cat((tokens_S[:7], tokens_S[:13]))))
    mask_BS = torch.ones(2, 20, dtype=torch.long)
    mask_BS[1, :7] = 0
    got_BSV = model(tokens_BS, attention_mask=mask_BS)
    kv = model.new_cache(20, batch=2)
    steps = [model(tokens_BS[:, i : i + 1], cache=kv, attention_mask=mask_BS[:, : i + 1]) for i in range(20)]
    assert relative_error(got_BSV[1, 7:], expected_SV[:13]) < LIMITS[torch.float64]
    assert relative_error(torch.cat(steps, 1)[1, 7:], expected_SV[:13]) < LIMITS[torch.float64]
    assert relative_error(torch.cat(steps, 1)[0], expected_SV[:20]) < LIMITS[torch.float64]
