"""Tokenizers: how one is trained or adopted, read and saved, and how documents are encoded with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from laneformer.data.specials import USUAL, Specials, SpecialTokens, TokenizerError
from laneformer.files import replace_files, text_writer

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
# All byte values and the special tokens.
SMALLEST_VOCABULARY = 256 + len(asdict(USUAL))
# The pattern of GPT-4 (tiktoken's cl100k_base). Runs of spaces stay together but for the last, which goes with the word
# behind it, so that indentation is one token; and a token never starts before a line's end and goes on behind it into
# text, so that a prompt that ends with a line is cut where training cut. Digits stand alone: at a few thousand entries,
# three-digit groups would take hundreds of them.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` entries, the special tokens first; the same for the same texts.

    Raises TokenizerError where the bytes and the special tokens alone need more.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise TokenizerError(
            f"the vocabulary size is {vocab_size}, but 256 bytes and {SMALLEST_VOCABULARY - 256} special tokens need "
            f"{SMALLEST_VOCABULARY}; give at least that"
        )
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in asdict(USUAL).values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def adopt_tokenizer(path: Path, names: Mapping[str, str] | None = None) -> tuple[Tokenizer, SpecialTokens]:
    """The tokenizer of a tokenizer.json or a folder that holds one, with the special tokens that it lacks added.

    `names` gives roles (end, pad, fim_prefix, ...) to tokens that it has; raises TokenizerError for one it has not.
    """
    file = tokenizer_file(path)
    tokenizer = load(file)
    given = dict(names or {})
    for role, name in given.items():
        if tokenizer.token_to_id(name) is None:
            raise TokenizerError(f"{file} has no token {name!r} to be the special {role}; leave it out to add one")
    spelt = SpecialTokens.of({**_own_names(file), **given})
    special = {name: AddedToken(name, special=True, normalized=False) for name in asdict(spelt).values()}
    tokenizer.add_special_tokens(list(special.values()))
    adopted = _with_special_flags(tokenizer, set(special))
    _refuse_ordinary(adopted, spelt)
    return adopted, spelt


def _refuse_ordinary(tokenizer: Tokenizer, names: SpecialTokens) -> None:
    """Raises TokenizerError for a special token that a document's text gives too: it could end itself."""
    encoder = document_encoder(tokenizer)
    for role, name in asdict(names).items():
        if tokenizer.token_to_id(name) in encode_texts(encoder, [name])[0]:
            raise TokenizerError(
                f"{name!r} cannot be the special token {role}: ordinary text that spells it gives it too; "
                "name a token that only programs write, or leave it out to add one"
            )


def _with_special_flags(tokenizer: Tokenizer, names: set[str]) -> Tokenizer:
    """The same tokenizer, in which these are special also where it had them as ordinary added tokens.

    Only special tokens can be encoded as ordinary text where a document spells them.
    """
    document = json.loads(tokenizer.to_str())
    for token in document["added_tokens"]:
        if token["content"] in names:
            token.update(special=True, normalized=False, lstrip=False, rstrip=False, single_word=False)
    return Tokenizer.from_str(json.dumps(document))


def tokenizer_file(path: Path) -> Path:
    """The tokenizer.json that a path means: itself, or the one in the folder; raises TokenizerError for none."""
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise TokenizerError(f"{file} does not exist; give the path of a {TOKENIZER} or of a folder that holds one")
    return file


def read_tokenizer(path: Path) -> tuple[Tokenizer, SpecialTokens]:
    """A tokenizer that has every special token, with their spellings; raises TokenizerError for another."""
    file = tokenizer_file(path)
    tokenizer, names = load(file), SpecialTokens.of(_own_names(file))
    Specials.of(tokenizer, names)
    return tokenizer, names


def load(file: Path) -> Tokenizer:
    """The tokenizer of a file, whatever special tokens it has."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception for every kind of bad file
        raise TokenizerError(f"{file} is not a tokenizer: {error}") from None


def _own_names(file: Path) -> dict[str, str]:
    """The spellings by role that `save_tokenizer` left beside a tokenizer.json, or none."""
    config = file.with_name(TOKENIZER_CONFIG)
    if not config.is_file():
        return {}
    try:
        document: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
        return {str(role): str(name) for role, name in document.get("special_token_roles", {}).items()}
    except (ValueError, AttributeError) as error:
        raise TokenizerError(f"{config} is not a tokenizer's configuration: {error}") from None


def tokenizer_texts(tokenizer: Tokenizer, names: SpecialTokens = USUAL) -> dict[str, str]:
    """The texts of tokenizer.json and tokenizer_config.json, by file name."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": names.end,
        "pad_token": names.pad,
        "extra_special_tokens": [name for role, name in asdict(names).items() if role not in ("end", "pad")],
        "clean_up_tokenization_spaces": False,
        "chat_template": names.chat_template(),
        "special_token_roles": asdict(names),
    }
    return {TOKENIZER: tokenizer.to_str(pretty=True), TOKENIZER_CONFIG: json.dumps(config, indent=1) + "\n"}


def save_tokenizer(folder: Path, tokenizer: Tokenizer, names: SpecialTokens = USUAL) -> None:
    """Writes the two files from which this project and transformers' AutoTokenizer read a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_files({folder / name: text_writer(text) for name, text in tokenizer_texts(tokenizer, names).items()})


def tokenizer_sha256(tokenizer: Tokenizer) -> str:
    """The hash of the tokenizer.json that `save_tokenizer` writes."""
    return hashlib.sha256(tokenizer.to_str(pretty=True).encode()).hexdigest()


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id, which is more than the number of entries where ids are left out."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def document_encoder(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that encodes every text as text: what spells a special token too, uncut, nothing added."""
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    plain.no_truncation()
    plain.no_padding()
    return plain


def encode_texts(encoder: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text, by an encoder of `document_encoder`; on all cores unless TOKENIZERS_PARALLELISM=false."""
    return [encoding.ids for encoding in encoder.encode_batch_fast(list(texts), add_special_tokens=False)]
