"""The persistent kernel gives the golden logits, and the tokens that the eager runner decodes."""

from __future__ import annotations

import pytest
import torch
from golden_cases import CASES
from helpers import relative_error
from kernel_rig import GOLDEN, Rig
from safetensors.torch import load_file


def worst_error(name: str, schedule: str, expected: str, dtype: torch.dtype, count: int, **shape: int) -> float:
    wanted = load_file(GOLDEN / name / f"{expected}.safetensors")
    tokens = wanted["input_ids"].tolist()[:count]
    rig = Rig.golden(name, schedule, len(tokens) + 1, dtype, **shape)
    logits = [rig.run(token, position)[1][0] for position, token in enumerate(tokens)]
    return relative_error(torch.stack(logits), wanted["logits"][:count])


@pytest.mark.parametrize(("name", "schedule", "expected"), CASES)
def test_the_first_golden_tokens_come_out_in_float32(name, schedule, expected):
    assert worst_error(name, schedule, expected, torch.float32, 2) < 5e-6


def test_a_window_ring_that_has_wrapped_and_several_blocks_of_positions():
    # The window is 12 positions, so 14 tokens wrap the ring; full layers have 2 blocks of 8.
    assert worst_error("dtp-delay2-swa", "checkpoint", "expected", torch.float32, 14, block=8) < 5e-6


def test_tiles_that_fit_no_size():
    # Tiles of 32 elements: several columns steps and a ragged last tile in every matrix.
    assert worst_error("dtp-delay1", "checkpoint", "expected", torch.float32, 2, tile=512) < 5e-6


def test_float16_weights_stay_within_their_rounding():
    assert worst_error("dtp-delay1", "checkpoint", "expected", torch.float16, 3) < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "schedule", "expected"), CASES)
def test_every_golden_token_comes_out(name, schedule, expected, dtype):
    limit = 5e-6 if dtype == torch.float32 else 2e-2
    assert worst_error(name, schedule, expected, dtype, 48) < limit
