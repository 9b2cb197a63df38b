"""Memory that ranks write into each other's is tried before it is trusted; a shim plays GPUs' symmetric memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from forked import run_ranks

from laneformer.infer.peer_memory import PROBE_WORDS, PeerMemoryError, in_block, on_gpus, probe
from laneformer.infer.shared_memory import SharedBlock

WORDS = 128
CPU = torch.device("cpu")


class Handle:
    """A rendezvous as torch's symmetric memory gives it; `lost` ranks' memory cannot really be written to."""

    def __init__(self, rows, lost):
        self.rows, self.lost = rows, lost

    def get_buffer(self, rank, sizes, dtype):
        assert (sizes, dtype) == ((WORDS + PROBE_WORDS,), torch.int32)
        return torch.zeros(sizes, dtype=dtype) if rank in self.lost else self.rows[rank]


def rank_with_shim(rank, block, meeting, lost, refuses):
    """What one of two ranks gets: its view of both memories after writing its number into each, or the error."""
    import torch.distributed._symmetric_memory as symmetric

    rows = in_block(block, 0, WORDS + PROBE_WORDS, 2)

    def rendezvous(buffer, group):
        # As in torch, nobody returns before all have come.
        dist.barrier()
        return Handle(rows, lost)

    def empty(count, dtype, device):
        if rank in refuses:
            raise RuntimeError("no fabric here\nand more")
        return rows[rank]

    symmetric.empty, symmetric.rendezvous = empty, rendezvous
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        peers = on_gpus(WORDS, CPU, limit_s=0.5)
    except PeerMemoryError as error:
        return str(error)
    assert [len(peer) for peer in peers] == [WORDS, WORDS]
    for peer in peers:
        peer[rank] = 7 + rank
    dist.barrier()
    return [peer[:3].tolist() for peer in peers]


def outcome(tmp_path, lost=(), refuses=()):
    block = SharedBlock.create(4 * 2 * (WORDS + PROBE_WORDS))
    return run_ranks(2, rank_with_shim, block, tmp_path / "meeting", lost, refuses)


def test_both_ranks_write_into_both_memories(tmp_path):
    assert outcome(tmp_path) == [[[7, 8, -1], [7, 8, -1]]] * 2


def test_a_pair_whose_words_are_lost_is_an_error_on_all_ranks(tmp_path):
    first, second = outcome(tmp_path, lost=(1,))
    assert first == "another pair of GPUs cannot"
    assert second == "what ranks [0] wrote into rank 1's memory did not arrive"


def test_a_rank_that_has_no_such_memory_is_an_error_on_all_ranks(tmp_path):
    # The other rank must not wait for one that never comes to the rendezvous.
    assert outcome(tmp_path, refuses=(1,)) == ["another rank has no memory to share", "no fabric here"]


def test_ranks_see_each_others_words_in_a_block():
    block = SharedBlock.create(64 + 4 * 2 * 16)
    first, second = in_block(block, 64, 16, 2), in_block(block, 64, 16, 2)
    first[1][3] = 7
    assert second[1].tolist() == [0, 0, 0, 7] + [0] * 12
    assert second[0].tolist() == [0] * 16
    block.close()


def test_a_probe_names_the_ranks_whose_words_do_not_come():
    areas = [torch.full((8,), -1, dtype=torch.int32) for _ in range(3)]
    assert probe(areas, 0, limit_s=0.0) == [1, 2]
    assert probe(areas, 2, limit_s=0.0) == [1]
    assert probe(areas, 1, limit_s=0.0) == []
