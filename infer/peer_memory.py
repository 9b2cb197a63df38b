"""Memory that the ranks of a run write into each other's: a block shared by processes, or GPUs' symmetric memory.

On GPUs every pair is tried before it is trusted: links may be advertised and still drop what is written over them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laneformer.infer.shared_memory import SharedBlock

# Words behind the mailboxes in which peers try to write.
PROBE_WORDS = 64
PROBE_LIMIT_S = 10.0
NAP_S = 1e-3


class PeerMemoryError(RuntimeError):
    """The ranks cannot write into each other's memory; the message says which cannot reach which."""


class Peers(list[Tensor]):
    """Every rank's words; the rendezvous that they belong to is kept as long as they are."""

    def __init__(self, words: Iterable[Tensor], handle: Any) -> None:
        super().__init__(words)
        self.handle = handle


def in_block(block: SharedBlock, offset: int, words: int, ranks: int) -> list[Tensor]:
    """Each rank's int32 words in a block that the processes of this machine share, from a byte offset on."""
    every = block.array("<i4", offset, ranks * words).reshape(ranks, words)
    return [torch.from_numpy(row) for row in every]


def on_gpus(words: int, device: torch.device, limit_s: float = PROBE_LIMIT_S) -> list[Tensor]:
    """Every rank's int32 words on its own GPU, as this rank reaches them, after each pair has been tried.

    limit_s: how long what a peer writes may take to arrive. Raises PeerMemoryError on all ranks alike.
    """
    import torch.distributed._symmetric_memory as symmetric

    rank, ranks, count = dist.get_rank(), dist.get_world_size(), words + PROBE_WORDS
    buffer, why = attempt(lambda: symmetric.empty(count, dtype=torch.int32, device=device))
    # Who cannot share must not keep the others waiting where all meet.
    agree(buffer is not None, device, why or "another rank has no memory to share")
    buffer.fill_(-1)
    group: Any = dist.group.WORLD
    handle, why = attempt(lambda: symmetric.rendezvous(buffer, group))
    agree(handle is not None, device, why or "another rank could not share its memory")
    peers = [buffer if peer == rank else handle.get_buffer(peer, (count,), torch.int32) for peer in range(ranks)]
    # No probe may arrive before the memory it goes to has been filled, which all ranks have done by now.
    missing = probe([peer[words:] for peer in peers], rank, limit_s)
    said = "" if not missing else f"what ranks {missing} wrote into rank {rank}'s memory did not arrive"
    agree(not missing, device, said or "another pair of GPUs cannot")
    return Peers((peer[:words] for peer in peers), handle)


def attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    """What a call gives, or None and the first line of why it fails."""
    try:
        return call(), ""
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        return None, next(iter(str(error).strip().splitlines()), type(error).__name__)


def probe(areas: list[Tensor], rank: int, limit_s: float = PROBE_LIMIT_S) -> list[int]:
    """Writes a word into every rank's area, and waits for every rank's in its own; the ranks whose did not come."""
    for area in areas:
        area[rank].fill_(1000 + rank)
    wanted = torch.arange(len(areas)) + 1000
    deadline = time.monotonic() + limit_s
    while True:
        found = areas[rank][: len(areas)].cpu()
        missing = (found != wanted).nonzero().flatten().tolist()
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(NAP_S)


def agree(fine: bool, device: torch.device, why: str) -> None:
    """Raises PeerMemoryError on every rank unless all are fine; waits for all of them."""
    votes = torch.tensor(float(fine), device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    if not votes.item():
        raise PeerMemoryError(why)
