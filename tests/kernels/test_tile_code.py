"""Stand-alone tiles compile for GPUs that are not here: no spills, and weights sixteen bytes at a time."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from test_compiled_code import outside

from laneformer.kernels import standalone
from laneformer.kernels.catalogue import ENTRIES, TILES

SCRIPT = Path(__file__).with_name("tile_code.py")
# A tile of 16,384 bfloat16 weights is 8 loads of 16 bytes a thread of 256, before the loop and again in it; one of qkv
# has half of that.
WEIGHT_LOADS = {"matvec": 16, "normed_matvec": 8, "gated_units": 24, "attention_output": 12}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("tiles") / "found.json"
    result = outside(str(SCRIPT), str(out), "sm_90,gfx942", *WEIGHT_LOADS, "draw")
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(out.read_text())


def test_the_catalogue_has_every_tile():
    assert {name for name, _ in inspect.getmembers(standalone, inspect.isfunction)} == set(TILES)
    assert all(f"{tile} of the 2b on 1 of 8 devices" in ENTRIES for tile in TILES)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("tile", WEIGHT_LOADS)
def test_weights_come_sixteen_bytes_at_a_time_and_nothing_spills(found, target, tile):
    assert found[target][tile]["spills"] == 0
    assert found[target][tile]["wide"] >= WEIGHT_LOADS[tile]


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_draw_releases_with_a_barrier(found, target):
    assert found[target]["draw"]["bare"] == []
