"""How does a packed document become an infilling example: a middle that is predicted from what is before and behind it?

Shape suffix: S positions of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from laneformer.config_json import ConfigError
from laneformer.data.shards import Manifest
from laneformer.data.tokenizer import document_encoder
from laneformer.train.packing import Row, padded_row
from laneformer.train.shuffle import draws

LEAST_CHARACTERS = 10
SENTINELS = ("fim_prefix", "fim_suffix", "fim_middle")
# What a tokenizer must give back as it was: spaces at either end, line ends, and text that is not normalised.
PROBE = "  caf\u0065\u0301 x\r\n\ty  \n"
BROKEN = "\ufffd"


@dataclass(frozen=True)
class Piece:
    """The part of a document that lies in a row: targets first..end-1, with what chance drew for it."""

    row: int
    first: int
    end: int
    spm: bool
    cuts: tuple[int, int]


class Infiller:
    """Rearranges pieces of packed rows as prefix, suffix, middle, in place: no piece takes more room than it had.

    Each piece is drawn for by (seed, source, epoch, window, number of the piece), with probability `rate`; a share
    `spm` of those has the suffix first. Raises ConfigError for a tokenizer that lacks the tokens or changes text.
    """

    def __init__(self, tokenizer: Tokenizer, manifest: Manifest, rate: float, spm: float) -> None:
        missing = [role for role in SENTINELS if role not in manifest.special_tokens]
        if missing:
            raise ConfigError(f"the shards' tokenizer has no {', '.join(missing)} token; set data.infilling=0")
        self.encoder = document_encoder(tokenizer)
        if self._texts([self._ids([PROBE])[0]]) != [PROBE]:
            raise ConfigError("the shards' tokenizer does not give text back as it was; set data.infilling=0")
        self.prefix, self.suffix, self.middle = (manifest.special_tokens[role] for role in SENTINELS)
        self.end, self.special = manifest.end_id, list(manifest.special_tokens.values())
        self.rate, self.spm = rate, spm

    def _texts(self, ids: list[list[int]]) -> list[str]:
        return self.encoder.decode_batch(ids, skip_special_tokens=False)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.encoder.encode_batch_fast(texts, add_special_tokens=False)]

    def rows(self, rows: Sequence[Row], keys: Sequence[tuple[int, ...]]) -> list[Row]:
        """The rows with some pieces rearranged; `keys` has what each row's draws depend on.

        Rows with padding or with a learn mask stay as they are.
        """
        drawn = [piece for number in range(len(rows)) for piece in self._drawn(rows[number], number, keys[number])]
        bodies = [rows[piece.row].targets_S[piece.first : piece.end] for piece in drawn]
        # The end token is no text; it comes back behind the middle.
        bodies = [body[:-1] if body[-1] == self.end else body for body in bodies]
        texts = self._texts([body.tolist() for body in bodies])
        kept = [
            (piece, text)
            for piece, body, text in zip(drawn, bodies, texts, strict=True)
            if len(text) >= LEAST_CHARACTERS and BROKEN not in text and not np.isin(body, self.special).any()
        ]
        parts = self._ids([part for piece, text in kept for part in _parts(text, piece.cuts)])
        done: dict[int, list[tuple[Piece, list[int]]]] = {}
        for number, (piece, _) in enumerate(kept):
            ids = self._arranged(piece, *parts[3 * number : 3 * number + 3])
            if ids is not None:
                done.setdefault(piece.row, []).append((piece, ids))
        return [self._rebuilt(row, done[number]) if number in done else row for number, row in enumerate(rows)]

    def _drawn(self, row: Row, number: int, key: tuple[int, ...]) -> list[Piece]:
        """The pieces of a row that chance has rearranged."""
        if row.masked or row.filled < len(row.inputs_S):
            return []
        bounds = [0, *(np.flatnonzero(np.diff(row.documents_S)) + 1).tolist(), row.filled]
        pieces = []
        for i in range(len(bounds) - 1):
            chosen, order, *cuts = draws(*key, i)
            if chosen < self.rate * 2**64:
                pieces.append(Piece(number, bounds[i], bounds[i + 1], order < self.spm * 2**64, (cuts[0], cuts[1])))
        return pieces

    def _arranged(self, piece: Piece, prefix: list[int], middle: list[int], suffix: list[int]) -> list[int] | None:
        """The ids of a rearranged piece; None where the suffix is too short to give up the room for the new tokens.

        The suffix loses its end, as it does in a prompt that is too long. The middle is never cut, and the end token
        stands behind it whether or not the document goes on: that is where a filled-in middle stops.
        """
        room = piece.end - piece.first
        excess = len(prefix) + len(middle) + len(suffix) + len(SENTINELS) + 1 - room
        if excess > 0 and excess >= len(suffix):
            return None
        suffix = suffix[: len(suffix) - max(excess, 0)]
        if piece.spm:
            head = [self.prefix, self.suffix, *suffix, self.middle, *prefix]
        else:
            head = [self.prefix, *prefix, self.suffix, *suffix, self.middle]
        return [*head, *middle, self.end]

    def _rebuilt(self, row: Row, done: Sequence[tuple[Piece, list[int]]]) -> Row:
        """The row with these pieces in the place of what was there; what follows a shorter one moves up."""

        def unchanged(first: int, end: int) -> tuple[np.ndarray, ...]:
            return row.inputs_S[first:end], row.targets_S[first:end], row.documents_S[first:end]

        parts, at = [], 0
        for piece, ids in done:
            # Behind an end token, also where the row begins inside a document, as a prompt is at inference.
            inputs, targets = np.array([self.end, *ids[:-1]], np.int64), np.array(ids, np.int64)
            numbers = np.full(len(ids), row.documents_S[piece.first])
            parts += [unchanged(at, piece.first), (inputs, targets, numbers)]
            at = piece.end
        parts.append(unchanged(at, row.filled))
        inputs, targets, documents = (np.concatenate(column) for column in zip(*parts, strict=True))
        return padded_row(inputs, targets, documents, len(row.inputs_S), self.end)


def _parts(text: str, draws_: tuple[int, int]) -> list[str]:
    """Prefix, middle and suffix at two places that are uniform over the characters, both ends included."""
    first, second = sorted(draw * (len(text) + 1) >> 64 for draw in draws_)
    return [text[:first], text[first:second], text[second:]]
