"""What a suite asks of a model, whichever way it runs; and what the ways share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

DEEPSEEK = tuple(f"<\uff5cfim\u2581{name}\uff5c>" for name in ("begin", "hole", "end"))
CODE_LLAMA = ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>")
# (tokens that must be there, prompt): this project and Qwen, StarCoder, DeepSeek, Code Llama.
INFILLING = (
    (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "<|fim_prefix|>{}<|fim_suffix|>{}<|fim_middle|>"),
    (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>{}<fim_suffix>{}<fim_middle>"),
    (DEEPSEEK, "{}".join(("", *DEEPSEEK)).removeprefix("{}")),
    (CODE_LLAMA, "<PRE> {} <SUF>{} <MID>"),
)
# Logits of a whole window are held at once.
MAX_WINDOW = 2048
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>", "<eos>", "<end>")


class NotOffered(Exception):
    """Something that a model or its connection cannot do; the message is the reason to show."""


@dataclass(frozen=True)
class Decoding:
    """How prompts are continued: `n` times each, greedily at temperature 0; `chat`: they are a user's questions."""

    max_tokens: int
    temperature: float = 0.0
    n: int = 1
    stop: Sequence[str] = ()
    seed: int = 0
    chat: bool = False


class Completer(Protocol):
    """A model that continues texts."""

    name: str

    def complete(self, prompts: Sequence[str], how: Decoding) -> list[list[str]]:
        """`how.n` continuations of each prompt; they may run past a stop string."""
        ...

    def infilling_prompt(self, prefix: str, suffix: str) -> str:
        """The prompt whose continuation belongs between two texts; raises NotOffered."""
        ...

    def nats(self, text: str) -> tuple[float, int]:
        """The negative log-likelihood of a text, in nats, and its number of tokens; raises NotOffered."""
        ...


def infilling_prompt(vocabulary: Collection[str], prefix: str, suffix: str) -> str:
    """The infilling prompt (prefix, suffix, middle) in a vocabulary's special tokens; raises NotOffered."""
    for needed, template in INFILLING:
        if all(token in vocabulary for token in needed):
            return template.format(prefix, suffix)
    raise NotOffered("the tokenizer has no infilling tokens")


def sample_seed(seed: int, prompt: int, sample: int) -> int:
    """A seed of its own for each sample of each prompt, the same in any order of running."""
    return int(np.random.SeedSequence((seed, prompt, sample)).generate_state(1, np.uint64)[0])


def windowed_nats(logits: Callable[[Sequence[int]], np.ndarray], ids: Sequence[int], window: int) -> float:
    """The nats of ids[1:], each given what precedes it.

    logits: from token ids to logits [S, V], V the vocabulary. window: positions that fit. The first window scores all
    of its tokens; later windows overlap by half of theirs, so each token sees half a window or all there is.
    """
    if window < 2:
        raise ValueError(f"a window of {window} positions predicts nothing; 2 are needed")
    scored, total = 1, 0.0
    while scored < len(ids):
        begin = max(0, scored - window // 2)
        part = ids[begin : begin + window]
        first = scored - begin
        rows_SV = np.asarray(logits(part[:-1]))[first - 1 :].astype(np.float64)
        peak_S1 = rows_SV.max(1, keepdims=True)
        normaliser_S = np.log(np.exp(rows_SV - peak_S1).sum(1)) + peak_S1[:, 0]
        total += float((normaliser_S - rows_SV[np.arange(len(rows_SV)), part[first:]]).sum())
        scored = begin + len(part)
    return total
