"""Conversations as tokens: the ids that the chat template gives, and which of them are learnt."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from laneformer.data.held_out import content_hash, held_out_below
from laneformer.data.made import made_from, make_folder, manifest_of, refuse_foreign
from laneformer.data.naming import shard_stem
from laneformer.data.shards import Manifest, ShardInfo, ShardWriter, read_manifest, write_manifest
from laneformer.data.specials import Specials, SpecialTokens
from laneformer.data.tokenizer import document_encoder, read_tokenizer, save_tokenizer, tokenizer_sha256, vocab_size

ROLES = ("system", "user", "assistant", "tool")
SHARD_TOKENS = 2**26
RECIPE = 1


class ChatError(ValueError):
    """A conversation that does not follow the messages format."""


@dataclass(frozen=True)
class Message:
    """One turn."""

    role: str
    content: str


Conversation = tuple[Message, ...]


def parse_conversation(line: dict[str, Any]) -> Conversation:
    """The messages of one JSON line; raises ChatError saying which message is wrong and how."""
    messages = line.get("messages") if isinstance(line, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ChatError('expected {"messages": [{"role": ..., "content": ...}, ...]} with at least one message')
    conversation = tuple(_message(message, f"message {number}") for number, message in enumerate(messages, 1))
    if not any(message.role == "assistant" for message in conversation):
        raise ChatError("no message is the assistant's, so there is nothing to learn")
    return conversation


def _message(message: Any, where: str) -> Message:
    """One checked message; keys whose value is null count as left out."""
    if not isinstance(message, dict):
        raise ChatError(f"{where} is {message!r}, expected an object with role and content")
    given = {key: value for key, value in message.items() if value is not None}
    if given.get("role") not in ROLES:
        raise ChatError(f"{where} has role {given.get('role')!r}, expected one of {', '.join(ROLES)}")
    content = given.get("content")
    if not isinstance(content, str):
        raise ChatError(f"{where} has content {content!r}, expected a text")
    # What is left out here would be missing from what is learnt.
    if unknown := sorted(set(given) - {"role", "content"}):
        raise ChatError(f"{where} has {', '.join(unknown)}, but only role and content are learnt from; remove the rest")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise ChatError(f"{where} holds half a surrogate pair, which is no character") from None
    return Message(given["role"], content)


def read_conversations(path: Path) -> Iterator[Conversation]:
    """The conversations of a .jsonl or .jsonl.gz file in order; raises ChatError with file and line."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as handle:
            for line in handle:
                number += 1
                if line.strip():
                    yield parse_conversation(json.loads(line))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ChatError(f"{path} is damaged after line {number}: {error}") from None
    except ValueError as error:
        raise ChatError(f"{path}, line {number}: {error}") from None


def encode_chat(encoder: Tokenizer, specials: Specials, conversation: Conversation) -> tuple[list[int], list[int]]:
    """The ids [N] that the chat template gives, and 1 for those that are learnt.

    Learnt are the tokens of the assistant's content and its im_end. `encoder` is one of `document_encoder`, so content
    that spells a special token is text. A token that holds the header's newline and the content's first characters
    (content that starts with newlines) is learnt, as in transformers' assistant mask.
    """
    headers = [f"{message.role}\n" for message in conversation]
    texts = [header + message.content for header, message in zip(headers, conversation, strict=True)]
    newline, *encodings = encoder.encode_batch(["\n", *texts], add_special_tokens=False)
    ids: list[int] = []
    learn: list[int] = []
    for header, message, encoding in zip(headers, conversation, encodings, strict=True):
        spoken = int(message.role == "assistant")
        ids += [specials.im_start, *encoding.ids, specials.im_end, *newline.ids]
        learn += [0, *(spoken * (end > len(header)) for _, end in encoding.offsets), spoken, *(0 for _ in newline.ids)]
    return ids, learn


@dataclass(frozen=True)
class ChatShards:
    """What `tokenize_chat` made, or found made."""

    manifest: Manifest
    conversations: int
    duplicates: int
    reused: bool


def tokenize_chat(
    files: Sequence[Path],
    out: Path,
    tokenizer: Path,
    *,
    source: str = "chat",
    valid_fraction: float = 0.05,
    shard_tokens: int = SHARD_TOKENS,
) -> ChatShards:
    """Shards with a learn mask from conversations, of which equal ones are kept once and a share is held out.

    A document's bytes are those of the assistant's content, which is what its bits are counted against. The folder is
    replaced as a whole, and used as it is where it was made from the same inputs.
    """
    if not 0 <= valid_fraction < 1:
        raise ChatError(f"the share held out must be at least 0 and below 1, got {valid_fraction}")
    loaded, names = read_tokenizer(tokenizer)
    hashes = [_hash(conversation) for path in files for conversation in read_conversations(path)]
    if not hashes:
        raise ChatError(f"no conversation in {', '.join(map(str, files)) or 'no file'}; give JSON lines with messages")
    inputs = {
        "recipe": RECIPE,
        "source": source,
        "conversations": hashlib.sha256(repr(hashes).encode()).hexdigest(),
        "tokenizer": tokenizer_sha256(loaded),
        "special_tokens": asdict(names),
        "valid_fraction": valid_fraction,
        "shard_tokens": shard_tokens,
    }
    counts = (len(set(hashes)), len(hashes) - len(set(hashes)))
    if made_from(out, inputs):
        return ChatShards(read_manifest(out), *counts, reused=True)
    refuse_foreign(out, tokenizer)
    below = held_out_below(valid_fraction, min(hashes), max(hashes))
    written = ChatWriter(loaded, names, source, below, shard_tokens)
    return ChatShards(make_folder(out, inputs, lambda folder: written.fill(folder, files)), *counts, reused=False)


def _hash(conversation: Conversation) -> int:
    """What decides the side of a conversation: its content alone."""
    return content_hash(json.dumps([(message.role, message.content) for message in conversation]))


@dataclass(frozen=True)
class ChatWriter:
    """Writes conversations to shards of at most `shard_tokens`, those hashed below `below` to the valid split."""

    tokenizer: Tokenizer
    names: SpecialTokens
    source: str
    below: int
    shard_tokens: int

    def fill(self, folder: Path, files: Sequence[Path]) -> Manifest:
        """Writes the tokenizer, the shards of both splits and the manifest."""
        save_tokenizer(folder, self.tokenizer, self.names)
        shards = [shard for split in ("train", "valid") for shard in self._split(folder, files, split)]
        manifest = manifest_of(self.tokenizer, self.names, shards)
        write_manifest(folder, manifest)
        return manifest

    def _split(self, folder: Path, files: Sequence[Path], split: str) -> Iterator[ShardInfo]:
        """The shards of one split; an empty one has none."""
        encoder, specials = document_encoder(self.tokenizer), Specials.of(self.tokenizer, self.names)
        writer, index = self._writer(folder, split, 0, specials.end), 0
        for conversation in self._side(files, split):
            ids, learn = encode_chat(encoder, specials, conversation)
            if writer.num_tokens > 1 and writer.num_tokens + len(ids) + 1 > self.shard_tokens:
                yield writer.close()
                index += 1
                writer = self._writer(folder, split, index, specials.end)
            spoken = sum(len(message.content.encode()) for message in conversation if message.role == "assistant")
            # Decoding stops at im_end, so the end token behind it is nothing to learn.
            writer.add(ids, spoken, [*learn, 0])
        if writer.num_tokens > 1:
            yield writer.close()

    def _side(self, files: Sequence[Path], split: str) -> Iterator[Conversation]:
        """The conversations of one split, each once."""
        seen: set[int] = set()
        for path in files:
            for conversation in read_conversations(path):
                number = _hash(conversation)
                if number not in seen and (number < self.below) == (split == "valid"):
                    seen.add(number)
                    yield conversation

    def _writer(self, folder: Path, split: str, index: int, end_id: int) -> ShardWriter:
        """The next shard of a split."""
        name = shard_stem(self.source, split, 0, index)
        return ShardWriter(folder, name, self.source, split, vocab_size(self.tokenizer), end_id)
