"""Plans: what they refuse, that mailboxes are long enough, and that pairwise sums follow the tree over lanes."""

from __future__ import annotations

import pytest
import torch

from laneformer.config import LaneConfig
from laneformer.kernels.plan import DeviceShape, Plan, PlanError, lane_slots, power_of_two, ring_generations, tile_for
from laneformer.ops import tree_sum
from laneformer.schedule import Schedule

SCHEDULES = ["tensor-parallel", "delayed:1", "delayed:3", "delayed:4", "delayed:4:early", "ladder", "silent"]


@pytest.mark.parametrize("lanes", [1, 2, 3, 5, 6, 7, 8, 12])
def test_pairwise_sums_over_slots_are_the_balanced_tree(lanes):
    x_L = torch.randn(lanes, 7, generator=torch.Generator().manual_seed(lanes)) * 1e3
    slots_S = torch.zeros(power_of_two(lanes), 7)
    for lane, slot in enumerate(lane_slots(lanes)):
        slots_S[slot] = x_L[lane]
    while len(slots_S) > 1:
        slots_S = slots_S[::2] + slots_S[1::2]
    assert torch.equal(slots_S[0], tree_sum(x_L))


def is_long_enough(schedule: Schedule, ends: bool, generations: int) -> bool:
    """Whether a slot's last read has surely happened when it is filled again, in the worst case of two ranks.

    The one does nothing before it must, the other everything as soon as it may.
    """
    modules = len(schedule.steps)
    order = [n for n, step in enumerate(schedule.steps) if step.sends] + ([modules] if ends else [])
    sends = [(token, module) for token in range(8) for module in order]

    def read_before(message: tuple[int, int]) -> list[int]:
        token, module = message
        last = [schedule.last_use[m] if m < modules else m for _, m in sends]
        return [i for i, (t, m) in enumerate(sends) if t < token or (t == token and m != module and last[i] < module)]

    # What the reader had surely read when it sent the latest message that the sender has landed.
    return all(
        i - generations in read_before(sends[max(read_before(message))])
        for i, message in enumerate(sends)
        if i >= max(generations, 2 * len(order))
    )


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("text", SCHEDULES)
def test_a_slot_is_filled_again_only_after_its_reader_was_heard_of(text, ends):
    schedule = Schedule.parse(text, LaneConfig(8, 12, 2, 4, 10))
    generations = ring_generations(schedule, ends)
    assert generations >= 4
    assert is_long_enough(schedule, ends, generations)
    # And no longer than it must be.
    assert generations == 4 or not is_long_enough(schedule, ends, generations - 1)


@pytest.mark.parametrize(
    ("rows", "columns"), [(768, 3072), (3072, 384), (1536, 3072), (4000, 3072), (40, 64), (5, 160)]
)
def test_tiles_cover_a_matrix_and_do_not_depend_on_ranks(rows, columns):
    tile = tile_for(rows, columns, DeviceShape(132))
    assert tile.count * tile.rows >= rows > (tile.count - 1) * tile.rows
    assert tile.rows * tile.columns <= 16384
    assert power_of_two(tile.columns) == tile.columns
    assert power_of_two(tile.rows) == tile.rows


def test_the_published_2b_on_8_devices_keeps_nearly_all_programs_busy():
    config = LaneConfig.preset("2b")
    plan = Plan(config, Schedule.parse("delayed:4", config), 8, DeviceShape(132), 4096)
    for tile in plan.tiles.values():
        rounds = -(-tile.count // 132)
        # The share of tile slots that hold work: what the last, partly filled round costs.
        assert tile.of_rows / (rounds * 132 * tile.rows) > 0.7, tile


def test_what_cannot_be_carried_out_is_refused_with_both_numbers():
    config = LaneConfig(8, 2, 4, 8, 10, num_lanes=4)
    schedule = Schedule.tensor_parallel(2)
    with pytest.raises(PlanError, match=r"4 lanes .* 3 ranks"):
        Plan(config, schedule, 3, DeviceShape(2), 16)
    with pytest.raises(PlanError, match="3 layers, the model 2"):
        Plan(config, Schedule.tensor_parallel(3), 1, DeviceShape(2), 16)
    with pytest.raises(PlanError, match=r"context must be 1\.\.4096, got 5000"):
        Plan(config, schedule, 1, DeviceShape(2), 5000)
    with pytest.raises(PlanError, match="programs must be at least 1, got 0"):
        DeviceShape(0)
    with pytest.raises(PlanError, match="16777216"):
        Plan(LaneConfig(8, 2, 4, 8, 1 << 24), schedule, 1, DeviceShape(2), 16)
