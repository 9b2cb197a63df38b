"""The quick path from a folder of text files to a folder of shards: one source, all in memory, one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from laneformer.data.made import made_from, make_folder, manifest_of, refuse_foreign
from laneformer.data.naming import shard_stem
from laneformer.data.shards import Manifest, ShardWriter, read_manifest, write_manifest
from laneformer.data.specials import USUAL, Specials, SpecialTokens
from laneformer.data.text_files import Documents, read_documents
from laneformer.data.tokenizer import (
    adopt_tokenizer,
    document_encoder,
    encode_texts,
    save_tokenizer,
    tokenizer_sha256,
    train_tokenizer,
)
from laneformer.data.tokenizer import vocab_size as entries

SUFFIXES = (".md", ".py", ".rst", ".txt")
EXCLUDE = (".git", ".venv", "__pycache__", "node_modules", "site-packages")
# Raised whenever the same inputs give other shards, so that older ones are made anew.
RECIPE = 1
TEXTS_AT_ONCE = 256


@dataclass(frozen=True)
class Built:
    """A folder of shards, whether it was there already, and what its summary line says."""

    manifest: Manifest
    reused: bool
    summary: str


def build_shards(
    corpus: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    vocab_size: int = 4096,
    suffixes: Sequence[str] = SUFFIXES,
    exclude: Sequence[str] = EXCLUDE,
    valid_fraction: float = 0.05,
    source: str = "corpus",
) -> Built:
    """One train and one valid shard of the text files in `corpus` (a folder or a file), with their tokenizer.

    Trains a tokenizer of `vocab_size` entries on what is learnt, or adopts the one at `tokenizer`. A folder `out` made
    from the same inputs is used as it is; another that was built here is replaced as a whole. Raises ValueError for a
    corpus, a tokenizer or a folder that cannot serve.
    """
    if not 0 < valid_fraction < 1:
        raise ValueError(f"the share held out must lie between 0 and 1, got {valid_fraction}")
    documents = read_documents(corpus, suffixes, exclude, valid_fraction)
    adopted = adopt_tokenizer(tokenizer) if tokenizer else None
    inputs = {
        "recipe": RECIPE,
        "source": source,
        "documents": documents.sha256(),
        "tokenizer": tokenizer_sha256(adopted[0]) if adopted else f"trained, {vocab_size} entries",
        "special_tokens": asdict(adopted[1] if adopted else USUAL),
    }
    if made_from(out, inputs):
        return _built(read_manifest(out), documents, reused=True)
    refuse_foreign(out, tokenizer)
    loaded, names = adopted or (train_tokenizer(documents.train, vocab_size), USUAL)
    manifest = make_folder(out, inputs, lambda folder: write_shards(folder, documents, loaded, names, source))
    return _built(manifest, documents, reused=False)


def write_shards(
    folder: Path, documents: Documents, tokenizer: Tokenizer, names: SpecialTokens, source: str
) -> Manifest:
    """Writes the tokenizer, a train and a valid shard, and last the manifest, which it returns."""
    save_tokenizer(folder, tokenizer, names)
    encoder, end = document_encoder(tokenizer), Specials.of(tokenizer, names).end
    shards = []
    for split, texts in (("train", documents.train), ("valid", documents.valid)):
        writer = ShardWriter(folder, shard_stem(source, split, 0, 0), source, split, entries(tokenizer), end)
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            some = texts[start : start + TEXTS_AT_ONCE]
            for text, ids in zip(some, encode_texts(encoder, some), strict=True):
                writer.add(ids, len(text.encode()))
        shards.append(writer.close())
    manifest = manifest_of(tokenizer, names, shards)
    write_manifest(folder, manifest)
    return manifest


def _built(manifest: Manifest, documents: Documents, reused: bool) -> Built:
    """The result with its summary line."""
    tokens = sum(shard.num_tokens for shard in manifest.shards)
    ratio = sum(shard.num_bytes for shard in manifest.shards) / tokens
    made = "unchanged since they were built" if reused else "built"
    return Built(manifest, reused, f"{documents.summary()}; {tokens:,} tokens, {ratio:.2f} bytes a token, {made}")
