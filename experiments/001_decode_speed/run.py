"""Measures what experiments/001 claims and writes results.json, bench.json and bench.png beside this file.

Each part can be run alone: `python experiments/001_decode_speed/run.py mailbox peers`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from laneformer import LaneConfig
from laneformer.infer.bench import BenchSettings, run_bench
from laneformer.infer.figure import draw
from laneformer.infer.mailbox import Mailbox, mailbox_bytes
from laneformer.infer.ranks import RankError, RankSettings
from laneformer.infer.report import commit, cpu_name
from laneformer.infer.request import Request
from laneformer.infer.session import Session
from laneformer.infer.shared_memory import SharedBlock, Status
from laneformer.random_weights import write_random_checkpoint

HERE = Path(__file__).parent
WORDS_16_KIB = 4096
SLOTS = 4
MODULES = 16


def spread(values: list[float] | np.ndarray) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    low, median, high = (float(v) for v in np.percentile(values, (10, 50, 90)))
    return {"median": median, "p10": low, "p90": high}


def all_reduce_times(rank: int, block_fd: int, size: int, meeting: str, rounds: int, out: Any) -> None:
    """One rank of the comparison: the sum of 16 KiB over 2 ranks by mailbox and by gloo, in turn."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    block = SharedBlock(block_fd, size)
    mailbox = Mailbox(block, Status(block, 2, MODULES), rank, 2, SLOTS, WORDS_16_KIB, limit_s=60)
    own = np.random.default_rng(rank).standard_normal(WORDS_16_KIB).astype(np.float32)
    other, tensor = np.empty_like(own), torch.from_numpy(own.copy())
    times: dict[str, list[float]] = {"mailbox": [], "gloo": []}
    for _ in range(rounds):
        for _ in range(100):
            began = time.perf_counter()
            mailbox.take(mailbox.post(own), 1 - rank, other)
            np.add(own, other, out=other)
            times["mailbox"].append((time.perf_counter() - began) * 1e6)
        for _ in range(30):
            tensor.copy_(torch.from_numpy(own))
            began = time.perf_counter()
            dist.all_reduce(tensor)
            times["gloo"].append((time.perf_counter() - began) * 1e6)
        assert np.allclose(tensor.numpy(), other)
    dist.destroy_process_group()
    if rank == 0:
        out.send(times)


def mailbox(folder: str) -> dict[str, Any]:
    """16 KiB among 2 ranks: the mailbox against gloo's all-reduce, microseconds."""
    context = multiprocessing.get_context("fork")
    size = Status.num_bytes(2) + mailbox_bytes(2, SLOTS, WORDS_16_KIB)
    block = SharedBlock.create(size)
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (block.fd, size, f"{scratch}/store", 20, theirs)
        ranks = [context.Process(target=all_reduce_times, args=(rank, *arguments)) for rank in range(2)]
        for process in ranks:
            process.start()
        times = ours.recv()
        for process in ranks:
            process.join()
    result = {name: spread(values) for name, values in times.items()}
    return {**result, "gloo_over_mailbox": result["gloo"]["median"] / result["mailbox"]["median"]}


def links(folder: str) -> dict[str, Any]:
    """The four schedules over link latencies, 2 ranks; also writes bench.json and bench.png."""
    # Many short rounds: the machine's speed drifts, and only what ran side by side is compared.
    settings = BenchSettings(folder, ranks=(2,), latencies_us=(0, 50, 100, 200, 300, 500), new_tokens=24, rounds=15)
    result = run_bench(settings, say)
    (HERE / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, HERE / "bench.png")
    return {"figure": "bench.png", "document": "bench.json"}


def hiding(folder: str) -> dict[str, Any]:
    """Three schedules at 300 us in many short turns, for the machine's speed drifts by more than what is compared."""
    settings = BenchSettings(
        folder, ranks=(2,), schedules=("tensor-parallel", "delayed:4", "silent"), latencies_us=(300,),
        prompt_tokens=16, new_tokens=16, rounds=60,
    )  # fmt: skip
    result = run_bench(settings, say)
    tp, late, bound = result["results"]

    def waits(row: dict[str, Any]) -> float:
        return row["wait_us_per_token"] + row["head_wait_us_per_token"]

    return {
        "wait_us_per_token": {row["schedule"]: row["wait_us_per_token"] for row in result["results"]},
        "head_wait_us_per_token": {row["schedule"]: row["head_wait_us_per_token"] for row in result["results"]},
        "waiting_gone": 1 - late["wait_us_per_token"] / tp["wait_us_per_token"],
        "waiting_gone_with_head": 1 - waits(late) / waits(tp),
        "delayed_over_silent": spread(np.array(bound["round_itl_ms"]) / np.array(late["round_itl_ms"])),
        "delayed_over_tensor_parallel": spread(np.array(tp["round_itl_ms"]) / np.array(late["round_itl_ms"])),
    }


def peers(folder: str) -> dict[str, Any]:
    """One request, two cores, float16: this against transformers in the same run."""
    settings = BenchSettings(
        folder, ranks=(1, 2), schedules=("tensor-parallel", "delayed:4"), new_tokens=32, rounds=12,
        against=("hf-generate", "hf-compiled"),
    )  # fmt: skip
    result = run_bench(settings, say)
    (HERE / "peers.json").write_text(json.dumps(result, indent=1) + "\n")
    speed = {(row["schedule"], row["runner"], row["ranks"]): row for row in result["results"]}
    own = speed["delayed:4", "compiled", 2]

    def over(peer: str) -> dict[str, float]:
        return spread(np.array(speed["dense", peer, 1]["round_itl_ms"]) / np.array(own["round_itl_ms"]))

    return {
        "tokens_per_s": {f"{s} {r} {n}": row["tokens_per_s"] for (s, r, n), row in speed.items()},
        "over_hf_generate": over("hf-generate"),
        "over_hf_compiled": over("hf-compiled"),
        "share_of_floor": own["share_of_floor"],
        "share_of_floor_hf_compiled": speed["dense", "hf-compiled", 1]["share_of_floor"],
    }


def types(folder: str) -> dict[str, Any]:
    """bfloat16 against float16, interleaved: inter-token milliseconds of delayed:4 on 2 ranks."""
    request = Request(tuple(range(64)), 48, schedule="delayed:4", ignore_end=True)
    times: dict[str, list[float]] = {"float16": [], "bfloat16": []}
    shared = {"ranks": 2, "schedules": ("delayed:4",), "runner": "compiled", "capacity": 128}
    with (
        Session(RankSettings(folder, dtype="float16", **shared)) as half,
        Session(RankSettings(folder, dtype="bfloat16", **shared)) as brain,
    ):
        for _ in range(9):
            for name, session in (("float16", half), ("bfloat16", brain)):
                times[name].append(float(np.median(np.diff(session.timed(request).at_s))) * 1e3)
    ratios = np.array(times["bfloat16"]) / np.array(times["float16"])
    return {**{name: spread(values) for name, values in times.items()}, "bfloat16_over_float16": spread(ratios)}


def memory(folder: str) -> dict[str, Any]:
    """What a rank of two holds, as a share of the checkpoint's bytes."""
    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    with Session(RankSettings(folder, ranks=2)) as session:
        return {
            "checkpoint_bytes": size,
            "weights_share": [held / size for held in session.weight_bytes],
            "peak_growth_while_loading_share": [grown / size for grown in session.loading_bytes],
        }


def killed(folder: str) -> dict[str, Any]:
    """Seconds from killing (or stopping) a rank in mid-decode to the error, and what the error says."""
    result = {}
    for name, number in (("SIGKILL", signal.SIGKILL), ("SIGSTOP", signal.SIGSTOP)):
        with Session(RankSettings(folder, ranks=2, schedules=("delayed:4",))) as session:
            victim, struck = session.process_ids[1], [0.0]

            def strike(victim: int = victim, number: int = number, struck: list[float] = struck) -> None:
                struck[0] = time.monotonic()
                os.kill(victim, number)

            threading.Timer(1.0, strike).start()
            try:
                for _ in session.generate(Request((1, 2, 3), 2000, schedule="delayed:4", ignore_end=True)):
                    pass
            except (RankError, ValueError) as error:
                result[name] = {"seconds": time.monotonic() - struck[0], "error": str(error)}
    return result


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    part.__name__: part for part in (mailbox, links, hiding, peers, types, memory, killed)
}


def main() -> None:
    """Runs the parts named on the command line, all by default."""
    chosen = sys.argv[1:] or list(PARTS)
    # Asked once: writing the first part's numbers changes the tree.
    source = commit()
    path = HERE / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        write_random_checkpoint(LaneConfig.preset("small"), scratch)
        for name in chosen:
            say(f"== {name}")
            results[name] = {"commit": source, "machine": cpu_name(), **PARTS[name](scratch)}
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(json.dumps({name: results[name]}, indent=1), flush=True)


if __name__ == "__main__":
    main()
