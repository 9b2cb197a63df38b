"""Each reference op against a formula written out on its own, in float64."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from helpers import assert_close, tolerance

from laneformer import ops

LLAMA3 = (8.0, 1.0, 4.0, 8192)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("dtype", "wide"), [
    (torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
])  # fmt: skip
def test_sums_are_kept_in_float32_unless_the_values_are_wider(dtype, wide):
    assert ops.accumulation_dtype(dtype) == wide


def test_rms_norm_divides_by_the_root_of_the_mean_square():
    x, weight, eps = random(2, 3, 7), random(7, seed=1), 0.25
    expected = torch.empty_like(x)
    for i in range(2):
        for j in range(3):
            row = x[i, j].tolist()
            root = math.sqrt(sum(v * v for v in row) / 7 + eps)
            expected[i, j] = (x[i, j] / root) * weight
    assert_close(ops.rms_norm(x, weight, eps), expected, 7)


def test_rms_norm_of_a_lane_uses_that_lanes_scale():
    x, scale = random(3, 2, 5, 7), random(3, 7, seed=1)
    got = ops.rms_norm(x, scale[:, None, None], 1e-5)
    for lane in range(3):
        assert torch.equal(got[lane], ops.rms_norm(x[lane], scale[lane], 1e-5))


def test_rms_norm_of_large_half_precision_values_does_not_overflow():
    x = torch.full((1, 9), 3e4, dtype=torch.float16)
    got = ops.rms_norm(x, torch.full((9,), 0.5, dtype=torch.float16), 1e-5)
    assert got.dtype == torch.float16
    assert_close(got, torch.full((1, 9), 0.5), 9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lane_linear_gives_each_lane_its_own_matrix(dtype):
    x, weight = random(3, 2, 5, 7, dtype=dtype), random(3, 11, 7, seed=1, dtype=dtype)
    got = ops.lane_linear(x, weight)
    for lane in range(3):
        for b in range(2):
            for s in range(5):
                expected = (weight[lane].double() * x[lane, b, s].double()).sum(1)
                assert_close(got[lane, b, s], expected, 7 * 7)


def test_rope_turns_neighbouring_pairs_as_complex_numbers():
    x, positions, theta = random(4, 5, 6), torch.tensor([0, 1, 7, 100, 4095]), 500.0
    cos, sin = ops.rope_tables(positions, ops.rope_frequencies(6, theta, None), x.dtype)
    got = ops.rope(x, cos, sin)
    for h in range(4):
        for s, position in enumerate(positions.tolist()):
            for i in range(3):
                turn = cmath.exp(1j * position * theta ** (-2 * i / 6))
                z = complex(x[h, s, 2 * i], x[h, s, 2 * i + 1]) * turn
                assert complex(got[h, s, 2 * i], got[h, s, 2 * i + 1]) == pytest.approx(z, abs=1e-12)


def test_rope_products_depend_on_the_distance_alone():
    q, k = random(10), random(10, seed=1)
    freq = ops.rope_frequencies(10, 10000.0, None)
    at = {p: ops.rope_tables(torch.tensor(p), freq, torch.float64) for p in (3, 8, 1003, 1008)}
    near = ops.rope(q, *at[8]) @ ops.rope(k, *at[3])
    far = ops.rope(q, *at[1008]) @ ops.rope(k, *at[1003])
    assert near.item() == pytest.approx(far.item(), rel=1e-10)


def test_half_precision_rope_is_computed_in_float32():
    x = random(3, 12, dtype=torch.bfloat16)
    tables = ops.rope_tables(torch.tensor([1, 2000, 4000]), ops.rope_frequencies(12, 1e4, None), x.dtype)
    assert {table.dtype for table in tables} == {torch.float32}
    exact = ops.rope(x.double(), *(table.double() for table in tables))
    got = ops.rope(x, *tables)
    assert got.dtype == torch.bfloat16
    # One rounding at the end, not one for each product.
    assert ((got.double() - exact).abs() <= exact.abs() * torch.finfo(torch.bfloat16).eps / 2 + 1e-6).all()


@pytest.mark.parametrize("position", [3, 4096, 100_000])
def test_rope_angles_stay_exact_at_far_positions(position):
    freq = ops.rope_frequencies(6, 1e4, None)
    cos, _ = ops.rope_tables(torch.tensor([position]), freq, torch.float32)
    expected = [math.cos(position * 1e4 ** (-2 * i / 6)) for i in range(3)]
    assert cos[0].tolist() == pytest.approx(expected, abs=2 * torch.finfo(torch.float32).eps)


def test_llama3_scaling_keeps_fast_pairs_slows_slow_ones_and_blends_between():
    plain, scaled = ops.rope_frequencies(128, 5e5, None), ops.rope_frequencies(128, 5e5, LLAMA3)
    factor, low, high, original = LLAMA3
    kinds = set()
    for f, s in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / f
        if wavelength < original / high:
            kinds.add("fast")
            expected = f
        elif wavelength > original / low:
            kinds.add("slow")
            expected = f / factor
        else:
            kinds.add("between")
            smooth = (original / wavelength - low) / (high - low)
            expected = (1 - smooth) * f / factor + smooth * f
        assert s == pytest.approx(expected, rel=1e-12)
    assert kinds == {"fast", "slow", "between"}


@pytest.mark.parametrize(("theta", "scaling", "head"), [
    (5e5, LLAMA3, 64), (1e4, (32.0, 1.0, 4.0, 8192), 96), (500.0, (4.0, 0.5, 3.0, 100), 10),
])  # fmt: skip
def test_llama3_scaling_agrees_with_transformers(theta, scaling, head):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    block = {"rope_type": "llama3", "rope_theta": theta, **dict(zip(names, scaling, strict=True))}
    config = LlamaConfig(hidden_size=head * 3, num_attention_heads=3, head_dim=head, rope_parameters=block,
                         max_position_embeddings=16 * scaling[3])  # fmt: skip
    expected, attention_scale = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert attention_scale == 1.0
    assert_close(ops.rope_frequencies(head, theta, scaling), expected.double(), head, torch.float32)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 99])
def test_a_query_sees_keys_up_to_itself_and_within_its_window(window):
    queries, keys = [3, 4, 9], [-2, -1, 0, 1, 2, 3, 4, 8, 9, 10]
    got = ops.visible(torch.tensor(queries), torch.tensor(keys), window).tolist()
    expected = [[0 <= j <= i and (window is None or i - window < j) for j in keys] for i in queries]
    assert got == expected


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 3), (6, 2), (3, 3), (5, 1)])
@pytest.mark.parametrize("per_row", [False, True])
def test_attention_is_the_softmax_weighted_sum_of_the_values_a_query_sees(heads, kv_heads, per_row):
    lanes, batch, length, keys, size = 2, 3, 4, 7, 6
    q, k, v = (random(lanes, batch, h, n, size, seed=i) for i, (h, n) in
               enumerate([(heads, length), (kv_heads, keys), (kv_heads, keys)]))  # fmt: skip
    mask = random(batch if per_row else 1, length, keys, seed=5) > 0
    mask[..., 2] = True
    got = ops.attention(q, k, v, mask[:, None] if per_row else mask[0])
    for lane in range(lanes):
        for b in range(batch):
            for h in range(heads):
                for s in range(length):
                    group = h // (heads // kv_heads)
                    seen = mask[b if per_row else 0, s].nonzero().flatten().tolist()
                    scores = [q[lane, b, h, s] @ k[lane, b, group, t] / math.sqrt(size) for t in seen]
                    shares = torch.stack(scores).softmax(0)
                    expected = sum(p * v[lane, b, group, t] for p, t in zip(shares, seen, strict=True))
                    assert_close(got[lane, b, h, s], expected, size * keys)


def test_gated_mlp_is_silu_of_the_gate_times_the_other():
    gate, up = random(2, 3, 7), random(2, 3, 7, seed=1)
    got = ops.gated_mlp(gate, up).flatten().tolist()
    expected = [g / (1 + math.exp(-g)) * u for g, u in zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True)]
    assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8])
def test_tree_sum_is_the_sum_and_leaves_its_input_alone(count):
    x = random(count, 3, 5)
    before = x.clone()
    expected = [math.fsum(column) for column in x.flatten(1).T.tolist()]
    assert_close(ops.tree_sum(x), torch.tensor(expected, dtype=torch.float64).view(3, 5), count)
    assert torch.equal(x, before)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_tree_sum_gives_the_same_bits_when_equal_parts_are_summed_first(parts):
    x = random(8, 1001, dtype=torch.float32)
    of_parts = torch.stack([ops.tree_sum(part) for part in x.chunk(parts)])
    assert torch.equal(ops.tree_sum(of_parts), ops.tree_sum(x))
    a, b, c, d, e, f, g, h = x
    assert torch.equal(ops.tree_sum(x), ((a + b) + (c + d)) + ((e + f) + (g + h)))
    assert not torch.equal(ops.tree_sum(x), a + b + c + d + e + f + g + h)


def test_tree_sum_of_half_precision_keeps_what_float16_would_lose():
    x = torch.tensor([[2048.0], [1.0], [1.0], [1.0], [1.0]], dtype=torch.float16)
    got = ops.tree_sum(x)
    assert (got.dtype, got.item()) == (torch.float32, 2052.0)


def test_the_tolerance_grows_with_the_epsilon_and_the_root_of_the_length():
    assert tolerance(torch.float32, 100) == pytest.approx(40 * 2**-23)
    assert tolerance(torch.bfloat16, 9) / tolerance(torch.float16, 9) == 8
