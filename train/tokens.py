"""The tokenizer of a run, trained or adopted, and texts as one array of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# All byte values, and the end token.
SMALLEST_VOCABULARY = 257
TEXTS_AT_ONCE = 256


def train_tokenizer(texts: Sequence[str], vocab_size: int, end_token: str) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` entries, the end token included; raises ValueError below 257."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"model.vocab_size is {vocab_size}, but 256 bytes and the end token need {SMALLEST_VOCABULARY}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_tokenizer(path: Path, end_token: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json; raises ValueError where it cannot be read or lacks the end token."""
    if not path.is_file():
        raise ValueError(f"tokenizer {path} does not exist; give the path of a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for every kind of bad file
        raise ValueError(f"{path} is not a tokenizer: {error}") from None
    if tokenizer.token_to_id(end_token) is None:
        raise ValueError(f"{path} has no token {end_token!r}; name the one that ends a document with data.end_token")
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str], end_token: str) -> np.ndarray:
    """The end token, then each text and the end token: uint16 [N] below 65,536 entries, else uint32.

    Text that spells the end token is encoded as ordinary text.
    """
    end = tokenizer.token_to_id(end_token)
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    plain.no_truncation()
    plain.no_padding()
    parts = [np.array([end], dtype)]
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        some = list(texts[start : start + TEXTS_AT_ONCE])
        for encoding in plain.encode_batch_fast(some, add_special_tokens=False):
            parts.append(np.array([*encoding.ids, end], dtype))
    return np.concatenate(parts)
