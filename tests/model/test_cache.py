"""The key-value cache: what is kept where, what comes back, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close

from laneformer import KVCache, LaneConfig, Laneformer
from laneformer.cache import ring_positions
from laneformer.cost import kv_bytes

WINDOW, CAPACITY, SIZE = 5, 23, 6


def config(**changes):
    keys = {
        "hidden_size": 18, "num_hidden_layers": 3, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": SIZE, "intermediate_size": 15, "vocab_size": 29, "num_lanes": 3, "broadcast_delay": 1,
        "sliding_window": WINDOW, "swa_layers": (1,), "rope_theta": 100.0, "max_position_embeddings": 64,
    }  # fmt: skip
    return LaneConfig(**{**keys, **changes})


def numbered(start, count, lanes=3, batch=1):
    """Keys whose every element says lane and position, and values that are their negatives."""
    positions = torch.arange(start, start + count, dtype=torch.float32)
    k = positions.view(1, 1, 1, count, 1) + 1000 * torch.arange(lanes).view(-1, 1, 1, 1, 1)
    k = k.expand(lanes, batch, 1, count, SIZE).contiguous()
    return k, -k


def append(cache, layer, start, count):
    """Appends numbered keys; returns what a query sees, position by position, as {position: key of lane 0}."""
    k, v, key_T = cache.append(layer, *numbered(start, count))
    assert torch.equal(v, -k)
    assert torch.equal(k[2] - k[0], torch.where(k[2] == 0, 0.0, 2000.0))
    return {p: k[0, 0, 0, i, 0].item() for i, p in enumerate(key_T.tolist()) if p >= 0}


@pytest.mark.parametrize("sizes", [[1] * 20, [7, 1, 1, 9, 1, 1], [20], [4, 4, 4, 4, 4], [5, 5, 1, 1], [6, 1, 6, 1, 6]])
def test_a_window_layer_hands_back_at_least_its_window_and_each_key_at_its_position(sizes):
    cache, start = KVCache(config(), CAPACITY), 0
    for count in sizes:
        seen = append(cache, 1, start, count)
        needed = range(max(0, start - WINDOW + 1), start + count)
        assert set(needed) <= set(seen)
        assert all(key == position for position, key in seen.items())
        cache.advance(count)
        start += count
    assert cache.k[1].shape[3] == WINDOW


@pytest.mark.parametrize("sizes", [[1] * 20, [7, 1, 1, 9, 1, 1], [23]])
def test_a_full_layer_hands_back_every_position(sizes):
    cache, start = KVCache(config(), CAPACITY), 0
    for count in sizes:
        assert append(cache, 0, start, count) == {p: p for p in range(start + count)}
        cache.advance(count)
        start += count


def test_the_length_moves_only_when_all_layers_have_stored():
    cache = KVCache(config(), CAPACITY)
    for layer in range(3):
        append(cache, layer, 0, 4)
        assert cache.length == 0
    cache.advance(4)
    assert cache.length == 4


@pytest.mark.parametrize("newest", [0, 1, 4, 5, 6, 13])
def test_ring_slots_hold_the_last_positions_and_empty_ones_are_negative(newest):
    held = dict.fromkeys(range(WINDOW))
    for position in range(newest + 1):
        held[position % WINDOW] = position
    for slot, position in enumerate(ring_positions(newest, WINDOW).tolist()):
        assert position == held[slot] if held[slot] is not None else position < 0


@pytest.mark.parametrize("capacity", [1, 3, 5, 6, 40])
def test_a_window_layer_never_takes_more_room_than_its_window(capacity):
    cache = KVCache(config(), capacity, batch=2, lanes=2, dtype=torch.bfloat16)
    assert [tuple(k.shape) for k in cache.k] == [(2, 2, 1, n, SIZE) for n in (capacity, min(5, capacity), capacity)]
    assert {t.dtype for t in cache.k + cache.v} == {torch.bfloat16}
    assert cache.batch == 2


@pytest.mark.parametrize("capacity", [3, 40])
def test_the_cache_takes_exactly_the_bytes_that_the_cost_model_counts(capacity):
    cache = KVCache(config(), capacity, dtype=torch.float16)
    assert sum(t.numel() * t.element_size() for t in cache.k + cache.v) == kv_bytes(config(), capacity, torch.float16)


def test_more_positions_than_the_capacity_are_refused_before_anything_is_written():
    model = Laneformer(config())
    cache = model.new_cache(7)
    model(torch.tensor([[1, 2, 3, 4]]), cache=cache)
    before = [k.clone() for k in cache.k]
    with pytest.raises(ValueError, match="the cache holds 7 positions; 4 are used and 4 more came"):
        model(torch.tensor([[5, 6, 7, 8]]), cache=cache)
    assert cache.length == 4
    assert all(torch.equal(a, b) for a, b in zip(before, cache.k, strict=True))
    model(torch.tensor([[5, 6, 7]]), cache=cache)
    assert cache.length == 7


@pytest.fixture
def model():
    torch.manual_seed(3)
    return Laneformer(config(), dtype=torch.float64).requires_grad_(False)


TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5, 8, 17, 2, 11, 23, 4]])


def test_a_reset_cache_decodes_as_a_new_one_does(model):
    used, new = model.new_cache(CAPACITY), model.new_cache(CAPACITY)
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[0, :3] = 0
    model(TOKENS.flip(1), cache=used, attention_mask=mask)
    used.reset()
    for i in range(12):
        step = TOKENS[:, i : i + 1]
        assert torch.equal(model(step, cache=used), model(step, cache=new))


@pytest.mark.parametrize("padding", [0, 2])
def test_a_cut_cache_goes_on_as_if_the_rest_had_never_come(padding):
    torch.manual_seed(3)
    whole = Laneformer(config(sliding_window=None, swa_layers=()), dtype=torch.float64).requires_grad_(False)
    mask = (torch.arange(12) >= padding).long()[None] if padding else None
    cache, fresh = whole.new_cache(CAPACITY), whole.new_cache(CAPACITY)
    whole(TOKENS, cache=cache, attention_mask=mask)
    whole(TOKENS[:, :5], cache=fresh, attention_mask=None if mask is None else mask[:, :5])
    cache.truncate(5)
    assert cache.length == 5
    after = torch.tensor([[1, 28, 6]])
    assert_close(whole(after, cache=cache), whole(after, cache=fresh), 18 * 6)


def test_a_ring_is_cut_only_while_it_has_overwritten_nothing(model):
    cache, fresh = model.new_cache(CAPACITY), model.new_cache(CAPACITY)
    model(TOKENS[:, :5], cache=cache)
    cache.truncate(2)
    model(TOKENS[:, :2], cache=fresh)
    assert_close(model(TOKENS[:, 2:9], cache=cache), model(TOKENS[:, 2:9], cache=fresh), 18 * 6)
    with pytest.raises(ValueError, match="a window of 5 positions has been overwritten; the cache cannot be cut to 3"):
        cache.truncate(3)
    cache.truncate(9)
    assert cache.length == 9


@pytest.mark.parametrize("length", [-1, 13])
def test_a_cache_is_cut_to_a_length_it_has(model, length):
    cache = model.new_cache(CAPACITY)
    model(TOKENS, cache=cache)
    with pytest.raises(ValueError, match=f"cannot cut the cache to {length} positions, it holds 12"):
        cache.truncate(length)


def test_reordered_rows_go_on_as_the_rows_they_came_from(model):
    rows = torch.stack((TOKENS[0, :7], TOKENS[0, 5:12], TOKENS[0, 2:9]))
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, :2] = 0
    straight, mixed = model.new_cache(CAPACITY, batch=3), model.new_cache(CAPACITY, batch=3)
    for cache in (straight, mixed):
        model(rows, cache=cache, attention_mask=mask)
    order = torch.tensor([1, 1, 0])
    mixed.reorder(order)
    new = torch.tensor([[7], [8], [9]])
    expected = model(new, cache=straight)
    got = model(new[order], cache=mixed)
    assert torch.equal(got, expected[order])
