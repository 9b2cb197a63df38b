"""Tokenizers: trained, adopted, saved, and read again here and by transformers."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from laneformer.data.specials import USUAL, Specials, SpecialTokens, TokenizerError
from laneformer.data.tokenizer import (
    adopt_tokenizer,
    document_encoder,
    encode_texts,
    read_tokenizer,
    save_tokenizer,
    train_tokenizer,
    vocab_size,
)

CODE = [
    "def f(x):\n        return x + 1234\n\n\nclass A:\n    pass\n" * 5,
    "naïve ☃\r\n\tend",
    "x = '<|im_end|>'  # text",
]

# As DeepSeek spells it: fullwidth bars and a low block.
DEEPSEEK = "<\uff5cfim\u2581begin\uff5c>"


def foreign(path, added=(), vocab=()):
    """A byte-level tokenizer of another project."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate([*letters, *vocab])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(added))
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_the_special_tokens_come_first_in_the_order_of_their_contract():
    tokenizer = train_tokenizer(CODE, 300)
    assert Specials.of(tokenizer) == Specials(0, 1, 2, 3, 4, 5, 6)
    spelt = "<|endoftext|> <|pad|> <|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|im_start|> <|im_end|>"
    assert [tokenizer.id_to_token(number) for number in range(7)] == spelt.split()
    assert vocab_size(tokenizer) == 300


def test_training_twice_gives_the_same_tokenizer_whatever_the_order_of_the_texts():
    first = train_tokenizer(CODE, 310).to_str()
    assert first == train_tokenizer(iter(CODE), 310).to_str() == train_tokenizer(CODE[::-1], 310).to_str()


def test_indentation_is_one_token_digits_stand_alone_and_a_line_starts_a_token():
    tokenizer = train_tokenizer(CODE * 3, 400)
    pieces = tokenizer.encode("def f(x):\n        return 1234\n").tokens
    assert "Ġ" * 7 in pieces and "Ġreturn" in pieces
    assert [piece for piece in pieces if piece.strip("Ġ").isdigit()] == ["1", "2", "3", "4"]
    assert not [piece for piece in tokenizer.get_vocab() if "Ċ" in piece.rstrip("Ċ")]


@pytest.mark.parametrize("text", CODE + ["", "\x00\x7f", "😀" * 3, "<|endoftext|><|fim_middle|>"])
def test_documents_decode_to_themselves_and_hold_no_special_token(text):
    tokenizer = train_tokenizer(CODE, 300)
    (ids,) = encode_texts(document_encoder(tokenizer), [text])
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert min(ids, default=7) >= 7


def test_a_cut_or_padding_in_the_file_does_not_reach_documents():
    tokenizer = train_tokenizer(CODE, 300)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9, pad_id=1)
    (ids,) = encode_texts(document_encoder(tokenizer), [CODE[0]])
    assert tokenizer.decode(ids) == CODE[0]


def test_a_vocabulary_that_cannot_hold_the_bytes_says_what_it_needs():
    with pytest.raises(TokenizerError, match=r"is 262, but 256 bytes and 7 special tokens need 263"):
        train_tokenizer(CODE, 262)
    assert vocab_size(train_tokenizer(CODE, 263)) == 263


def test_adopting_keeps_every_id_and_adds_only_what_is_missing(tmp_path):
    path = foreign(tmp_path / "a", added=["<|endoftext|>", AddedToken(DEEPSEEK, special=False, rstrip=True)])
    before = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer, names = adopt_tokenizer(path, {"fim_prefix": DEEPSEEK})
    assert names == SpecialTokens(fim_prefix=DEEPSEEK)
    assert Specials.of(tokenizer, names) == Specials(256, 258, 257, 259, 260, 261, 262)
    assert {name: number for name, number in tokenizer.get_vocab().items() if number < 258} == before.get_vocab()


def test_an_ordinary_token_that_is_made_special_is_text_where_a_document_spells_it(tmp_path):
    path = foreign(tmp_path / "a", added=[AddedToken("<hole>", special=False, rstrip=True)], vocab=["<end>"])
    tokenizer, names = adopt_tokenizer(path, {"fim_middle": "<hole>", "end": "<end>"})
    assert tokenizer.encode("a<hole> <end>").ids[1] == Specials.of(tokenizer, names).fim_middle
    flags = {token.content: (token.special, token.rstrip) for token in tokenizer.get_added_tokens_decoder().values()}
    assert flags["<hole>"] == flags["<end>"] == (True, False)
    (ids,) = encode_texts(document_encoder(tokenizer), ["a<hole> <end>"])
    assert max(ids) < 256 and tokenizer.decode(ids) == "a<hole> <end>"


def test_what_cannot_be_adopted_is_named(tmp_path):
    path = foreign(tmp_path / "a")
    for names, message in [
        ({"end": "</s>"}, "has no token '</s>' to be the special end"),
        ({"im_end": "<s>"}, "has no token '<s>' to be the special im_end"),
    ]:
        with pytest.raises(TokenizerError, match=message):
            adopt_tokenizer(path, names)
    with pytest.raises(TokenizerError, match="'stop' is no special token's role; expected one of end, pad"):
        SpecialTokens.of({"stop": "a"})
    with pytest.raises(TokenizerError, match="one spelling"):
        SpecialTokens.of({"end": "a", "im_end": "a"})
    with pytest.raises(TokenizerError, match=r"lacks the special tokens end \(<\|endoftext\|>\), pad"):
        read_tokenizer(path)
    with pytest.raises(TokenizerError, match="does not exist"):
        adopt_tokenizer(tmp_path / "none")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is not a tokenizer"):
        adopt_tokenizer(tmp_path / "bad.json")


def test_the_spellings_are_read_back_from_the_folder(tmp_path):
    tokenizer, names = adopt_tokenizer(foreign(tmp_path / "a", added=["</s>"]), {"end": "</s>", "pad": "</s>"})
    save_tokenizer(tmp_path / "b", tokenizer, names)
    again, spelt = read_tokenizer(tmp_path / "b")
    assert spelt == names and again.to_str() == tokenizer.to_str()
    assert Specials.of(again, spelt).end == Specials.of(again, spelt).pad == 256
    # Adopting it once more changes nothing.
    assert adopt_tokenizer(tmp_path / "b")[0].to_str() == tokenizer.to_str()


def test_ids_that_are_left_out_count_for_the_vocabulary_size(tmp_path):
    document = json.loads((foreign(tmp_path / "a") / "tokenizer.json").read_text())
    document["added_tokens"] = [
        {"id": 300, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": True}
    ]
    document["model"]["vocab"]["</s>"] = 300
    assert vocab_size(Tokenizer.from_str(json.dumps(document))) == 301


@pytest.mark.parametrize("adopted", [False, True])
def test_transformers_loads_the_same_tokenizer(tmp_path, monkeypatch, adopted):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if adopted:
        tokenizer, names = adopt_tokenizer(
            foreign(tmp_path / "a", added=["<e'>", "<i>"]), {"end": "<e'>", "im_end": "<i>"}
        )
    else:
        tokenizer, names = train_tokenizer(CODE, 300), USUAL
    save_tokenizer(tmp_path / "b", tokenizer, names)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    specials = Specials.of(tokenizer, names)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (specials.end, specials.pad)
    assert set(theirs.all_special_tokens) == set(asdict(names).values())
    for text in CODE[:2]:
        assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
        assert theirs.decode(theirs(text)["input_ids"]) == text
    prompt = theirs.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True)
    assert prompt == f"<|im_start|>user\na{names.im_end}\n<|im_start|>assistant\n"
