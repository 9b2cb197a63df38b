"""Models small enough to check by hand, shared by the tests of the suites."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from laneformer import LaneConfig
from laneformer.evaluation.completers import NotOffered
from laneformer.random_weights import write_random_checkpoint

SPECIALS = [
    "<|endoftext|>",
    "<|pad|>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|im_start|>",
    "<|im_end|>",
]
SIZES = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 20, "max_position_embeddings": 96, "num_lanes": 2, "broadcast_delay": 1,
    "rope_theta": 50.0, "norm_eps": 1e-3, "eos_token_id": 0,
}  # fmt: skip


class Canned:
    """Answers from a dictionary of prompts; infilling by prefix and suffix."""

    name = "canned"

    def __init__(self, answers=None, spans=True):
        self.answers, self.spans, self.asked = answers or {}, spans, []

    def complete(self, prompts, how):
        self.asked += [(prompt, tuple(how.stop)) for prompt in prompts]
        return [[self.answers.get(prompt, "")] * how.n for prompt in prompts]

    def infilling_prompt(self, prefix, suffix):
        if not self.spans:
            raise NotOffered("no infilling tokens")
        return f"{prefix}<HERE>{suffix}"

    def nats(self, text):
        return 2.0 * len(text), len(text)


def write_tokenizer(folder: Path) -> int:
    """A byte-level tokenizer with the special tokens; its vocabulary size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(SPECIALS) + 9,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIALS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def f(x):\n    return x + 1\n", "the cat sat"], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer.get_vocab_size()


def write_checkpoint(folder: Path, **changes) -> Path:
    """A random checkpoint with a tokenizer."""
    scratch = folder.with_name(folder.name + "-weights")
    vocabulary = write_tokenizer(folder)
    write_random_checkpoint(LaneConfig(**{**SIZES, "vocab_size": vocabulary, **changes}), scratch, seed=3)
    for file in scratch.iterdir():
        shutil.copy(file, folder)
    return folder
