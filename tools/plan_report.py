"""A plan as tables, with everything that was assumed below them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

ASSUMED = (
    "Parameters are counted on the model itself, built on the meta device, and by arithmetic; both agree.",
    "FLOPs: 6 a weight and token (embedding apart), attention at its mean span, windows counted. Peak: dense 16 bit.",
    "Memory: the fullest device at the peak of a step. Weights, gradients and optimizer state are float32, bfloat16 is "
    "what autocast keeps; activations are what autograd saves of each operation in eager mode (compiled kernels keep "
    "less); masks as a number a pair; logits once in 16 bits and two to four times in float32; reserve for runtime and "
    "fragmentation, assumed.",
    "Speed: the stated MFU holds for the whole step, waiting included. It is an input, not a prediction.",
    "One step: here modules and head compute at the stated MFU, and what is sent comes on top of that. Rings at "
    "nominal bandwidth; messages of a device follow each other; sending costs the computing no time. Partials travel "
    "as float32 sums over a replica's ranks, gradients in float32, hidden behind a step's last backward pass.",
    "Days: without restarts, validation and checkpoints. Cost: the price of an hour as stated, nothing else.",
)


def print_plan(document: dict[str, Any], console: Console) -> None:
    """Prints a document of `plan`: parameters, FLOPs, speed, memory, one step, data, and what was assumed."""
    machine, layout = document["machine"], document["layout"]
    title = f"{document['experiment']} on {machine['count']} x {machine['name']}, schedule {document['schedule']}"
    console.print(two_columns(title, _facts(document)))
    console.print(_parameters(document["parameters"]))
    console.print(_memory(document["memory"], layout))
    console.print(_step(document))
    console.print(_layouts(document))
    if document["data"]:
        console.print(_data(document))
    console.print("Assumed:", highlight=False)
    for line in (*ASSUMED, f"{machine['name']}: {machine['source']}."):
        console.print(f"- {line}", highlight=False, markup=False)


def two_columns(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and values."""
    table = Table(title=title, show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    return table


def _facts(document: dict[str, Any]) -> list[tuple[str, str]]:
    """What is run, for how long, and for how much."""
    layout, flops, speed, published = (document[key] for key in ("layout", "flops", "speed", "published"))
    rows = [
        ("run", f"{document['steps']:,} steps of {layout['tokens_per_step'] / 1e6:.2f} M tokens = "
                f"{_count(document['tokens'])} tokens ({layout['batch']:,} sequences of {layout['sequence']:,})"),
        ("layout", f"{layout['replicas']} replicas ({layout['shard']}) of {layout['lane_ranks']} devices, "
                   f"{layout['lanes_per_rank']} lanes a device; {layout['accumulation']} micro-batches of "
                   f"{layout['micro_batch']} a step, {'recomputed' if layout['recompute'] else 'nothing recomputed'}, "
                   f"{layout['precision']}, {layout['optimizer']}"),
        ("FLOPs", f"{flops['per_token'] / 1e9:.2f} G a token ({flops['per_token_without_attention'] / 1e9:.2f} G "
                  f"without attention), {flops['total']:.3e} in all"),
        ("speed", f"{speed['tokens_per_s']:,.0f} tokens/s at {speed['mfu']:.0%} MFU, "
                  f"{speed['tokens_per_s_and_device']:,.0f} a device; {speed['step_s']:.2f} s a step"),
        ("time", f"{speed['days']:.1f} days, {speed['gpu_hours']:,.0f} device hours"),
        ("cost", f"{speed['cost']:,.0f} at {speed['gpu_hour']:g} an hour"),
    ]  # fmt: skip
    if published is not None:
        rows.append(("published", _published(published)))
    return rows


def _published(published: dict[str, Any]) -> str:
    """The published run in one line."""
    return (
        f"all three runs, {_count(published['tokens'])} tokens, in about {published['days']:g} days on "
        f"{published['machine']}: {published['implied_mfu']:.1%} MFU; at the MFU stated here "
        f"{published['days_here']:.1f} days on this machine"
    )


def _parameters(parameters: dict[str, Any]) -> Table:
    """Parameters by part."""
    names = ("embedding", "attention", "feed_forward", "norms", "head", "total", "a_rank")
    rows = [(name.replace("_", "-" if name != "a_rank" else " "), f"{parameters[name]:,}") for name in names]
    return two_columns("Parameters", rows)


def _memory(memory: dict[str, Any], layout: dict[str, Any]) -> Table:
    """Memory of the fullest device by term."""
    meanings = {
        "weights": "weights", "compute_copy": "weights in the computing type", "gradients": "gradients",
        "optimizer": f"{layout['optimizer']} state", "activations": "activations", "masks": "attention masks",
        "working": "one module at work", "logits": "logits and loss", "messages": "partials in flight",
        "reserve": "reserve", "total": "total", "device": "the device has",
    }  # fmt: skip
    rows = [(text, f"{memory[name] / 1e9:,.2f} GB") for name, text in meanings.items() if memory[name]]
    fits = "fits" if memory["fits"] else "DOES NOT FIT"
    return two_columns(f"Memory of one device ({fits})", rows)


def _step(document: dict[str, Any]) -> Table:
    """One step with each schedule: where its time goes and what passes through a device's links."""
    table = Table(title=f"One step, computing at {document['speed']['mfu']:.0%} MFU (a model, not a measurement)")
    table.add_column("")
    for name in document["step"]:
        table.add_column(name, justify="right")
    steps, layout = list(document["step"].values()), document["layout"]
    seconds = {"compute_s": "computing", "recompute_s": "computing anew",
               "repeated_head_s": "logits that another rank forms too",
               "lane_wait_s": "waiting for lanes", "weights_exposed_s": "waiting for gradients and weights",
               "total_s": "step"}  # fmt: skip
    for key, text in seconds.items():
        if key == "weights_exposed_s" or any(step[key] for step in steps):
            table.add_row(text, *(f"{1e3 * step[key]:,.1f} ms" for step in steps))
    table.add_row("tokens/s", *(f"{step['tokens_per_s']:,.0f}" for step in steps))
    table.add_row("days", *(f"{document['steps'] * step['total_s'] / 86400:.1f}" for step in steps))
    table.add_section()
    for text, values in [*(_lane_rows(steps) if layout["lane_ranks"] > 1 else []), *_weight_rows(steps)]:
        table.add_row(text, *values)
    return table


def _lane_rows(steps: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """What the lanes send: messages, bytes and time on the link, and the time waited in each pass."""
    lanes = [step["lanes"] for step in steps]

    def waited(way: str) -> list[str]:
        return [f"{1e3 * lane[f'{way}_wait_s']:,.2f} of {1e3 * lane[f'{way}_compute_s']:,.1f} ms" for lane in lanes]

    def sent(nbytes: str, seconds: str) -> list[str]:
        return [_sent(lane[nbytes], lane[seconds]) for lane in lanes]

    return [
        ("partials: messages a micro-batch", [f"{lane['messages']}" for lane in lanes]),
        ("partials: one message", sent("message_bytes", "message_s")),
        ("partials: a step", sent("bytes_a_step", "link_s_a_step")),
        ("partials: waited forward, a micro-batch", waited("forward")),
        ("partials: waited backward, a micro-batch", waited("backward")),
        ("partials: hidden by computing", [f"{abs(lane['hidden'] or 0.0):.1%}" for lane in lanes]),
    ]


def _weight_rows(steps: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """What replicas send: gradients, gathered weights, and what the ranks of a replica hold alike."""
    names = {
        "gradient": "gradients, a step",
        "gather": "weights gathered, a step",
        "shared": "norms over lanes, a step",
    }
    found = []
    for key, text in names.items():
        values = [(step["weights"][f"{key}_bytes"], step["weights"][f"{key}_s"]) for step in steps]
        if any(nbytes for nbytes, _ in values):
            found.append((text, [_sent(*value) for value in values]))
    return found


def _sent(nbytes: float, seconds: float) -> str:
    """Bytes through a device's link and the time that takes."""
    size = f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.2f} MB"
    return f"{size}, {1e3 * seconds:,.2f} ms"


def _layouts(document: dict[str, Any]) -> Table:
    """The fastest layout that fits for each number of lanes on a device, with and without the delay's overlap."""
    schedule = document["schedule"]
    table = Table(title="Other layouts of the same step: the fastest that fits, by lanes on a device")
    table.add_column("lanes, shard,\nmicro-batch")
    for column in ("memory", "partials sent", f"waited,\n{schedule}", "waited,\ntensor-parallel", "logits\nrepeated",
                   f"step,\n{schedule}", "step,\ntensor-parallel"):  # fmt: skip
        table.add_column(column, justify="right")
    for row in document["layouts"]:
        name = f"{row['lanes_per_rank']}, {row['shard']}, {row['micro_batch']}"
        times = (row[key] for key in ("lane_wait_s", "blocking_wait_s", "repeated_head_s", "step_s", "blocking_step_s"))
        table.add_row(
            name + (", recomputed" if row["recompute"] else ""),
            f"{row['memory'] / 1e9:.1f} GB",
            _sent(row["lane_bytes"], row["lane_link_s"]) if row["lane_bytes"] else "nothing",
            *(f"{1e3 * seconds:,.1f} ms" for seconds in times),
        )
    return table


def _data(document: dict[str, Any]) -> Table:
    """The data sets of the run, how much of each is read and how often."""
    table = Table(title="Data (weights are means over the run)")
    for column in ("source", "data set", "licence", "weight", "read", "there are", "epochs"):
        table.add_column(column, justify="right" if column in ("weight", "read", "there are", "epochs") else "left")
    for row in document["data"]:
        numbers = (f"{row['weight']:.2%}", _count(row["read"]), _count(row["tokens"]), f"{row['epochs']:.2f}")
        table.add_row(row["name"], f"{row['id']} ({row['config']})", row["licence"], *numbers)
    return table


def _count(tokens: float) -> str:
    """Tokens in a unit that reads well."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if tokens >= scale:
            return f"{tokens / scale:.3g} {unit}"
    return f"{tokens:.0f}"
