"""Example kernels, right ones and planted wrong ones, compiled for every target: writes their code to a JSON file.

Run as a script without TRITON_INTERPRET: `python compile_examples.py OUT.json [TARGET...]`. Polls are bounded as in the
real kernels. The names say what an inspector must find in each.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton
import triton.language as tl

from laneformer.kernels.compiled import Entry

WORDS = tl.constexpr(-1)


@triton.jit
def copy(p_in, p_out, BLOCK: tl.constexpr):
    """Loads 16 bytes a thread when pointers are known to be aligned."""
    i = tl.arange(0, BLOCK)
    tl.store(p_out + i, tl.load(p_in + i))


@triton.jit
def post_to_peer(p_in, p_table, p_flag, BLOCK: tl.constexpr, SCOPE: tl.constexpr, CACHE: tl.constexpr):
    """Stores to a peer through a table of addresses, then signals."""
    i = tl.arange(0, BLOCK)
    value = tl.load(p_in + i)
    p_peer = tl.multiple_of(tl.load(p_table).to(tl.pointer_type(tl.int32)), 16)
    tl.store(p_peer + i, value, cache_modifier=CACHE)
    tl.debug_barrier()
    tl.atomic_add(p_flag, 1, sem="release", scope=SCOPE)


@triton.jit
def release(p_out, p_flag, BLOCK: tl.constexpr, BARRIER: tl.constexpr, DRAIN: tl.constexpr):
    """A block store, then a release by one thread."""
    i = tl.arange(0, BLOCK)
    tl.store(p_out + i, i)
    if DRAIN:
        tl.inline_asm_elementwise("s_waitcnt vmcnt(0)", "=r,r", [i], dtype=tl.int32, is_pure=False, pack=1)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_add(p_flag, 1, sem="release", scope="sys")


@triton.jit
def release_in_loop(p_out, p_flag, n, BLOCK: tl.constexpr):
    """A release at the head of a loop whose tail stores: round the loop nothing separates the two."""
    i = tl.arange(0, BLOCK)
    for step in range(n):
        tl.atomic_add(p_flag, 1, sem="release", scope="sys")
        tl.store(p_out + step * BLOCK + i, i)


@triton.jit
def poll_block(p_box, p_out, BLOCK: tl.constexpr, COUNT: tl.constexpr, CACHE: tl.constexpr, KEPT: tl.constexpr):
    """Polls a block of words by volatile loads until all have arrived; KEPT: whether the words are used afterwards."""
    i = tl.arange(0, BLOCK)
    mask = i < COUNT
    words = tl.load(p_box + i, mask=mask, other=0, volatile=True, cache_modifier=CACHE)
    n = 0
    while (tl.sum((words == WORDS).to(tl.int32), 0) > 0) & (n < 1000000):
        words = tl.load(p_box + i, mask=mask, other=0, volatile=True, cache_modifier=CACHE)
        n += 1
    if KEPT:
        tl.store(p_out + i, words, mask=mask)


@triton.jit
def poll_block_by_adds(p_box, p_out, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """Polls a block of words by relaxed adds of nothing."""
    i = tl.arange(0, BLOCK)
    mask = i < COUNT
    words = tl.atomic_add(p_box + i, 0, mask=mask, sem="relaxed", scope="sys")
    n = 0
    while (tl.sum(((words == WORDS) & mask).to(tl.int32), 0) > 0) & (n < 1000000):
        words = tl.atomic_add(p_box + i, 0, mask=mask, sem="relaxed", scope="sys")
        n += 1
    tl.store(p_out + i, words, mask=mask)


@triton.jit
def poll_word(p_word, p_out, wanted, VOLATILE: tl.constexpr, CACHE: tl.constexpr):
    """Polls one word by loads."""
    n = 0
    while (tl.load(p_word, volatile=VOLATILE, cache_modifier=CACHE) < wanted) & (n < 1000000):
        n += 1
    tl.store(p_out, n)


@triton.jit
def poll_counter(p_word, p_out, wanted, SCOPE: tl.constexpr):
    """Polls one counter by acquiring adds of nothing."""
    n = 0
    while (tl.atomic_add(p_word, 0, sem="acquire", scope=SCOPE) < wanted) & (n < 1000000):
        n += 1
    tl.store(p_out, n)


@triton.jit
def weights_and_wait(p_w, p_x, p_word, p_out, wanted, BR: tl.constexpr, BK: tl.constexpr, PLACE: tl.constexpr):
    """A weight tile loaded before the wait (PLACE 0), after it (1), or before it but reduced before it too (2)."""
    i, k = tl.arange(0, BR), tl.arange(0, BK)
    p_tile = p_w + i[:, None] * BK + k[None, :]
    if PLACE != 1:
        w = tl.load(p_tile)
    if PLACE == 2:
        tl.store(p_out + BR + i, tl.sum(w.to(tl.float32), 1))
    n = 0
    while (tl.atomic_add(p_word, 0, sem="acquire", scope="sys") < wanted) & (n < 1000000):
        n += 1
    if PLACE == 1:
        w = tl.load(p_tile)
    x = tl.load(p_x + k, cache_modifier=".cg")
    tl.store(p_out + i, tl.sum(w.to(tl.float32) * x[None, :], 1))


@triton.jit
def weights_and_mailbox(p_w, p_box, p_out, BR: tl.constexpr, BK: tl.constexpr, CACHE: tl.constexpr):
    """A weight tile loaded before a poll of a block of words."""
    i, k = tl.arange(0, BR), tl.arange(0, BK)
    w = tl.load(p_w + i[:, None] * BK + k[None, :])
    words = tl.load(p_box + k, volatile=True, cache_modifier=CACHE)
    n = 0
    while (tl.sum((words == WORDS).to(tl.int32), 0) > 0) & (n < 1000000):
        words = tl.load(p_box + k, volatile=True, cache_modifier=CACHE)
        n += 1
    x = words.to(tl.float32, bitcast=True)
    tl.store(p_out + i, tl.sum(w.to(tl.float32) * x[None, :], 1))


@triton.jit
def layers(p_w, p_word, p_box, p_out, n, BR: tl.constexpr, BK: tl.constexpr, CACHE: tl.constexpr):
    """Layers with weights, each waiting for a counter and for a word; CACHE "plain": by a load that may be moved."""
    i, k = tl.arange(0, BR), tl.arange(0, BK)
    for layer in range(n):
        w = tl.load(p_w + layer * BR * BK + i[:, None] * BK + k[None, :])
        polls = 0
        while (tl.atomic_add(p_word, 0, sem="acquire", scope="sys") < layer) & (polls < 1000000):
            polls += 1
        if CACHE == "plain":
            while (tl.load(p_box) < layer) & (polls < 2000000):
                polls += 1
        else:
            while (tl.load(p_box, volatile=True, cache_modifier=CACHE) < layer) & (polls < 2000000):
                polls += 1
        tl.store(p_out + layer * BR + i, tl.sum(w.to(tl.float32), 1) + polls)


@triton.jit
def draw(p_in, p_out, p_sums, seed, BLOCK: tl.constexpr):
    """A counter-based generator, a float64 logarithm and masked int64 adds: that they compile is the check."""
    i = tl.arange(0, BLOCK)
    zero = (i * 0).to(tl.uint32)
    bits, _, _, _ = tl.philox(seed, i.to(tl.uint32), zero, zero, zero)
    value = tl.log(tl.load(p_in + i).to(tl.float64))
    tl.store(p_out + i, value.to(tl.float32) + bits.to(tl.float32))
    tl.atomic_add(p_sums + i, i.to(tl.int64), mask=i < BLOCK - 3, sem="relaxed", scope="sys")


@triton.jit
def hungry(p_in, p_out, n, BLOCK: tl.constexpr):
    """Keeps far more values than there are registers: must spill."""
    i = tl.arange(0, BLOCK)
    value = tl.load(p_in + i)
    other = tl.load(p_in + BLOCK + i)
    for _ in range(n):
        value, other = other + value * tl.sum(other, 0), value
    tl.store(p_out + i, value)
    tl.store(p_out + BLOCK + i, other)


def examples(backend: str) -> dict[str, Entry]:
    """{name: entry} for a backend; a poll's cache modifier is what that backend needs."""
    poll = ".cv" if backend == "hip" else ""
    box = {"p_box": "*i32", "p_out": "*i32"}
    word = {"p_word": "*i32", "p_out": "*i32", "wanted": "i32"}
    post = {"p_in": "*i32", "p_table": "*i64", "p_flag": "*i32"}
    flag = {"p_out": "*i32", "p_flag": "*i32"}
    tile = {"p_w": "*fp16", "p_x": "*fp32", "p_word": "*i32", "p_out": "*fp32", "wanted": "i32"}
    block: dict[str, Any] = {"BLOCK": 128, "COUNT": 100}
    sizes: dict[str, Any] = {"BR": 16, "BK": 256}
    floats = {"p_in": "*fp32", "p_out": "*fp32"}
    found = {
        "copy": Entry(copy, floats, {"BLOCK": 1024}),
        "copy, alignment unknown": Entry(copy, floats, {"BLOCK": 1024}, aligned=()),
        "post": Entry(post_to_peer, post, {"BLOCK": 128, "SCOPE": "sys", "CACHE": ".wt"}),
        "post, gpu scope": Entry(post_to_peer, post, {"BLOCK": 128, "SCOPE": "gpu", "CACHE": ""}),
        "release": Entry(release, flag, {"BLOCK": 256, "BARRIER": True, "DRAIN": False}),
        "release, no barrier": Entry(release, flag, {"BLOCK": 256, "BARRIER": False, "DRAIN": False}),
        "release, in a loop": Entry(release_in_loop, {**flag, "n": "i32"}, {"BLOCK": 256}),
        "block poll": Entry(poll_block, box, {**block, "CACHE": poll, "KEPT": True}, buffer_ops=False),
        "block poll, one warp": Entry(
            poll_block, box, {**block, "CACHE": poll, "KEPT": True}, warps=1, buffer_ops=False
        ),
        "block poll, volatile only": Entry(poll_block, box, {**block, "CACHE": "", "KEPT": True}),
        "block poll by adds": Entry(poll_block_by_adds, box, block),
        "word poll": Entry(poll_word, word, {"VOLATILE": True, "CACHE": poll}, buffer_ops=False),
        "word poll, volatile only": Entry(poll_word, word, {"VOLATILE": True, "CACHE": ""}),
        "word poll, plain": Entry(poll_word, word, {"VOLATILE": False, "CACHE": ""}),
        "counter poll": Entry(poll_counter, word, {"SCOPE": "sys"}),
        "weights, wait": Entry(weights_and_wait, tile, {**sizes, "PLACE": 0}, warps=8),
        "weights late": Entry(weights_and_wait, tile, {**sizes, "PLACE": 1}, warps=8),
        "weights used before": Entry(weights_and_wait, tile, {**sizes, "PLACE": 2}, warps=8),
        "weights, mailbox": Entry(
            weights_and_mailbox, {"p_w": "*fp16", "p_box": "*i32", "p_out": "*fp32"}, {**sizes, "CACHE": poll},
            warps=8, buffer_ops=False,
        ),
        "draw": Entry(draw, {**floats, "p_sums": "*i64", "seed": "i64"}, {"BLOCK": 128}),
        "hungry": Entry(hungry, {**floats, "n": "i32"}, {"BLOCK": 16384}, warps=1 if backend == "hip" else 4),
        "two waits in a loop": Entry(
            layers, {"p_w": "*fp16", "p_word": "*i32", "p_box": "*i32", "p_out": "*fp32", "n": "i32"},
            {**sizes, "CACHE": poll}, buffer_ops=False,
        ),
        "two waits in a loop, one plain": Entry(
            layers, {"p_w": "*fp16", "p_word": "*i32", "p_box": "*i32", "p_out": "*fp32", "n": "i32"},
            {**sizes, "CACHE": "plain"}, buffer_ops=False,
        ),
    }  # fmt: skip
    if backend == "hip":
        found["release, drained"] = Entry(release, flag, {"BLOCK": 256, "BARRIER": True, "DRAIN": True})
        found["block poll, one warp, buffer ops"] = Entry(
            poll_block, box, {**block, "CACHE": poll, "KEPT": True}, warps=1
        )
    return found


def main(out: str, *targets: str) -> None:
    """Compiles every example for each target and writes {target: {name: {texts, resources}}}."""
    compiled = {}
    for target in targets or ("sm_90", "gfx942"):
        entries = examples("hip" if target.startswith("gfx") else "cuda")
        compiled[target] = {}
        for name, entry in entries.items():
            code = entry.compile(target)
            kept = {language: text for language, text in code.texts.items() if language in ("ptx", "sass", "gcn")}
            compiled[target][name] = {"texts": kept, "resources": asdict(code.resources), "counts": code.counts}
    Path(out).write_text(json.dumps({"triton": triton.__version__, "compiled": compiled}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
