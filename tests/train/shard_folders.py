"""Small folders of shards for the tests of what training reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tokenizers import Tokenizer

from laneformer.data.shards import Manifest, ShardInfo, ShardWriter, token_dtype, write_manifest
from laneformer.data.specials import Specials
from laneformer.data.tokenizer import document_encoder, encode_texts, save_tokenizer, tokenizer_sha256, train_tokenizer
from laneformer.data.tokenizer import vocab_size as entries

END = 3
VOCABULARY = 60_000
TEXTS = [
    "def area(width, height):\n    return width * height\n\n\nclass Box:\n    side = 12\n",
    "naïve café, 雪の日 and \u2603 stand in one line that is a good deal longer than all the others here\n",
    "short\n",
    "for number in range(17):\n    print(number, area(number, number + 1))\n",
]


def counting(first: int, lengths: Sequence[int]) -> list[list[int]]:
    """Documents of these lengths whose tokens are all different, so that each says where it comes from."""
    documents = []
    for length in lengths:
        documents.append(list(range(first, first + length)))
        first += length
    return documents


def write_shard(
    folder: Path,
    name: str,
    source: str,
    documents: Sequence[Sequence[int]],
    split: str = "train",
    learn: Sequence[Sequence[int]] | None = None,
    num_bytes: Sequence[int] | None = None,
) -> ShardInfo:
    """One shard of documents given as ids."""
    writer = ShardWriter(folder, name, source, split, VOCABULARY, END)
    for number, ids in enumerate(documents):
        size = 2 * len(ids) if num_bytes is None else num_bytes[number]
        writer.add(ids, size, None if learn is None else learn[number])
    return writer.close()


def finish(folder: Path, shards: Sequence[ShardInfo], tokenizer_hash: str = "0" * 64) -> Path:
    """Writes the manifest of a folder without a tokenizer."""
    dtype = str(token_dtype(VOCABULARY))
    write_manifest(folder, Manifest(dtype, VOCABULARY, "<end>", END, tokenizer_hash, {}, tuple(shards)))
    return folder


def two_sources(folder: Path, learnt_first: int = 5000) -> Path:
    """Held-out documents of 10, 18, 8, 6 bytes (code) and 4, 60 (prose); 50 tokens to learn from `learnt_first` on."""
    shards = [
        write_shard(folder, "v0", "code", counting(100, [5, 9]), split="valid"),
        write_shard(folder, "t", "code", counting(learnt_first, [50])),
        write_shard(folder, "v1", "code", counting(200, [4, 3]), split="valid"),
        write_shard(folder, "p", "prose", counting(300, [2, 30]), split="valid"),
    ]
    return finish(folder, shards)


def small_tokenizer() -> Tokenizer:
    """A tokenizer of 300 entries, some of several characters."""
    return train_tokenizer(TEXTS, 300)


def text_folder(
    folder: Path,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    split: str = "train",
    source: str = "text",
) -> Path:
    """A folder of one shard of texts, with their tokenizer."""
    specials, encoder = Specials.of(tokenizer), document_encoder(tokenizer)
    writer = ShardWriter(folder, "shard", source, split, entries(tokenizer), specials.end)
    for text, ids in zip(texts, encode_texts(encoder, texts), strict=True):
        writer.add(ids, len(text.encode()))
    save_tokenizer(folder, tokenizer)
    write_manifest(folder, text_manifest(tokenizer, [writer.close()]))
    return folder


def text_manifest(tokenizer: Tokenizer, shards: Sequence[ShardInfo]) -> Manifest:
    """The manifest of shards that `tokenizer` made."""
    specials, size = Specials.of(tokenizer), entries(tokenizer)
    return Manifest(
        str(token_dtype(size)), size, "<|endoftext|>", specials.end, tokenizer_sha256(tokenizer), asdict(specials),
        tuple(shards),
    )  # fmt: skip
