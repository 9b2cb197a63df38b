"""Text to tokens and back, from a checkpoint's tokenizer.json."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextError(ValueError):
    """Text that cannot be turned into tokens, or a folder without a tokenizer."""


class Text:
    """A checkpoint's tokenizer; raises TextError when the folder has none or it cannot be read."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: str | os.PathLike) -> Text:
        """Reads `folder`/tokenizer.json."""
        path = Path(folder) / "tokenizer.json"
        if not path.exists():
            raise TextError(f"{path} does not exist; copy a tokenizer.json there, or give --prompt-ids")
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # tokenizers raises bare Exception for every kind of bad file
            raise TextError(f"{path} is not a tokenizer: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens its template adds."""
        return self.tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self.tokenizer.decode(list(ids))

    def stream(self) -> Callable[[int], str]:
        """A function from each next token to the text it completes; an unfinished character gives nothing yet."""
        pending = DecodeStream(skip_special_tokens=True)
        return lambda token: pending.step(self.tokenizer, token) or ""


class StopTexts:
    """Whether the text so far holds one of some stop strings; the same answer on every rank."""

    def __init__(self, text: Text, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise TextError("a stop string is empty, so it would stop at once; leave it out")
        self.stops = tuple(stops)
        self._text = text
        self._tokens: list[int] = []

    def found(self, token: int) -> bool:
        """Takes the next token; True once a stop string is complete."""
        self._tokens.append(token)
        # A stop string spans at most as many tokens as it has bytes; the tail is decoded anew for exact text.
        tail = max(len(stop.encode()) for stop in self.stops) + 4
        end = self._text.decode(self._tokens[-tail:])
        return any(stop in end for stop in self.stops)


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to its first stop string."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
