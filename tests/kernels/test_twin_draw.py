"""The twin's sampled draws give what the reference draws, in any order; a round that is not waited for is found out."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from laneformer import decode_ops
from laneformer.config import LaneConfig
from laneformer.infer.sampling import Sampling
from laneformer.infer.weights import RankWeights
from laneformer.kernels.plan import DeviceShape, Plan
from laneformer.kernels.plan_phases import check_plan, sampling_syncs, token_phases
from laneformer.kernels.twin import Twin
from laneformer.kernels.twin_draw import Drawing, selects
from laneformer.kernels.twin_ledger import TwinError
from laneformer.random_weights import write_random_checkpoint
from laneformer.schedule import Schedule

CONFIG = LaneConfig(8, 1, 4, 8, 53, num_lanes=2, head_dim=4, torch_dtype="float64")
# The vocabulary of 53 falls into chunks of 8 for 3 programs, or 7 of 20 programs have some.
WARM = {"temperature": 1.3, "seed": 2**40 + 7}
BOTH = Sampling(**WARM, top_k=9, top_p=0.6)


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twin")
    write_random_checkpoint(CONFIG, folder)

    @cache
    def of_ranks(ranks):
        lanes = CONFIG.num_lanes // ranks
        return tuple(RankWeights.load(folder, range(r * lanes, (r + 1) * lanes), torch.float64) for r in range(ranks))

    return of_ranks


def twin_of(held, sampling, ranks=2, programs=3, phases=None):
    shape = DeviceShape(programs, tile=64, block_positions=3)
    plan = Plan(CONFIG, Schedule.parse("delayed:1", CONFIG), ranks, shape, 12)
    return Twin(plan, held(ranks), phases, sampling=sampling)


@pytest.mark.parametrize(("ranks", "programs"), [(1, 1), (2, 3), (1, 20)])
@pytest.mark.parametrize("sampling", [
    Sampling(**WARM), Sampling(**WARM, top_k=4), Sampling(**WARM, top_p=0.5), BOTH,
    Sampling(**WARM, top_k=9, top_p=0.6, repetition_penalty=1.7), Sampling(repetition_penalty=3.0),
    Sampling(**WARM, top_k=1), Sampling(**WARM, top_k=53), Sampling(**WARM, top_p=1e-6),
])  # fmt: skip
def test_the_reference_draws_the_same(held, sampling, ranks, programs):
    drawn, logits_TV = twin_of(held, sampling, ranks, programs).run([5, 41], 6, seed=ranks)
    fed, seen_V = [5, 41, *drawn[1:-1]], torch.zeros(CONFIG.vocab_size, dtype=torch.int8)
    for t, token in enumerate(fed):
        seen_V[token] = 1
        expected = decode_ops.draw(
            logits_TV[t], seen_V, sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty,
            sampling.seed, t + 1,
        )  # fmt: skip
        assert drawn[t] == int(expected)


def test_settings_that_leave_tokens_out_are_those_that_the_kernel_has_rounds_for():
    assert selects(None, 53) == selects(Sampling(top_k=3, top_p=0.5), 53) == ()
    assert selects(Sampling(temperature=1, top_k=53), 53) == ()
    assert selects(BOTH, 53) == ("top-k", "top-p")


@pytest.mark.parametrize("kinds", [(), ("top-k",), ("top-p",), ("top-k", "top-p")])
def test_the_phases_wait_as_often_as_is_said_and_each_wait_is_for_all_that_come_before(kinds):
    plan = Plan(CONFIG, Schedule.parse("delayed:1", CONFIG), 2, DeviceShape(3, tile=64, block_positions=3), 12)
    phases = token_phases(plan, 3, selects=kinds)
    assert sum(phase.waits_for in ("scores", "select") for phase in phases) == sampling_syncs(
        "top-k" in kinds, "top-p" in kinds
    )
    check_plan(plan, phases)


def caught(held, change, seed=0, programs=3):
    """What the twin says of sampled phases that are changed."""

    def phases(plan, position):
        return tuple(change(phase) for phase in token_phases(plan, position, selects=("top-k", "top-p")))

    with pytest.raises(TwinError) as found:
        twin_of(held, BOTH, 2, programs, phases).run([5, 9, 2], seed=seed)
    return str(found.value)


@pytest.mark.parametrize("fault", [{"waits_for": None}, {}])
@pytest.mark.parametrize("name", ["top-k 0", "top-k 1", "top-k 6", "top-p 0", "top-p 3", "keep", "agree"])
def test_a_wait_that_is_too_short_or_left_out_is_found(held, name, fault):
    said = caught(held, lambda p: replace(p, **(fault or {"target": p.target - 1})) if p.name == name else p)
    # Found by who reads too early, or by who then adds to what has been read.
    assert name in said and f"{'BEST' if name in ('top-k 0', 'agree') else 'HISTOGRAMS'} of rank" in said
    assert "without having waited for" in said or "has read already" in said or "nobody has written" in said


def test_a_round_that_does_not_signal_is_found(held):
    said = caught(held, lambda p: replace(p, signals=None, arrivals=0) if p.name == "top-k 4" else p)
    assert "programs wait for one another" in said and "arrivals at select" in said


def test_counts_that_nobody_zeroes_are_found(held, monkeypatch):
    monkeypatch.setattr(Drawing, "rounds", lambda self: [])
    with pytest.raises(TwinError, match=r"adds to HISTOGRAMS of rank . at \(0, 0, 0\), which holds \(0,\)"):
        twin_of(held, BOTH).run([5, 9, 2])


def test_counts_are_not_zeroed_while_somebody_may_read_them(held, monkeypatch):
    keep = Drawing.keep

    def zeroing(self, actor, items):
        keep(self, actor, items)
        if actor.program == 0:
            self.rank.write(actor, "HISTOGRAMS", (actor.token % 2, 1, 6), actor.token)

    monkeypatch.setattr(Drawing, "keep", zeroing)
    for seed in range(4):
        with pytest.raises(TwinError, match=r"(overwrites|reads) HISTOGRAMS of rank . at \(0, 1, 6\) without having w"):
            twin_of(held, BOTH).run([5, 9, 2], seed=seed)
