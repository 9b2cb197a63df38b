"""All ways partials travel give the bits of one process that holds every lane."""

from __future__ import annotations

import functools
import math
import time

import pytest
import torch
from conftest import HANDLED_S
from forked import run_ranks

from laneformer.infer.exchange import DistributedExchange, LocalExchange, MailboxExchange, new_exchange
from laneformer.infer.mailbox import WaitTimeout, mailbox_bytes
from laneformer.infer.shared_memory import SharedBlock, Status
from laneformer.ops import tree_sum

MODULES, SLOTS = 6, 6
LATENCY_S = 0.03
KINDS = [("mailbox", 8, 2), ("mailbox", 8, 4), ("mailbox", 6, 3), ("mailbox", 2, 2), ("gloo", 8, 2), ("gloo", 6, 3)]
# What is posted, and when each is landed: delayed, at once, and out of order.
PLAY = [("post", 0), ("post", 1), ("post", 2), ("land", 0), ("post", 3), ("land", 3), ("land", 2), ("land", 1)]


def partial(lanes, module, positions=3):
    """Partials [L, S, D] of very different sizes, with zeros among them."""
    random = torch.Generator().manual_seed(module)
    x = torch.randn(lanes, positions, 7, generator=random)
    x[:, 0, 2] = 0.0
    x[:, -1, -1] = -0.0
    return x * torch.exp(5 * torch.randn(lanes, positions, 7, generator=random))


def play(exchange, mine):
    """What lands, and the exchanges at the head, of an exchange that holds the lanes `mine` selects."""
    landed = []
    for kind, module in PLAY:
        exchange.at(module)
        if kind == "post":
            exchange.post(module, mine(module))
        else:
            landed.append(exchange.land(module))
    exchange.at(MODULES)
    # 11 * 7 = 77 numbers a lane: more than fit in one message of 23 words.
    sums = [exchange.sum_lanes(mine(7, 11)), exchange.sum_lanes(mine(8, 1))]
    gathered = [exchange.gather_lanes(mine(9, 11)), exchange.gather_lanes(mine(10, 1))]
    return [*landed, *sums, *gathered, *play_rows(exchange, lambda module: mine(module, 1)[:, 0].contiguous().numpy())]


def play_rows(exchange, mine):
    """The same for one token's rows, as arrays; a single lane's are a plain vector."""
    rows = {module: mine(module) for module in (11, 12, 13, 14)}
    rows = {module: x[0] if len(x) == 1 else x for module, x in rows.items()}
    exchange.post_rows(0, rows[11])
    exchange.post_rows(1, rows[12])
    landed = [exchange.land_rows(0), exchange.land_rows(1)]
    head = [exchange.sum_rows(rows[13]), exchange.gather_rows(rows[14])]
    return [torch.from_numpy(x.copy()) for x in (*landed, *head)]


def play_as_rank(rank, block, lanes, ranks, kind, meeting):
    torch.set_num_threads(1)
    status = Status(block, ranks, MODULES)
    spec = {
        "rank": rank, "ranks": ranks, "lanes": lanes, "modules": MODULES, "exchange": kind, "slots": SLOTS,
        "words": 2 * 23, "limit_s": 30.0, "meeting": meeting,
    }  # fmt: skip
    exchange = new_exchange(spec, block, status)
    kinds = {"mailbox": MailboxExchange, "gloo": DistributedExchange}
    assert type(exchange) is kinds[kind]
    share = lanes // ranks
    results = play(exchange, lambda module, s=3: partial(lanes, module, s)[rank * share : (rank + 1) * share])
    waits, again = exchange.take_waits(), exchange.take_waits()
    assert min(waits) >= 0 and again == (0.0, 0.0)
    return [x.numpy() for x in results], getattr(getattr(exchange, "mailbox", None), "posted", None)


@functools.cache
def of_one_process(lanes):
    def row(module):
        return partial(lanes, module, 1)[:, 0]

    return [
        *(tree_sum(partial(lanes, module)) for module in (0, 3, 2, 1)), tree_sum(partial(lanes, 7, 11)),
        tree_sum(partial(lanes, 8, 1)), partial(lanes, 9, 11), partial(lanes, 10, 1),
        *(tree_sum(row(module)) for module in (11, 12, 13)), row(14).flatten(),
    ]  # fmt: skip


def as_ranks(kind, lanes, ranks, folder):
    block = SharedBlock.create(Status.num_bytes(ranks) + mailbox_bytes(ranks, SLOTS, 2 * 23))
    return run_ranks(ranks, play_as_rank, block, lanes, ranks, kind, str(folder / "store"))


@pytest.mark.parametrize(("kind", "lanes", "ranks"), KINDS)
def test_every_rank_lands_the_bits_of_one_process(kind, lanes, ranks, tmp_path):
    expected = of_one_process(lanes)
    for results, _ in as_ranks(kind, lanes, ranks, tmp_path):
        assert len(results) == len(expected)
        for got, wanted in zip(results, expected, strict=True):
            assert torch.equal(torch.from_numpy(got), wanted)


def test_what_is_larger_than_a_slot_travels_in_as_many_messages_as_it_needs(tmp_path):
    (_, posted), (_, other) = as_ranks("mailbox", 8, 2, tmp_path)
    # 4 posts; sums of 77 and 7 numbers at 46 a message, gathers of 77 and 7 at 46 // 4 lanes = 11; 4 of rows.
    assert posted == other == 4 + math.ceil(77 / 46) + 1 + math.ceil(77 / 11) + 1 + 4


def test_one_rank_alone_lands_its_own_sums_and_waits_for_nobody():
    lonely = LocalExchange()
    results = play(lonely, functools.partial(partial, 8))
    assert all(torch.equal(got, wanted) for got, wanted in zip(results, of_one_process(8), strict=True))
    assert lonely.take_waits() == (0.0, 0.0)


def test_one_rank_alone_has_no_link_whose_latency_could_be_set():
    LocalExchange().set_latency(0.0)
    with pytest.raises(ValueError, match="needs at least 2 ranks"):
        LocalExchange().set_latency(1e-6)


def wait_in_vain(rank, block, kind, meeting):
    """Rank 0 lands what rank 1 never sends, at module 3; the others just stay for a while."""
    spec = {
        "rank": rank, "ranks": 2, "lanes": 2, "modules": MODULES, "exchange": kind, "slots": SLOTS,
        "words": 46, "limit_s": 0.5, "meeting": meeting,
    }  # fmt: skip
    exchange = new_exchange(spec, block, Status(block, 2, MODULES))
    if kind == "gloo":
        torch.distributed.barrier()
    if rank == 1:
        time.sleep(1.5)
        return None
    exchange.at(3)
    exchange.post(3, partial(2, 3)[:1])
    try:
        exchange.land(3)
    except WaitTimeout as error:
        return str(error), error.peer


@pytest.mark.parametrize("kind", ["mailbox", "gloo"])
def test_a_partial_that_never_comes_is_named_by_layer_and_module(kind, tmp_path):
    block = SharedBlock.create(Status.num_bytes(2) + mailbox_bytes(2, SLOTS, 46))
    text, peer = run_ranks(2, wait_in_vain, block, kind, str(tmp_path / "store"))[0]
    assert "the partial of layer 1 feed-forward" in text
    assert peer == 1


def test_waits_at_the_head_are_told_apart_from_waits_for_partials():
    block = SharedBlock.create(Status.num_bytes(2) + mailbox_bytes(2, SLOTS, 46))
    waits = run_ranks(2, wait_on_purpose, block)
    # A rank that comes late waits less, and the other more: only both together wait twice the latency a message.
    assert sum(module_wait for module_wait, _ in waits) >= 2 * 3 * LATENCY_S * 0.8
    assert sum(head_wait for _, head_wait in waits) >= 2 * 2 * LATENCY_S * 0.8
    assert all(sum(pair) < HANDLED_S for pair in waits)


def wait_on_purpose(rank, block):
    spec = {"rank": rank, "ranks": 2, "lanes": 2, "exchange": "mailbox", "slots": SLOTS, "words": 46, "limit_s": 9.0}
    exchange = new_exchange(spec, block, Status(block, 2, MODULES))
    exchange.sum_lanes(partial(2, 0)[:1])
    exchange.take_waits()
    exchange.set_latency(LATENCY_S)
    for module in range(3):
        exchange.post(module, partial(2, module)[:1])
        exchange.land(module)
    exchange.sum_lanes(partial(2, 4)[:1])
    exchange.gather_lanes(partial(2, 5)[:1])
    return exchange.take_waits()
