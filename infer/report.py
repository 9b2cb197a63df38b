"""A finished comparison as one JSON document (docs/bench.schema.json) and as a table for people."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from laneformer.infer.bench import Bench, Samples, Variant, usable_cores
from laneformer.infer.peers import PEERS

SCHEMA_VERSION = 1


def document(bench: Bench) -> dict[str, Any]:
    """Everything measured, with what is needed to read it."""
    settings = bench.settings
    return {
        "schema_version": SCHEMA_VERSION,
        "environment": environment(bench),
        "settings": {**asdict(settings), "folder": Path(settings.folder).name, "capacity": bench.capacity},
        "model": asdict(bench.config),
        "gates": {
            name: {"error": verdict.error, "tolerance": verdict.tolerance, "reference": verdict.reference}
            for name, verdict in bench.gates.items()
        },
        "notes": bench.notes,
        "results": [row(bench, variant, samples) for variant, samples in ordered(bench)],
    }


def ordered(bench: Bench) -> list[tuple[Variant, Samples]]:
    """Variants in the order they were asked for, each with its samples."""
    return [(variant, bench.samples[variant]) for variant in bench.variants() if variant in bench.samples]


def environment(bench: Bench) -> dict[str, Any]:
    """Machine, versions and commit."""
    sessions = bench.sessions
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": cpu_name(),
        "cores": usable_cores(),
        "device": next(iter(sessions.values())).devices[0],
        "exchange": {str(ranks): session.exchange for ranks, session in sessions.items()},
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": {name: installed(name) for name in ("laneformer", "torch", "numpy", "transformers")},
        "commit": commit(),
        "speculation": None,
        "batch": 1,
        "weight_bytes_per_rank": {str(ranks): session.weight_bytes for ranks, session in sessions.items()},
        "loading_peak_bytes_per_rank": {str(ranks): session.loading_bytes for ranks, session in sessions.items()},
    }


def cpu_name() -> str:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def installed(name: str) -> str | None:
    """An installed distribution's version."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the source tree this runs from, `+changes` where it differs; None for an installed wheel."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def row(bench: Bench, variant: Variant, samples: Samples) -> dict[str, Any]:
    """One variant's numbers. Spreads are the lowest and highest round."""
    pooled_ms = np.concatenate(samples.itl_s) * 1e3
    rounds_s = samples.round_itl_s
    reads_s = np.array(samples.read_s)
    waits = np.array(samples.wait_s) * 1e6
    head_waits = np.array(samples.head_wait_s) * 1e6
    return {
        "schedule": variant.schedule,
        "runner": variant.runner,
        "ranks": variant.ranks,
        "link_latency_us": variant.latency_us,
        "dtype": bench.dtype,
        "prompt_tokens": bench.settings.prompt_tokens,
        "new_tokens": bench.settings.new_tokens,
        "rounds": len(rounds_s),
        "tokens_per_s": float(1 / np.median(rounds_s)),
        "tokens_per_s_spread": {"low": float(1 / rounds_s.max()), "high": float(1 / rounds_s.min())},
        "ttft_ms": float(np.median(samples.ttft_s) * 1e3),
        "itl_ms": {f"p{p}": float(np.percentile(pooled_ms, p)) for p in (50, 90, 99)},
        "round_itl_ms": [float(t) * 1e3 for t in rounds_s],
        "wait_us_per_token": number(np.median(waits.mean(1)), variant),
        "wait_us_per_token_by_rank": None
        if variant.runner in PEERS or np.isnan(waits).any()
        else np.median(waits, 0).tolist(),
        "head_wait_us_per_token": number(np.median(head_waits.mean(1)), variant),
        "streamed_bytes": bench.streamed_bytes(variant),
        "bandwidth_gb_s": {
            "measured": float(bench.streamed_bytes(variant) / np.median(reads_s) / 1e9),
            "nominal": None,
        },
        "floor_ms": float(np.median(reads_s) * 1e3),
        "share_of_floor": float(np.median(reads_s / rounds_s)),
        "ratio_to_tp": ratio(bench, variant, samples),
    }


def number(value: np.floating, variant: Variant) -> float | None:
    """A time, or None for peers and for runners that do not know it."""
    return None if variant.runner in PEERS or np.isnan(value) else float(value)


def ratio(bench: Bench, variant: Variant, samples: Samples) -> dict[str, float] | None:
    """Speed against standard tensor parallelism, round by round; a peer's against that of the most ranks."""
    baseline = variant.baseline
    if variant.runner in PEERS:
        own = [
            v for v in bench.samples if v.runner not in PEERS and v.schedule == baseline.schedule and not v.latency_us
        ]
        if not own:
            return None
        baseline = max(own, key=lambda v: v.ranks)
    if baseline not in bench.samples:
        return None
    ratios = bench.samples[baseline].round_itl_s / samples.round_itl_s
    return {"median": float(np.median(ratios)), "low": float(ratios.min()), "high": float(ratios.max())}


COLUMNS = (
    "schedule", "runner", "ranks", "link us", "tokens/s", "p50 ms", "p90 ms", "p99 ms", "first ms", "wait us",
    "head us", "floor", "x TP (spread)",
)  # fmt: skip


def print_table(result: dict[str, Any], console: Console) -> None:
    """The document's results for people: theory first, then what was measured."""
    env, rows = result["environment"], result["results"]
    model, settings = result["model"], result["settings"]
    console.print(
        f"{model['num_hidden_layers']} layers, hidden {model['hidden_size']}, {model['num_lanes']} lanes, "
        f"{rows[0]['dtype']}, batch 1, no speculation, {settings['prompt_tokens']} tokens in, "
        f"{settings['new_tokens']} out, {settings['rounds']} rounds; {env['machine']}, {env['cores']} cores, "
        f"commit {env['commit'] or 'unknown'}"
    )
    for ranks in dict.fromkeys(row["ranks"] for row in rows if row["runner"] not in PEERS):
        first = next(row for row in rows if row["ranks"] == ranks)
        console.print(
            f"{ranks} rank{'s' if ranks > 1 else ''}: {first['streamed_bytes'] / 1e6:,.0f} MB of weights a token at "
            f"{first['bandwidth_gb_s']['measured']:.1f} GB/s, as measured, take {first['floor_ms']:.2f} ms"
        )
    table = Table(*COLUMNS, title="Decode speed of one request")
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    for entry in rows:
        table.add_row(*cells(entry))
    console.print(table)
    worst = max(gate["error"] / gate["tolerance"] for gate in result["gates"].values())
    console.print(
        f"All {len(result['gates'])} logit checks passed; the largest error is {worst:.0%} of what is allowed."
    )
    console.print(
        "The link latency is emulated: a message is readable only that long after it was posted.", style="dim"
    )
    console.print(
        "Schedules are different functions of the same weights: this compares speed, not quality.", style="dim"
    )
    for note in result["notes"]:
        console.print(f"note: {note}", style="yellow")


def cells(entry: dict[str, Any]) -> list[str]:
    """A row of the table."""
    itl, to_tp = entry["itl_ms"], entry["ratio_to_tp"]
    waits = [entry["wait_us_per_token"], entry["head_wait_us_per_token"]]
    return [
        entry["schedule"],
        entry["runner"],
        str(entry["ranks"]),
        f"{entry['link_latency_us']:g}",
        f"{entry['tokens_per_s']:.1f}",
        *(f"{itl[p]:.2f}" for p in ("p50", "p90", "p99")),
        f"{entry['ttft_ms']:.0f}",
        *("-" if wait is None else f"{wait:,.0f}" for wait in waits),
        f"{entry['share_of_floor']:.0%}",
        "-" if to_tp is None else f"{to_tp['median']:.2f} ({to_tp['low']:.2f}-{to_tp['high']:.2f})",
    ]
