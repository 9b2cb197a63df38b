"""The simulator ends what can end, finds what cannot, and shows each missing piece of a handshake under weak memory."""

from __future__ import annotations

import pytest
import torch
from sync_examples import meet, pass_on

from laneformer.kernels.simulate import Deadlock, Launch, ProgramError, simulate

RIGHT = {"N": 64, "BARRIER": True, "RELEASE": "release", "ACQUIRE": "acquire", "SCOPE": "sys"}


def passed_on(seed: int, memory: str, **changes) -> bool:
    """Whether what rank 1 copies is what rank 0 stored."""
    flag, data, out = (torch.zeros(count, dtype=torch.int32) for count in (1, 64, 64))
    simulate([Launch(pass_on, (1,), (flag, data, out, rank), RIGHT | changes, rank) for rank in (0, 1)], seed, memory)
    return torch.equal(out, torch.arange(1, 65, dtype=torch.int32))


def test_a_right_handshake_holds_under_every_seed_tried():
    assert all(passed_on(seed, memory) for seed in range(40) for memory in ("weak", "sequential"))


@pytest.mark.parametrize(
    "change", [{"BARRIER": False}, {"RELEASE": "relaxed"}, {"ACQUIRE": "relaxed"}, {"SCOPE": "gpu"}], ids=str
)
def test_each_missing_piece_shows_within_10_seeds_and_never_in_sequential_memory(change):
    assert not all(passed_on(seed, "weak", **change) for seed in range(10))
    assert all(passed_on(seed, "sequential", **change) for seed in range(10))


def test_scope_gpu_is_enough_within_a_rank():
    for seed in range(20):
        flag, data, out = (torch.zeros(count, dtype=torch.int32) for count in (1, 64, 64))
        sizes = RIGHT | {"SCOPE": "gpu"}
        simulate([Launch(pass_on, (1,), (flag, data, out, role), sizes) for role in (0, 1)], seed, "weak")
        assert torch.equal(out, torch.arange(1, 65, dtype=torch.int32))


def test_programs_of_a_grid_meet():
    count, out = torch.zeros(1, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    simulate([Launch(meet, (5,), (count, out, 5, 3))], 1)
    assert count[0] == 15
    assert out.tolist() == [15] * 5


@pytest.mark.parametrize("memory", ["sequential", "weak"])
def test_a_deadlock_says_who_waits_where_and_for_what(memory):
    count, out = torch.zeros(1, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    with pytest.raises(Deadlock) as error:
        # Three programs wait for a fourth.
        simulate([Launch(meet, (3,), (count, out, 4, 1))], 1, memory)
    text = str(error.value)
    assert "programs 0 of rank 0, 1 of rank 0, 2 of rank 0 wait in meet (sync_examples.py:" in text
    assert "for count of rank 0 at byte 0, which holds 3" in text


def test_the_same_seed_gives_the_same_run_and_another_one_another():
    def switches(seed: int) -> int:
        count, out = torch.zeros(1, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
        return simulate([Launch(meet, (5,), (count, out, 5, 3))], seed, "weak").switches

    assert switches(3) == switches(3)
    assert len({switches(seed) for seed in range(6)}) > 1


def test_an_error_names_its_program():
    with pytest.raises(ProgramError, match="program 0 of rank 4"):
        simulate([Launch(pass_on, (1,), (None, None, None, 0), RIGHT, 4)])


def test_afterwards_kernels_run_as_before():
    count, out = torch.zeros(1, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    simulate([Launch(meet, (2,), (count, out, 2, 1))])
    count.zero_()
    meet[(1,)](count, out, 1, 2)
    assert out[0] == 2


def test_an_unknown_memory_is_refused():
    with pytest.raises(ValueError, match="no memory 'strong'; there are sequential and weak"):
        simulate([], memory="strong")
