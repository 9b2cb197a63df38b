"""Decoding over one or several rank processes, as a user of the library calls it.

with Session(RankSettings("checkpoint", ranks=2)) as session:
    for token in session.generate(Request(prompt=(1, 2, 3), max_tokens=16)):
        print(token.id)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from laneformer.infer.ranks import RankGroup, RankSettings
from laneformer.infer.request import Request, Token, check_request, check_tokens


@dataclass(frozen=True)
class Timing:
    """One measured request: when each token came (seconds since the request), and every rank's waits per token.

    `wait_s` and `head_wait_s` are [ranks][tokens]: for module partials, and for the two exchanges at the head.
    """

    at_s: tuple[float, ...]
    wait_s: tuple[tuple[float, ...], ...]
    head_wait_s: tuple[tuple[float, ...], ...]
    tokens: tuple[int, ...]


class Session:
    """Running ranks that serve requests one after another; a context manager.

    Raises RankError when a rank fails, RequestError for a request that does not fit, and the checkpoint's own errors.
    """

    def __init__(self, settings: RankSettings) -> None:
        self._group = RankGroup(settings)
        self.config, self.settings = self._group.config, settings
        self.ranks, self.speaks = settings.ranks, True

    def __enter__(self) -> Session:
        self._group.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._group.close(at_once=exception[0] is not None)

    @property
    def runner(self) -> str:
        """The runner that runs, which is another one where the one asked for could not be had."""
        return self._group.ready[0]["runner"]

    @property
    def devices(self) -> list[str]:
        """What each rank computes on: `cpu`, or a GPU's name."""
        return [ready["device"] for ready in self._group.ready]

    @property
    def exchange(self) -> str:
        """How partials travel: `mailbox`, `gloo` or `nccl`; `none` within a single rank."""
        return self._group.ready[0]["exchange"]

    @property
    def notes(self) -> list[str]:
        """What the ranks had to say while starting, each once."""
        return list(dict.fromkeys(note for ready in self._group.ready for note in ready["notes"]))

    @property
    def weight_bytes(self) -> list[int]:
        """Bytes of weights that each rank holds."""
        return [ready["weight_bytes"] for ready in self._group.ready]

    @property
    def streamed_bytes(self) -> list[int]:
        """Bytes of weights that each rank reads for every token."""
        return [ready["streamed_bytes"] for ready in self._group.ready]

    @property
    def loading_bytes(self) -> list[int]:
        """By how much each rank's peak resident memory grew while loading."""
        return [ready["loading_bytes"] for ready in self._group.ready]

    @property
    def process_ids(self) -> list[int]:
        """Process id of each rank."""
        return self._group.process_ids

    def generate(self, request: Request) -> Iterator[Token]:
        """Tokens as they are decoded; leaving the loop early ends the session."""
        check_request(request, self.config, self.settings.capacity)
        finished = False
        try:
            for _, message, _ in self._group.call("generate", request=asdict(request), stream=True):
                if message.pop("event") == "token":
                    yield Token(**message)
            finished = True
        finally:
            if not finished:
                self._group.close(at_once=True)

    def timed(self, request: Request) -> Timing:
        """Decodes a request with nothing streamed back meanwhile, and says when what happened."""
        check_request(request, self.config, self.settings.capacity)
        done = {
            rank: message for rank, message, _ in self._group.call("generate", request=asdict(request), stream=False)
        }
        tokens = [Token(**token) for token in done[0]["tokens"]]
        return Timing(
            tuple(token.at_s for token in tokens),
            tuple(tuple(done[rank]["wait_s"]) for rank in sorted(done)),
            tuple(tuple(done[rank]["head_wait_s"]) for rank in sorted(done)),
            tuple(token.id for token in tokens),
        )

    def logits(self, tokens: Sequence[int], schedule: str = "checkpoint", prefill: int | None = None) -> np.ndarray:
        """Float32 logits [S, V] at every position; the first `prefill` tokens (all by default) by prefill."""
        check_tokens(tokens, self.config, min(self.settings.capacity, self.config.max_position_embeddings))
        count = len(tokens) if prefill is None else prefill
        arguments = {"tokens": list(tokens), "schedule": schedule, "prefill": count}
        answers = {rank: (message, raw) for rank, message, raw in self._group.call("logits", **arguments)}
        message, raw = answers[0]
        return np.frombuffer(raw, np.float32).reshape(message["shape"])

    def read_seconds(self, rounds: int = 1) -> list[float]:
        """Seconds to only read as many bytes as the streamed weights have, all ranks at once; each round's slowest."""
        answers = [message["seconds"] for _, message, _ in self._group.call("read", rounds=rounds)]
        return [max(seconds) for seconds in zip(*answers, strict=True)]

    def peak_bytes(self) -> list[int]:
        """Each rank's peak resident memory so far."""
        answers = {rank: message["peak_bytes"] for rank, message, _ in self._group.call("memory")}
        return [answers[rank] for rank in sorted(answers)]
