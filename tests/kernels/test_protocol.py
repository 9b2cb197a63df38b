"""The kernel's protocol holds under every schedule of programs and weak memory that was tried; planted bugs do not."""

from __future__ import annotations

import pytest
import torch
from planted_bugs import BUGS, RARE, Bug, outcome, seeds_until_caught, tiny_weights
from simulated_ranks import Ranks, broken

from laneformer.infer.sampling import Sampling, draw
from laneformer.kernels.aborts import read_abort

SCHEDULES = ["tensor-parallel", "delayed:1", "delayed:2:early", "ladder", "silent"]


@pytest.mark.parametrize("seed", range(10))
def test_the_true_kernel_gives_the_same_bits_whatever_the_order(seed):
    text = SCHEDULES[seed % len(SCHEDULES)]
    head = ("replicate", "vocab_parallel", "lane")[seed % 3]
    bug = Bug("none", text=text, head=head)
    right, found = outcome(bug, 0, memory="sequential"), outcome(bug, seed)
    assert isinstance(right, torch.Tensor), right
    assert isinstance(found, torch.Tensor), found
    assert torch.equal(found, right)


@pytest.mark.slow
@pytest.mark.parametrize("text", SCHEDULES)
def test_the_true_kernel_is_clean_over_many_seeds(text):
    bug = Bug("none", text=text, tokens=3)
    right = outcome(bug, 0, memory="sequential")
    assert isinstance(right, torch.Tensor), right
    for seed in range(40):
        found = outcome(bug, seed)
        assert isinstance(found, torch.Tensor), (seed, found)
        assert torch.equal(found, right), seed


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug):
    assert seeds_until_caught(bug) is not None


@pytest.mark.slow
def test_a_bug_that_needs_a_rank_a_token_ahead_is_caught():
    # It is about how far ranks run apart, not about memory; with weak memory it takes hundreds of seeds (006).
    assert seeds_until_caught(RARE, "sequential") is not None


@pytest.mark.parametrize(("lanes", "counts"), [(8, (1, 4)), (3, (1, 3))])
def test_any_number_of_ranks_gives_the_same_bits(lanes, counts):
    found = [
        Ranks(tiny_weights(ranks=ranks, lanes=lanes), "delayed:1", 8, 2, tile=64).run(5, 0, 2)[1] for ranks in counts
    ]
    for other in found[1:]:
        assert torch.equal(other, found[0])


@pytest.mark.slow
@pytest.mark.parametrize("text", SCHEDULES)
def test_1_2_4_and_8_ranks_give_the_same_bits_under_every_schedule(text):
    found = [Ranks(tiny_weights(ranks=ranks, lanes=8), text, 8, 2, tile=64).run(5, 0, 3)[1] for ranks in (1, 2, 4, 8)]
    for other in found[1:]:
        assert torch.equal(other, found[0])


def test_draws_with_thresholds_meet_across_programs_and_ranks():
    sampling = Sampling(temperature=1.5, top_k=6, top_p=0.8, seed=7)
    ranks = Ranks(tiny_weights(), "delayed:1", 8, 3, tile=64)
    tokens, logits, _ = ranks.run(5, 0, 2, seed=4, memory="weak", sampling=sampling)
    seen = [5]
    for position, (token, row) in enumerate(zip(tokens, logits.numpy(), strict=True), 1):
        assert token == draw(row, sampling, position, seen)
        seen.append(token)
    found = [memory.tensors["TOKENS"][:2].tolist() for memory in ranks.memories]
    assert found[0] == found[1] == tokens


def test_a_rank_that_is_missing_is_named_and_the_others_are_told():
    ranks = Ranks(tiny_weights(), "tensor-parallel", 8, 2, tile=64)
    ranks.run(5, 0, 3, limit=40, ranks=[0])
    code, rank, _, place, missing = ranks.shared[0].abort[:5].tolist()
    # The first landing is module 0's, in its output phase, of the first token.
    assert (code, rank, place, missing) == (1, 0, 2, 1)
    assert ranks.shared[1].abort[8] == 1
    assert ranks.memories[0].tensors["RESULT"][0] == 1


def test_a_rank_that_was_told_to_stop_does_not_blame_the_model():
    ranks = Ranks(tiny_weights(), "tensor-parallel", 8, 2, tile=64)
    # As if rank 0 had given up before rank 1 began: no partial ever comes, and so no logits.
    ranks.shared[1].abort[8] = 1
    ranks.run(5, 0, 3, limit=40, ranks=[1])
    assert ranks.shared[1].abort[0] == 0
    abort = read_abort(ranks.shared[1].abort.tolist(), ranks.plan, 1)
    assert (abort.kind, abort.culprit) == ("peer", 0)


def test_that_peers_are_told_is_what_that_test_sees():
    told = '                tl.store(p_peer + PEER_WORD, rank + 1, cache_modifier=".wt")'
    with broken(("sync", told, "                pass")) as module:
        ranks = Ranks(tiny_weights(), "tensor-parallel", 8, 2, tile=64)
        ranks.run(5, 0, 3, limit=40, ranks=[0], kernel=module.decode)
    assert ranks.shared[1].abort[8] == 0


def test_a_value_whose_bits_are_the_sentinel_is_sent_as_another_nan():
    weights = tiny_weights()
    # A partial of this NaN goes through every message; without the nudge its readers would wait for ever.
    weights[1].layers[0].down_LOI[:] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    ranks = Ranks(weights, "tensor-parallel", 8, 2, tile=64)
    ranks.run(5, 0, 2, limit=60)
    assert [int(shared.abort[0]) for shared in ranks.shared] == [2, 2]
