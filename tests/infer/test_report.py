"""The document and the table: every number from hand-made samples, so that each can be worked out on paper."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from laneformer import LaneConfig
from laneformer.infer.bench import BenchSettings, Samples, Variant
from laneformer.infer.reference import Verdict
from laneformer.infer.report import cells, document, print_table

TP, SILENT = Variant("tensor-parallel", "eager", 2, 20.0), Variant("silent", "eager", 2, 20.0)
PEER, ALONE = Variant("dense", "hf-generate", 1, 0.0), Variant("tensor-parallel", "eager", 2, 0.0)


def samples(rounds_ms, waits_us=((10, 30),), ttft_ms=(7.0,), reads_ms=(2.0,)):
    """One entry a round: inter-token times, each rank's waits, time to first token, time to read the weights."""
    return Samples(
        itl_s=[np.array(times) * 1e-3 for times in rounds_ms],
        ttft_s=[t * 1e-3 for t in ttft_ms],
        wait_s=[[w * 1e-6 for w in waits] for waits in waits_us],
        head_wait_s=[[2 * w * 1e-6 for w in waits] for waits in waits_us],
        read_s=[t * 1e-3 for t in reads_ms],
    )


MEASURED = {
    TP: samples(
        [[9, 10, 11], [20, 20, 50], [12, 14, 12]], [(10, 30), (40, 60), (20, 20)], (9.0, 5.0, 6.0), (2.0, 5.0, 4.0)
    ),
    SILENT: samples([[5, 5, 5], [4, 5, 6], [8, 8, 9]], [(0, 0)] * 3, (3.0, 4.0, 2.0), (2.0, 5.0, 4.0)),
    ALONE: samples([[3, 3, 3], [6, 6, 6], [4, 4, 4]], [(1, 1)] * 3, (3.0,) * 3, (2.0,) * 3),
    PEER: samples([[30, 31, 29], [30, 30, 30], [60, 60, 60]], [(0,)] * 3, (80.0,) * 3, (2.0,) * 3),
}


@pytest.fixture
def finished(checkpoint):
    """A finished comparison as `document` takes it."""
    session = SimpleNamespace(weight_bytes=[5, 6], loading_bytes=[7, 8], devices=["cpu"] * 2, exchange="mailbox")
    return SimpleNamespace(
        settings=BenchSettings("/some/where/model", schedules=("tensor-parallel", "silent"), rounds=3, prompt_tokens=5),
        config=LaneConfig.from_pretrained(checkpoint()), capacity=64, samples=dict(MEASURED), dtype="float32",
        gates={"a": Verdict(1e-6, 2e-4, "float64"), "b": Verdict(1e-4, 2e-4, "float64")}, notes=["mind the gap"],
        sessions={2: session}, variants=lambda: iter([ALONE, TP, SILENT, PEER]),
        streamed_bytes=lambda variant: 6_000_000,
    )  # fmt: skip


def rows(finished):
    found = document(finished)["results"]
    return {(row["schedule"], row["runner"], row["link_latency_us"]): row for row in found}


def test_a_document_holds_what_is_needed_to_read_it_and_survives_json(finished):
    found = document(finished)
    assert json.loads(json.dumps(found)) is not None
    assert {"schema_version", "environment", "settings", "model", "gates", "notes", "results"} == set(found)
    environment = found["environment"]
    assert {"machine", "cores", "python", "versions", "commit", "speculation", "batch", "device"} <= set(environment)
    assert (environment["speculation"], environment["batch"]) == (None, 1)
    assert environment["weight_bytes_per_rank"] == {"2": [5, 6]}
    assert environment["loading_peak_bytes_per_rank"] == {"2": [7, 8]}
    assert environment["versions"]["torch"].startswith("2.")
    assert found["settings"]["folder"] == "model" and found["settings"]["capacity"] == 64
    assert found["model"]["num_lanes"] == 4 and found["notes"] == ["mind the gap"]
    for row in found["results"]:
        assert {
            "schedule", "runner", "ranks", "link_latency_us", "dtype", "tokens_per_s", "ttft_ms", "itl_ms",
            "wait_us_per_token", "floor_ms", "share_of_floor", "ratio_to_tp",
        } <= set(row)  # fmt: skip
        assert set(row["itl_ms"]) == {"p50", "p90", "p99"} and set(row["ratio_to_tp"]) == {"median", "low", "high"}


def test_speed_is_the_median_of_the_rounds_medians_and_its_spread_the_extreme_rounds(finished):
    row = rows(finished)["tensor-parallel", "eager", 20.0]
    # Medians of the rounds: 10, 20 and 12 ms.
    assert row["tokens_per_s"] == pytest.approx(1000 / 12)
    assert row["tokens_per_s_spread"] == {"low": pytest.approx(50), "high": pytest.approx(100)}
    assert row["ttft_ms"] == pytest.approx(6) and row["rounds"] == 3


def test_percentiles_are_those_of_all_tokens_of_all_rounds(finished):
    row = rows(finished)["tensor-parallel", "eager", 20.0]
    # Sorted: 9 10 11 12 12 14 20 20 50.
    assert row["itl_ms"]["p50"] == pytest.approx(12)
    assert row["itl_ms"]["p90"] == pytest.approx(20 + 0.2 * 30)
    assert row["itl_ms"]["p99"] == pytest.approx(20 + 0.92 * 30)


def test_the_ratio_to_tensor_parallelism_is_formed_within_each_round(finished):
    found = rows(finished)
    # 10/5, 20/5, 12/8: another number than the ratio of the medians, 12/5.
    assert found["silent", "eager", 20.0]["ratio_to_tp"] == {
        "median": pytest.approx(2), "low": pytest.approx(1.5), "high": pytest.approx(4),
    }  # fmt: skip
    assert found["tensor-parallel", "eager", 20.0]["ratio_to_tp"]["high"] == pytest.approx(1)
    # A peer knows no link: it is compared with tensor parallelism at latency 0.
    assert found["dense", "hf-generate", 0.0]["ratio_to_tp"]["median"] == pytest.approx(0.1)


def test_without_tensor_parallelism_there_is_no_ratio(finished):
    del finished.samples[TP], finished.samples[ALONE]
    assert all(row["ratio_to_tp"] is None for row in document(finished)["results"])


def test_waits_are_averaged_over_ranks_and_a_peer_has_none(finished):
    found = rows(finished)
    row = found["tensor-parallel", "eager", 20.0]
    # Round averages 20, 50, 20.
    assert row["wait_us_per_token"] == pytest.approx(20)
    assert row["wait_us_per_token_by_rank"] == [pytest.approx(20), pytest.approx(30)]
    assert row["head_wait_us_per_token"] == pytest.approx(40)
    assert found["silent", "eager", 20.0]["wait_us_per_token"] == 0
    assert found["dense", "hf-generate", 0.0]["wait_us_per_token"] is None


def test_the_floor_is_the_time_to_only_read_the_weights_in_the_same_round(finished):
    row = rows(finished)["tensor-parallel", "eager", 20.0]
    assert row["floor_ms"] == pytest.approx(4)
    # 2/10, 5/20, 4/12.
    assert row["share_of_floor"] == pytest.approx(0.25)
    assert row["bandwidth_gb_s"]["measured"] == pytest.approx(1.5)


def test_the_table_shows_the_numbers_of_the_document(finished):
    found = document(finished)
    silent = cells(next(row for row in found["results"] if row["schedule"] == "silent"))
    assert silent == [
        "silent", "eager", "2", "20", "200.0", "5.00", "8.20", "8.92", "3", "0", "0", "50%", "2.00 (1.50-4.00)"
    ]  # fmt: skip
    shown = io.StringIO()
    print_table(found, Console(file=shown, width=150))
    text = shown.getvalue()
    for part in (
        *silent[:6],
        "All 2 logit checks passed; the largest error is 50%",
        "emulated",
        "mind the gap",
        "6 MB",
    ):
        assert part in text
