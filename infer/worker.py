"""One rank's process: loads its lanes, then serves requests that come over its control connection.

Started by laneformer.infer.ranks as `python -m laneformer.infer.worker FD`; never by hand. Messages are JSON, tensors
follow as raw bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laneformer.infer.shared_memory import BUSY, IDLE, STAGE, SharedBlock, Status

if TYPE_CHECKING:
    from laneformer.infer.runners import EagerRunner

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serves until told to stop, or until the parent is gone."""
    connection = Connection(int(sys.argv[1]))
    spec = json.loads(connection.recv_bytes())
    tie_to_parent(spec["parent"])
    try:
        Worker(connection, spec).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
    except BaseException as error:
        report_failure(connection, error)
        os._exit(1)
    # Nothing is left to save, and tearing torch down takes most of a second.
    os._exit(0)


def tie_to_parent(parent: int) -> None:
    """Leaves Ctrl-C to the parent, and dies with it however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def report_failure(connection: Connection, error: BaseException) -> None:
    """Tells the parent why this rank ends; a parent that is gone does not hear it."""
    message = {"event": "error", "kind": type(error).__name__, "text": str(error), "peer": getattr(error, "peer", None)}
    with contextlib.suppress(OSError):
        connection.send_bytes(json.dumps(message).encode())


class Worker:
    """A rank: its runner and its end of the control connection."""

    def __init__(self, connection: Connection, spec: dict[str, Any]) -> None:
        self.connection, self.spec, self.rank = connection, spec, spec["rank"]
        block = SharedBlock(spec["block_fd"], spec["block_size"])
        self.status = Status(block, spec["ranks"], spec["modules"])
        self.row = self.status.row(self.rank)
        if spec["cores"]:
            os.sched_setaffinity(0, spec["cores"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            self.runner = self._build(block)
        notes = self.place.notes(self.exchange_name) + [str(w.message) for w in caught if w.filename == __file__]
        self.row[STAGE] = IDLE
        self.send(
            event="ready",
            runner=self.runner.name,
            notes=notes,
            weight_bytes=self.runner.forward.weights.num_bytes,
            streamed_bytes=self.runner.forward.weights.streamed_bytes,
            loading_bytes=self.loading_bytes,
            device=self.place.name,
            exchange=self.exchange_name,
        )

    def _build(self, block: SharedBlock) -> EagerRunner:
        import torch

        from laneformer.infer.device import memory_errors, place, take
        from laneformer.infer.exchange import new_exchange
        from laneformer.infer.faults import Fault, plant
        from laneformer.infer.runners import make_runner
        from laneformer.infer.weights import RankWeights
        from laneformer.schedule import Schedule

        spec = self.spec
        torch.set_num_threads(spec["threads"])
        self.place = place(spec["device"], self.rank, spec["ranks"])
        self.exchange_name = spec["exchange"] = self.place.exchange(spec["exchange"]) if spec["ranks"] > 1 else "none"
        take(self.place)
        device = self.place.device
        share = spec["lanes"] // spec["ranks"]
        lanes = range(self.rank * share, (self.rank + 1) * share)
        dtype = getattr(torch, spec["dtype"]) if spec["dtype"] else None
        before = peak_memory()
        with memory_errors(self.place, "the weights of this rank"):
            weights = RankWeights.load(spec["folder"], list(lanes), dtype, device)
        self.loading_bytes = peak_memory() - before
        exchange = new_exchange(spec, block, self.status, device)
        if spec["fault"] and spec["fault"]["rank"] == self.rank:
            plant(exchange, Fault(**spec["fault"]))
        schedules = tuple(dict.fromkeys(Schedule.parse(text, weights.config) for text in spec["schedules"]))
        with memory_errors(self.place, f"the cache of {spec['capacity']} positions and a decode step"):
            return make_runner(
                spec["runner"], weights, exchange, spec["capacity"], schedules, self.rank, self._peer_words(block),
                spec["limit_s"],
            )  # fmt: skip

    def _peer_words(self, block: SharedBlock) -> Any:
        """What gives the persistent kernel all ranks' memory: the block on CPUs, symmetric memory for a GPU a rank."""
        from laneformer.infer.peer_memory import in_block, on_gpus

        spec = self.spec
        if self.place.kind == "cpu":
            return lambda words: in_block(block, spec["peer_offset"], spec["peer_words"], spec["ranks"])
        if self.exchange_name == "nccl":
            return lambda words: on_gpus(words, self.place.device)
        return None

    def send(self, **message: Any) -> None:
        """One JSON message to the parent."""
        self.connection.send_bytes(json.dumps(message).encode())

    def serve(self) -> None:
        """Carries out requests until `stop`."""
        operations = {"generate": self.generate, "logits": self.logits, "read": self.read, "memory": self.memory}
        while True:
            message = json.loads(self.connection.recv_bytes())
            operation = message.pop("op")
            if operation == "stop":
                return
            self.row[STAGE] = BUSY if operation in ("generate", "logits") else IDLE
            operations[operation](**message)
            self.row[STAGE] = IDLE

    def generate(self, request: dict[str, Any], stream: bool) -> None:
        """Decodes a request; rank 0 sends the tokens, as they come or all at the end; every rank sends its waits."""
        from laneformer.infer.engine import generate
        from laneformer.infer.request import request_from

        tokens = []
        for token in generate(self.runner, request_from(request), self._stop_test(request["stop_texts"])):
            tokens.append(token)
            if stream and self.rank == 0:
                self.send(event="token", **vars(token))
        rest = [] if stream or self.rank else [vars(token) for token in tokens]
        waits = [token.wait_s for token in tokens]
        self.send(event="done", tokens=rest, wait_s=waits, head_wait_s=[token.head_wait_s for token in tokens])

    def _stop_test(self, stops: list[str]) -> Any:
        if not stops:
            return None
        from laneformer.infer.tokenizer import StopTexts, Text

        return StopTexts(Text.from_folder(self.spec["folder"]), stops).found

    def logits(self, tokens: list[int], schedule: str, prefill: int) -> None:
        """Rank 0 sends the logits at every position, float32 bytes [S, V]; the others say that they are done."""
        from laneformer.infer.engine import all_logits
        from laneformer.schedule import Schedule

        self.runner.set_latency(0.0)
        logits_SV = all_logits(self.runner, tokens, Schedule.parse(schedule, self.runner.config), prefill)
        self.send(event="done", shape=list(logits_SV.shape))
        if self.rank == 0:
            self.connection.send_bytes(logits_SV.numpy().tobytes())

    def read(self, rounds: int) -> None:
        """Seconds that only reading this rank's streamed weights takes, each round."""
        from laneformer.infer.bandwidth import read_weights

        self.send(event="done", seconds=[read_weights(self.runner.forward.weights) for _ in range(rounds)])

    def memory(self) -> None:
        """The peak of this process's resident memory, bytes."""
        self.send(event="done", peak_bytes=peak_memory())


def peak_memory() -> int:
    """Peak resident bytes of this process."""
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage starts from the peak of the process that started this one.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
