"""A plan's report as tables: the phases of a token, predicted times by phase, and the schedules side by side."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

PART_NAMES = {
    "stream_us": "streaming",
    "uneven_us": "uneven work",
    "sync_us": "syncs",
    "wait_us": "waiting for peers",
    "fixed_us": "head and draw",
}


def print_plan(report: dict[str, Any], console: Console) -> None:
    """Prints a `plan_report`: phases first, then predictions by phase and by part, then every assumption."""
    console.print(_phases(report))
    console.print(_times(report))
    console.print(_schedules(report))
    console.print("Syncs of other lengths, us/token:", highlight=False)
    for text, row in report["schedules"].items():
        line = ", ".join(f"{sync} us: {total:,.0f}" for sync, total in row["sensitivity_us"].items())
        console.print(f"  {text}: {line}", highlight=False)
    console.print("Assumed (nothing here is measured):", highlight=False)
    for sentence in report["assumptions"]:
        console.print(f"  - {sentence}", highlight=False)


def _title(report: dict[str, Any]) -> str:
    machine, programs = report["machine"], report["programs"]
    return (
        f"{machine['count']} x {machine['name']}, {report['ranks']} ranks of {programs['count']} programs "
        f"({programs['source']}), {report['dtype']}, context {report['context']}"
    )


def _phases(report: dict[str, Any]) -> Table:
    """What a phase is: its work and who does it, bytes, and signals; the same for every schedule."""
    table = Table(title=f"Phases of a token on each rank: {_title(report)}")
    words = ("phase", "of", "waits for", "signals")
    for column in ("phase", "a token", "items", "of", "programs", "each", "weights", "cache", "even", *words[2:]):
        table.add_column(column, justify="left" if column in words else "right", no_wrap=column == "phase")
    for row in next(iter(report["schedules"].values()))["phases"]:
        share = row["even_share"]
        signals = f"{row['signals']} +{row['arrivals']}" if row["signals"] else "-"
        table.add_row(
            row["name"], str(row["per_token"]), str(row["items"]), row["item"], str(row["working_programs"]),
            str(row["items_of_the_busiest_program"]), _size(row["weight_bytes"]), _size(row["cache_bytes"]),
            "-" if share is None else f"{share:.0%}", row["waits_for"] or "-", signals,
        )  # fmt: skip
    return table


def _times(report: dict[str, Any]) -> Table:
    """Microseconds a token by phase, for each schedule, with messages sent and landed."""
    table = Table(title="Predicted us/token by phase, not measured: in all, waiting for peers, messages sent/landed")
    table.add_column("phase")
    found = report["schedules"]
    for text in found:
        for column in (text, "waits", "msgs"):
            table.add_column(column, justify="right")
    for rows in zip(*(row["phases"] for row in found.values()), strict=True):
        cells = [(f"{r['total_us']:,.1f}", f"{r['us']['wait_us']:,.1f}", f"{r['sends']}/{r['lands']}") for r in rows]
        table.add_row(rows[0]["name"], *(cell for three in cells for cell in three))
    totals = [(f"{row['total_us']:,.1f}", f"{row['parts_us']['wait_us']:,.1f}", "") for row in found.values()]
    table.add_row("token", *(cell for three in totals for cell in three), style="bold")
    return table


def _schedules(report: dict[str, Any]) -> Table:
    """One column a schedule: where its time goes, and what it syncs, sends and keeps."""
    table = Table(title="Schedules side by side")
    table.add_column("")
    found, published = report["schedules"], report["published"]
    for text, row in found.items():
        table.add_column(text if row["schedule"] == text else f"{text} ({row['schedule']})", justify="right")

    def add(name: str, cells: list[str]) -> None:
        table.add_row(name, *cells)

    rows = list(found.values())
    for part, name in PART_NAMES.items():
        add(f"{name}, us", [f"{row['parts_us'][part]:,.1f}" for row in rows])
    add("token, us", [f"{row['total_us']:,.0f}" for row in rows])
    add("token if work were even, us", [f"{row['even_us']:,.0f}" for row in rows])
    add("tokens/s", [f"{row['tokens_per_second']:,.0f}" for row in rows])
    add("infer cost says, us", [f"{row['infer_cost_us']:,.0f}" for row in rows])
    if published is not None:
        add(f"published, us ({published['source']})", [f"{published['us']:,.0f}"] * len(rows))
    add("floor at nominal bandwidth, us", [f"{report['floor_us']:,.0f}"] * len(rows))
    add("syncs a layer / a token", [f"{row['syncs_per_layer']} / {row['syncs_per_token']}" for row in rows])
    add("messages a token", [str(row["messages"]) for row in rows])
    add("bytes of one to a peer", [f"{row['message_bytes']:,}" for row in rows])
    add("bytes of logits to a peer", [f"{row['logit_bytes']:,}" for row in rows])
    add("generations of the ring", [str(row["ring_generations"]) for row in rows])
    add("mailboxes of a rank", [_size(row["mailbox_bytes"]) for row in rows])
    return table


def _size(count: float) -> str:
    """Bytes in a unit that reads well."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B" if count else "-"
