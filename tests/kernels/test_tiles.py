"""Each tile of the persistent kernel gives what its PyTorch twin gives in float64, at sizes that fit no tile."""

from __future__ import annotations

import ctypes
import faulthandler
import inspect
import mmap
import os
import signal
from typing import Any

import pytest
import torch
from helpers import assert_close

from laneformer import decode_ops, ops
from laneformer.infer.sampling import Sampling
from laneformer.infer.sampling import draw as host_draw
from laneformer.kernels import standalone
from laneformer.kernels import standalone_launches as launches
from laneformer.kernels.plan import PlanError

# Columns beyond the last head are -inf minus -inf before they are masked.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-2


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Whatever is not written is NaN."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(3)
    yield
    torch.use_deterministic_algorithms(False)


def random(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype)


def exact(twin: Any, *arguments: Any) -> Any:
    """What a twin gives for its arguments in float64."""
    return twin(*(value.double() if isinstance(value, torch.Tensor) else value for value in arguments))


def twin_of(name: str) -> Any:
    return getattr(ops, name, None) or getattr(decode_ops, name, None)


def public() -> dict[str, Any]:
    found = inspect.getmembers(standalone, inspect.isfunction)
    return {name: function for name, function in found if function.__module__ == standalone.__name__}


def test_every_stand_alone_tile_has_a_twin_of_the_same_signature():
    assert len(public()) == 12
    for name, function in public().items():
        assert twin_of(name) is not None, name
        assert inspect.signature(function) == inspect.signature(twin_of(name)), name


# Hidden 96 and 72, a width of several ragged column steps, one element.
@pytest.mark.parametrize(("lanes", "rows", "width"), [(1, 37, 96), (3, 37, 72), (2, 300, 96), (1, 5, 1100), (2, 1, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestMatrices:
    def test_matvec(self, dtype, lanes, rows, width):
        x, weight = random(torch.float32, lanes, width), random(dtype, lanes, rows, width)
        assert_close(standalone.matvec(x, weight), exact(decode_ops.matvec, x, weight), width, torch.float32)

    def test_normed_matvec(self, dtype, lanes, rows, width):
        # A small stream, so that eps counts.
        x, norm = random(torch.float32, lanes, width, scale=0.05), random(dtype, lanes, width)
        weight = random(dtype, lanes, rows, width)
        got = standalone.normed_matvec(x, norm, weight, EPS)
        assert_close(got, exact(decode_ops.normed_matvec, x, norm, weight, EPS), width, torch.float32)

    def test_gated_units(self, dtype, lanes, rows, width):
        x, norm = random(torch.float32, lanes, width, scale=0.05), random(dtype, lanes, width)
        weight = random(dtype, lanes, 2 * rows, width)
        got = standalone.gated_units(x, norm, weight, EPS)
        assert_close(got, exact(decode_ops.gated_units, x, norm, weight, EPS), width, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(96,), (3, 1, 2, 72), (37, 24)])
def test_rms_norm(dtype, shape):
    x, weight = random(dtype, *shape, scale=0.05), random(dtype, shape[-1])
    assert_close(standalone.rms_norm(x, weight, EPS), exact(ops.rms_norm, x, weight, EPS), shape[-1], dtype)


def test_rms_norm_with_a_weight_for_each_lane():
    x, weight = random(torch.float32, 3, 5, 72), random(torch.float32, 3, 1, 72)
    assert_close(standalone.rms_norm(x, weight, EPS), exact(ops.rms_norm, x, weight, EPS), 72)


def test_values_that_overflow_float16_when_squared():
    x, weight = torch.full((2, 24), 3e4, dtype=torch.float16), torch.full((24,), 0.5, dtype=torch.float16)
    assert torch.equal(standalone.rms_norm(x, weight, 1e-5), torch.full((2, 24), 0.5, dtype=torch.float16))


def test_rows_that_all_lanes_share_and_lanes_that_lie_apart():
    x, norm = random(torch.float32, 3, 72), random(torch.float32, 1, 72).expand(3, 72)
    weight = random(torch.float32, 3, 50, 72)[:, :37]
    got = standalone.normed_matvec(x, norm, weight, EPS)
    assert_close(got, exact(decode_ops.normed_matvec, x, norm, weight, EPS), 72)
    assert_close(standalone.matvec(x, weight[:1]), exact(decode_ops.matvec, x, weight[:1]), 72)
    # The lanes' columns of one wide matrix.
    columns = random(torch.float32, 300, 3 * 72).unflatten(1, (3, 72)).transpose(0, 1)
    assert_close(standalone.matvec(x, columns), exact(decode_ops.matvec, x, columns), 72)


def guarded(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random values whose last byte is followed by memory that may not be read."""
    size, page = torch.Size(shape).numel() * dtype.itemsize, mmap.PAGESIZE
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + pages * page), page, 0) == 0
    values = torch.frombuffer(memory, dtype=dtype, offset=pages * page - size, count=size // dtype.itemsize).view(shape)
    return values.copy_(random(dtype, *shape))


def in_a_child(work) -> int:
    """The exit status of a forked process that does the work: negative is the signal that ended it."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_nothing_beyond_the_last_tile_is_read():
    """37 rows of 72 are a tile of 32 x 128 and a ragged one, whose masked part lies behind the end."""
    x, norm = guarded(torch.float32, 2, 72), guarded(torch.float16, 2, 72)
    weight, both = guarded(torch.float16, 2, 37, 72), guarded(torch.float16, 2, 74, 72)
    keys, values = guarded(torch.float16, 1, 1, 37, 24), guarded(torch.float16, 1, 1, 37, 24)
    angles = guarded(torch.float32, 12)

    def tiles() -> None:
        standalone.rms_norm(x, norm, EPS)
        standalone.matvec(x, weight)
        standalone.normed_matvec(x, norm, weight, EPS)
        standalone.gated_units(x, norm, both, EPS)
        standalone.attention_output(x.view(2, 3, 1, 24), guarded(torch.float32, 2, 3, 1, 2), 1, weight)
        standalone.decode_attention(
            guarded(torch.float32, 1, 5 * 24),
            keys,
            values,
            36,
            angles,
            angles,
            None,
            norm[1, :24],
            norm[1, 48:],
            EPS,
            16,
        )
        standalone.tree_sum(guarded(torch.float32, 3, 37))

    assert in_a_child(tiles) == 0
    # The guard is there.
    assert in_a_child(lambda: ctypes.string_at(x.data_ptr() + x.numel() * 4, 1)) == -signal.SIGSEGV


def cache_of(lanes, kv_heads, ring, size, window, position, dtype):
    """A cache that holds the positions before `position` that are still seen; NaN in all other slots."""
    keys = torch.full((lanes, kv_heads, ring, size), torch.nan, dtype=dtype)
    values = keys.clone()
    for seen in range(max(0, position + 1 - (window or position + 1)), position):
        keys[:, :, seen % ring] = random(dtype, lanes, kv_heads, size)
        values[:, :, seen % ring] = random(dtype, lanes, kv_heads, size)
    return keys, values


# (head size, query heads, key-value heads, ring, window, position): groups of 1, 2 and 3; position 0; a window that has
# not filled, is full, and has wrapped; a window in a longer cache; several blocks of 16, the last one ragged.
ATTENTION = [
    (24, 2, 2, 40, None, 0), (24, 4, 2, 40, None, 36), (96, 3, 1, 40, None, 20), (24, 3, 1, 20, 20, 7),
    (24, 2, 1, 20, 20, 19), (96, 4, 2, 20, 20, 53), (8, 6, 2, 40, 17, 33), (8, 1, 1, 1, 1, 5),
]  # fmt: skip


@pytest.mark.parametrize("head_norms", [False, True], ids=["plain", "head norms"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "heads", "kv_heads", "ring", "window", "position"), ATTENTION)
def test_attention(size, heads, kv_heads, ring, window, position, dtype, head_norms):
    lanes, block = 2, 16
    keys, values = cache_of(lanes, kv_heads, ring, size, window, position, dtype)
    qkv = random(torch.float32, lanes, (heads + 2 * kv_heads) * size)
    freq = ops.rope_frequencies(size, 100.0, None)
    cos, sin = ops.rope_tables(torch.tensor(position), freq, torch.float64)
    norms = (random(dtype, size), random(dtype, size)) if head_norms else (None, None)
    arguments = (position, cos, sin, window)
    twin_keys, twin_values = keys.clone(), values.clone()
    got, scale = standalone.decode_attention(qkv, keys, values, *arguments, *norms, EPS, block)
    # The twin's cache has the kernel's type, so that the new key is rounded alike; all else is float64.
    q_norm, k_norm = (norm if norm is None else norm.double() for norm in norms)
    want, want_scale = decode_ops.decode_attention(
        qkv.double(), twin_keys, twin_values, *arguments, q_norm, k_norm, EPS, block
    )
    blocks = -(-min(position + 1, window or position + 1) // block)
    assert_close(got[:, :, :blocks], want[:, :, :blocks], size, torch.float32)
    assert_close(scale[:, :, :blocks], want_scale[:, :, :blocks], size, torch.float32)
    assert got[:, :, blocks:].isnan().all()
    assert scale[:, :, blocks:].isnan().all()
    for mine, other in ((keys, twin_keys), (values, twin_values)):
        assert_close(mine[:, :, position % ring], other[:, :, position % ring], size, dtype)
        held = torch.arange(ring) != position % ring
        torch.testing.assert_close(mine[:, :, held], other[:, :, held], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("blocks", "count", "hidden"), [(1, 1, 72), (2, 3, 37), (5, 5, 96)])
def test_blocks_are_combined_on_the_way_into_the_output_projection(dtype, blocks, count, hidden):
    weighted = random(torch.float32, 2, 3, count, 24)
    scale = torch.stack((random(torch.float32, 2, 3, count, scale=9.0), 1 + torch.rand(2, 3, count)), -1)
    weighted[:, :, blocks:], scale[:, :, blocks:] = torch.nan, torch.nan
    weight = random(dtype, 2, hidden, 72)
    got = standalone.attention_output(weighted, scale, blocks, weight)
    want = exact(decode_ops.attention_output, weighted, scale, blocks, weight)
    assert_close(got, want, 72, torch.float32)


def test_blocks_and_their_combination_are_attention_over_the_whole_window():
    """Against ops.attention on rotated keys, which knows neither blocks nor rings."""
    size, heads, kv_heads, ring, window, position = 24, 6, 2, 40, 37, 90
    keys, values = cache_of(1, kv_heads, ring, size, window, position, torch.float32)
    qkv, weight = random(torch.float32, 1, 10 * size), random(torch.float32, 1, 37, heads * size)
    cos, sin = ops.rope_tables(torch.tensor(position), ops.rope_frequencies(size, 100.0, None), torch.float64)
    parts = standalone.decode_attention(qkv, keys, values, position, cos, sin, window, block=16)
    got = standalone.attention_output(*parts, 3, weight)
    slots = [seen % ring for seen in range(position + 1 - window, position + 1)]
    q, k, v = qkv.double().view(1, -1, size).split((heads, kv_heads, kv_heads), 1)
    all_keys, all_values = keys.double()[:, :, slots], values.double()[:, :, slots]
    all_keys[:, :, -1], all_values[:, :, -1] = ops.rope(k, cos, sin), v
    out = ops.attention(
        ops.rope(q, cos, sin)[:, None, :, None], all_keys[:, None], all_values[:, None],
        torch.ones(1, window, dtype=torch.bool),
    )  # fmt: skip
    assert_close(got, decode_ops.matvec(out.view(1, -1), weight.double()), heads * size, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_tree_sum_has_the_same_bits(dtype, count):
    x = random(dtype, count, 2, 37)
    assert torch.equal(standalone.tree_sum(x), ops.tree_sum(x))


# (ranks, lanes of each, slots): sums of a rank's lanes where all are a power of two, else every lane.
EXCHANGES = [(1, 1, 1), (1, 3, 4), (2, 1, 2), (2, 4, 2), (4, 2, 4), (3, 1, 4), (2, 3, 8), (5, 2, 16)]


@pytest.mark.parametrize(("ranks", "lanes", "slots"), EXCHANGES)
def test_partials_go_round(ranks, lanes, slots):
    hidden = 37
    partials = random(torch.float32, ranks, lanes, hidden)
    # A value whose bits say that nothing has come yet must still arrive, as some NaN.
    partials.view(torch.int32)[-1, -1, 5] = -1
    boxes, twins = ([torch.full((slots, hidden), -1, dtype=torch.int32) for _ in range(ranks)] for _ in range(2))
    assert standalone.post_partials(partials, tuple(boxes)) is None
    decode_ops.post_partials(partials, tuple(twins))
    assert all(torch.equal(box, twin) for box, twin in zip(boxes, twins, strict=True))
    want = ops.tree_sum(partials.flatten(0, 1)).expand(ranks, hidden)
    for last in (False, True):
        before = [box.clone() for box in boxes]
        got = standalone.land_partials(partials, tuple(boxes), last)
        for landed in (got, decode_ops.land_partials(partials, tuple(twins), last)):
            torch.testing.assert_close(landed, want, rtol=0, atol=0, equal_nan=True)
        after = before if not last else [torch.full_like(box, -1) for box in boxes]
        assert all(torch.equal(box, kept) for box, kept in zip(boxes, after, strict=True))


def test_a_message_that_was_never_sent_is_given_up():
    partials = random(torch.float32, 2, 1, 37)
    boxes = tuple(torch.full((2, 37), -1, dtype=torch.int32) for _ in range(2))
    standalone.post_partials(partials, boxes)
    boxes[1][0, 36] = -1
    landed = standalone.land_partials(partials, boxes, False)
    assert torch.equal(landed[0], ops.tree_sum(partials.flatten(0, 1)))
    assert landed[1].isnan().tolist() == [False] * 36 + [True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["final stream", "normed"])
def test_logits_reach_every_rank(dtype, normed):
    # Lanes 1 and 2 of 4, slices of 40 tokens: the last rows of lane 2 lie beyond the vocabulary.
    vocab, x = 107, random(torch.float32, 2 if normed else 1, 72, scale=0.1)
    head, norm = random(dtype, 2, 40, 72), random(dtype, 2, 72) if normed else None
    # Each box is followed by memory that is somebody else's.
    memory = [torch.full((vocab + 16,), -1, dtype=torch.int32) for _ in range(6)]
    boxes, twins = (tuple(words[:vocab] for words in part) for part in (memory[:3], memory[3:]))
    standalone.post_logits(x, norm, head, EPS, 1, boxes)
    decode_ops.post_logits(x.double(), norm if norm is None else norm.double(), head.double(), EPS, 1, twins)
    assert all((words[vocab:] == -1).all() for words in memory)
    for box, twin in zip(boxes, twins, strict=True):
        assert (box[:40] == -1).all()
        assert_close(box[40:].view(torch.float32), twin[40:].view(torch.float32), 72)
        assert torch.equal(box, boxes[0])


def test_logits_that_look_like_an_empty_word_are_another_nan():
    head = torch.ones(1, 3, 8)
    head.view(torch.int32)[0, 1, 2] = -1
    box = torch.full((3,), -1, dtype=torch.int32)
    standalone.post_logits(torch.ones(1, 8), None, head, EPS, 0, (box,))
    assert (box != -1).all()
    assert box.view(torch.float32).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 12345, 2**64 - 1])
def test_gumbel_noise(seed):
    ids = torch.tensor([0, 1, 2, 3, 4, 99, 31999, 2**24 - 1])
    got = standalone.gumbel(ids, seed, 4095)
    torch.testing.assert_close(got, decode_ops.gumbel(ids, seed, 4095), rtol=1e-13, atol=1e-13)


# (temperature, top_k, top_p, penalty)
KNOBS = [(0.0, 0, 1.0, 1.0), (0.0, 0, 1.0, 9.0), (1.3, 0, 1.0, 1.0), (0.8, 5, 1.0, 1.0), (2.0, 0, 0.6, 1.0),
         (1.5, 20, 0.5, 1.7)]  # fmt: skip


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_tokens_are_drawn_as_the_twin_and_the_host_draw_them(knobs):
    temperature, top_k, top_p, penalty = knobs
    for position in (1, 777):
        logits, seen = random(torch.float32, 333, scale=2.0), torch.zeros(333, dtype=torch.int8)
        seen[logits.argmax()] = 1
        token = standalone.draw(logits, seen, *knobs, seed=2**63 + 5, position=position)
        assert torch.equal(token, decode_ops.draw(logits, seen, *knobs, seed=2**63 + 5, position=position))
        sampling = Sampling(temperature, top_k, top_p, penalty, 2**63 + 5)
        assert token.item() == host_draw(logits.numpy(), sampling, position, seen.nonzero().flatten().tolist())


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (0, 1e-9)])
def test_keeping_one_token_leaves_no_choice_at_any_temperature(top_k, top_p):
    for position in range(6):
        logits = random(torch.float32, 50)
        token = standalone.draw(logits, torch.zeros(50, dtype=torch.int8), 100.0, top_k, top_p, 1.0, 3, position)
        assert token.item() == logits.argmax()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_draw_no_token(wrong):
    logits, seen = random(torch.float32, 50), torch.zeros(50, dtype=torch.int8)
    logits[17] = wrong
    for draw in (standalone.draw, decode_ops.draw):
        assert draw(logits, seen, 1.0, 5, 0.9, 1.0, 0, 3).tolist() == [-1]


def test_a_launch_may_run_again():
    logits, seen = random(torch.float32, 333), torch.zeros(333, dtype=torch.int8)
    launch = launches.draw(logits, seen, 1.5, 20, 0.5, 1.0, 4, 9)
    assert launch.run().tolist() * 2 == [launch.run().item(), launch.run().item()]


def test_what_does_not_fit_is_refused_with_both_numbers():
    x = torch.ones(2, 8)
    with pytest.raises(PlanError, match=r"weight_LOI must be \(2, 5, 8\), got \(2, 5, 9\)"):
        standalone.matvec(x, torch.ones(2, 5, 9))
    with pytest.raises(PlanError, match="contiguous within a lane"):
        standalone.matvec(x, torch.ones(2, 8, 5).transpose(1, 2))
    with pytest.raises(PlanError, match="41 positions are seen at position 40, the cache holds 40"):
        cache = torch.ones(1, 1, 40, 8)
        standalone.decode_attention(torch.ones(1, 24), cache, cache, 40, torch.ones(4), torch.ones(4))
    with pytest.raises(PlanError, match=r"3 ranks of 1 lanes need 3 boxes of \(4, 8\)"):
        standalone.post_partials(torch.ones(3, 1, 8), (torch.zeros(3, 8, dtype=torch.int32),) * 3)
