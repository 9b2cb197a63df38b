"""Which conversations are learnt from and asked about: small tasks over names and numbers, some of them held out."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from laneformer.data.chat import Conversation, Message

# Byte-level BPE spells a leading space so. One token a word: what is asked is not whether the model can spell.
WORD = re.compile("\u0120[a-z]{3,}")
NUMBERS = range(1000)
KNOWN = ("size", "count", "value", "limit")


@dataclass(frozen=True)
class Pool:
    """What prompts are made of."""

    words: tuple[str, ...]
    numbers: tuple[int, ...]


Task = Callable[[random.Random, Pool], tuple[str, str]]


def pools(tokenizer: Tokenizer, seed: int, held_out: float) -> tuple[Pool, Pool]:
    """What is learnt from and what is held out; words are those that are one token with the space before them."""
    words = sorted(token[1:] for token in tokenizer.get_vocab() if WORD.fullmatch(token) and token[1:] not in KNOWN)
    numbers = list(NUMBERS)
    draw = random.Random(seed)
    draw.shuffle(words)
    draw.shuffle(numbers)
    few, some = round(held_out * len(words)), round(held_out * len(numbers))
    return Pool(tuple(words[few:]), tuple(numbers[some:])), Pool(tuple(words[:few]), tuple(numbers[:some]))


def answer(name: str, number: int) -> str:
    """The function asked for."""
    return f"def {name}():\n    return {number}"


def number(draw: random.Random, pool: Pool) -> tuple[str, str]:
    """Copies one of four names, and a number."""
    name, value = draw.choice(KNOWN), draw.choice(pool.numbers)
    return f"Write a function named {name} that returns {value}.", answer(name, value)


def word(draw: random.Random, pool: Pool) -> tuple[str, str]:
    """Copies a name, and a number."""
    name, value = draw.choice(pool.words), draw.choice(pool.numbers)
    return f"Write a function named {name} that returns {value}.", answer(name, value)


def larger(draw: random.Random, pool: Pool) -> tuple[str, str]:
    """Compares two numbers and copies the larger; guessing which gives a half."""
    one, other = draw.sample(pool.numbers, 2)
    return f"Which is larger, {one} or {other}?", f"The larger one is {max(one, other)}."


def reworded(draw: random.Random, pool: Pool) -> tuple[str, str]:
    """Asks what `number` asks in words that no training prompt has."""
    name, value = draw.choice(KNOWN), draw.choice(pool.numbers)
    return f"I need some code: {name} should give back {value}.", answer(name, value)


TRAINED: tuple[Task, ...] = (number, word, larger)
ASKED: tuple[Task, ...] = (*TRAINED, reworded)


def conversations(tasks: Sequence[Task], pool: Pool, count: int, seed: int) -> dict[str, list[Conversation]]:
    """`count` different conversations of each task, by its name; the same for the same arguments."""
    found = {}
    for task in tasks:
        draw = random.Random(f"{task.__name__} {seed}")
        pairs: dict[tuple[str, str], None] = {}
        while len(pairs) < count:
            pairs[task(draw, pool)] = None
        found[task.__name__] = [(Message("user", asked), Message("assistant", said)) for asked, said in pairs]
    return found
