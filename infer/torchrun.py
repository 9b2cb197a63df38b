"""Decoding as one rank of a torchrun job: the same engine, ranks started by torchrun, on one machine or several.

torchrun --nproc-per-node 2 -m laneformer.infer.cli generate checkpoint --prompt-ids 1,2,3
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from laneformer.config import LaneConfig
from laneformer.infer.ranks import RankSettings
from laneformer.infer.request import Request, RequestError, Token, check_request


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class TorchrunSession:
    """This process's rank of a torchrun job, with Session's interface for generating; only rank 0 speaks."""

    def __init__(self, settings: RankSettings) -> None:
        import torch
        import torch.distributed as dist

        from laneformer.infer.device import memory_errors, place, take
        from laneformer.infer.exchange import DistributedExchange, ThroughHost, join_group
        from laneformer.infer.peer_memory import on_gpus
        from laneformer.infer.runners import make_runner
        from laneformer.infer.sum_tree import SumTree
        from laneformer.infer.weights import RankWeights
        from laneformer.schedule import Schedule

        self.config, self.settings = LaneConfig.from_pretrained(settings.folder), settings
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.speaks = self.rank == 0
        if settings.ranks not in (1, self.ranks):
            raise RequestError(f"--ranks is {settings.ranks} but torchrun started {self.ranks}; leave --ranks out")
        SumTree.over(self.config.num_lanes, self.ranks)
        torch.set_num_threads(settings.threads or 1)
        here = place(settings.device, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        take(here)
        # A mailbox is memory that one parent process shares out; torchrun's ranks have none.
        backend = here.exchange(settings.exchange).replace("mailbox", "gloo")
        join_group(backend, here.device)
        share = self.config.num_lanes // self.ranks
        lanes = range(self.rank * share, (self.rank + 1) * share)
        dtype = getattr(torch, settings.dtype) if settings.dtype else None
        with memory_errors(here, "the weights of this rank"):
            weights = RankWeights.load(settings.folder, list(lanes), dtype, here.device)
        modules = 2 * self.config.num_hidden_layers
        exchange: Any = DistributedExchange(self.config.num_lanes, modules, settings.wait_limit_s)
        if here.kind == "cuda" and backend == "gloo":
            exchange = ThroughHost(exchange, here.device)
        schedules = [Schedule.parse(text, self.config) for text in settings.schedules]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            # Ranks that torchrun starts on CPUs share no memory.
            peers = (lambda words: on_gpus(words, here.device)) if backend == "nccl" else None
            self._runner = make_runner(
                settings.runner, weights, exchange, settings.capacity, schedules, self.rank, peers,
                settings.wait_limit_s,
            )  # fmt: skip
        own = [str(w.message) for w in caught if w.filename == __file__]
        self.notes = here.notes(backend) + own if self.speaks else []
        self.runner = self._runner.name
        # Compiling takes each rank its own time; waits are bounded only once all are ready.
        dist.barrier()

    def __enter__(self) -> TorchrunSession:
        return self

    def __exit__(self, *_: object) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()

    def generate(self, request: Request) -> Iterator[Token]:
        """Tokens as they are decoded, the same on every rank."""
        from laneformer.infer.engine import generate

        check_request(request, self.config, self.settings.capacity)
        return generate(self._runner, request, self._stop_test(request.stop_texts))

    def _stop_test(self, stops: tuple[str, ...]) -> Callable[[int], bool] | None:
        if not stops:
            return None
        from laneformer.infer.tokenizer import StopTexts, Text

        return StopTexts(Text.from_folder(self.settings.folder), stops).found
