"""A tiny byte-level tokenizer, trained on the spot."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ODD_TEXT = "naïve café, 日本語 and 🙂🙃: «déjà vu»"
CORPUS = ["def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n", "the cat sat on the mat and the hat"]


def train_tokenizer(folder: Path, extra: int = 10) -> int:
    """Writes folder/tokenizer.json with all bytes, `extra` merges and the special token <end>; its vocabulary size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 1 + extra, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer.get_vocab_size()
