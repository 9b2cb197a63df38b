"""The bench of tiles measures every one of them, never passes the interpreter off as a speed, and explains refusals."""

from __future__ import annotations

import inspect
import json

import pytest

from laneformer.kernels import standalone, tile_bench

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
TILES = {name for name, function in inspect.getmembers(standalone, inspect.isfunction)}


def test_the_bench_has_a_row_for_every_tile_and_says_that_it_was_interpreted(tmp_path, capsys):
    out = tmp_path / "tiles.json"
    assert tile_bench.main(["--tiny", "--ranks", "2", "--rounds", "2", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["tiles"]
    assert {row["tile"] for row in rows} == TILES
    assert all(row["interpreted"] for row in rows)
    for row in rows:
        assert 0 < row["low_us"] <= row["median_us"] <= row["high_us"]
        assert row["copies"] >= 2 and row["bytes"] > 0
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median_us"] / 1e3)
    # 2 lanes of the tiny config: gate and up [20, 24] and a norm, float32; streams [24] in, units [10] out.
    units = next(row for row in rows if row["tile"] == "gated_units")
    assert units["bytes"] == 4 * 2 * (20 * 24 + 24 + 24 + 10)
    said = capsys.readouterr().out
    assert said.count("interpreted: no speed") == len(rows)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--preset", "2b", "--device", "cpu", "--dtype", "float16"], "--tiny"),
        (["--preset", "2b", "--device", "cpu"], "Triton's interpreter would take minutes"),
        (["--preset", "3b"], "no preset '3b'"),
        (["--tiny", "--ranks", "3", "--device", "cpu"], "4 lanes cannot be shared equally by 3 ranks"),
        (["--tiny", "--rounds", "0", "--device", "cpu"], "rounds must be at least 1, got 0"),
        (["--tiny", "--dtype", "int8"], "no weight type 'int8'; there are bfloat16"),
        (["--tiny", "--device", "typewriter"], "no device 'typewriter'"),
        (["--tiny", "--device", "meta"], "there is no meta here"),
        (["--tiny", "--json", "/no/such/folder/x.json"], "/no/such/folder"),
    ],
)
def test_the_bench_explains_what_it_cannot_do(given, said, capsys):
    assert tile_bench.main(given) == 2
    assert said in capsys.readouterr().err
