"""A checkpoint of this project as the suites of laneformer.evaluation ask it, over a running Session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from laneformer.config import LaneConfig
from laneformer.evaluation.completers import (
    END_TOKENS,
    MAX_WINDOW,
    Decoding,
    NotOffered,
    infilling_prompt,
    sample_seed,
    windowed_nats,
)
from laneformer.infer.ranks import RankSettings
from laneformer.infer.request import Request
from laneformer.infer.sampling import Sampling
from laneformer.infer.session import Session
from laneformer.infer.tokenizer import Text, cut_at_stop

CHAT_START, CHAT_END = "<|im_start|>", "<|im_end|>"


class SessionCompleter:
    """Completes with a checkpoint folder; a context manager that holds the ranks.

    Raises TextError for a folder without a tokenizer, and the checkpoint's own errors.
    """

    def __init__(
        self, folder: Path, ranks: int = 1, runner: str = "eager", dtype: str | None = None, threads: int | None = None
    ) -> None:
        config = LaneConfig.from_pretrained(folder)
        self.name = folder.resolve().name
        self.text = Text.from_folder(folder)
        self.window = min(config.max_position_embeddings, MAX_WINDOW)
        settings = RankSettings(
            str(folder), ranks=ranks, runner=runner, dtype=dtype, threads=threads, capacity=self.window
        )
        self.session, self._eos = Session(settings), config.eos_ids
        self._vocabulary = self.text.tokenizer.get_vocab(with_added_tokens=True)

    def __enter__(self) -> SessionCompleter:
        self.session.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.session.__exit__(*exception)

    def complete(self, prompts: Sequence[str], how: Decoding) -> list[list[str]]:
        """As Completer.complete; a prompt that does not fit loses its beginning."""
        found = []
        for at, prompt in enumerate(prompts):
            ids = self.text.encode(self._chat(prompt) if how.chat else prompt)
            # Greedy samples are all the same, so one is decoded.
            seeds = [sample_seed(how.seed, at, sample) for sample in range(how.n if how.temperature else 1)]
            texts = [self._one(ids, how, seed) for seed in seeds]
            found.append(texts * (how.n // len(texts)))
        return found

    def _one(self, ids: list[int], how: Decoding, seed: int) -> str:
        new = min(how.max_tokens, self.window - 2)
        prompt = ids[-(self.window - 1 - new) :] or [self._end()]
        names = (*END_TOKENS, CHAT_END) if how.chat else END_TOKENS
        ends = {self._vocabulary[name] for name in names if name in self._vocabulary}
        request = Request(
            prompt=tuple(prompt),
            max_tokens=new,
            sampling=Sampling(temperature=how.temperature, seed=seed),
            stop_ids=tuple(sorted(ends)),
            stop_texts=tuple(how.stop),
        )
        tokens = [token for token in self.session.generate(request) if token.finish != "stop_id"]
        return cut_at_stop(self.text.decode([token.id for token in tokens]), how.stop)

    def _chat(self, question: str) -> str:
        if CHAT_START not in self._vocabulary:
            raise ValueError(f"{self.name} has no {CHAT_START} token, so no chat template; leave out --chat")
        return f"{CHAT_START}user\n{question}{CHAT_END}\n{CHAT_START}assistant\n"

    def _end(self) -> int:
        """The end token, which stands before a text's first token."""
        named = [self._vocabulary[name] for name in END_TOKENS if name in self._vocabulary]
        if not (ends := [*self._eos, *named]):
            raise NotOffered("the tokenizer has no end token to predict the first token from")
        return ends[0]

    def infilling_prompt(self, prefix: str, suffix: str) -> str:
        """As Completer.infilling_prompt."""
        return infilling_prompt(self._vocabulary, prefix, suffix)

    def nats(self, text: str) -> tuple[float, int]:
        """As Completer.nats."""
        ids = [self._end(), *self.text.tokenizer.encode(text, add_special_tokens=False).ids]
        return windowed_nats(self._logits, ids, self.window), len(ids) - 1

    def _logits(self, ids: Sequence[int]) -> np.ndarray:
        return self.session.logits(ids)
