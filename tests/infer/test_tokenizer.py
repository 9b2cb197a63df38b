"""Text to tokens and back: round trips, characters cut between tokens, and stop strings across them."""

from __future__ import annotations

import pytest
from texts import ODD_TEXT, train_tokenizer

from laneformer.infer.tokenizer import StopTexts, Text, TextError, cut_at_stop


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(folder)
    return Text.from_folder(folder)


def test_text_survives_the_round_trip(text):
    for sample in ("def fib(n):\n    return n", ODD_TEXT, " leading and trailing ", "\t\n\n"):
        assert text.decode(text.encode(sample)) == sample


def test_special_tokens_are_left_out_of_the_text(text):
    end = text.tokenizer.token_to_id("<end>")
    assert text.decode([*text.encode("ab"), end, *text.encode("cd")]) == "abcd"


def test_a_stream_gives_the_whole_text_and_never_half_a_character(text):
    ids = text.encode(ODD_TEXT)
    complete = text.stream()
    pieces = [complete(i) for i in ids]
    assert "".join(pieces) == ODD_TEXT
    assert "" in pieces, "this test needs characters that are cut between tokens"
    assert all("\ufffd" not in piece for piece in pieces)


def test_two_streams_do_not_share_what_is_pending(text):
    ids = text.encode("é")
    assert len(ids) > 1
    one, other = text.stream(), text.stream()
    assert one(ids[0]) == ""
    assert "".join(other(i) for i in text.encode("ab")) == "ab"
    assert one(ids[1]) == "é"


@pytest.mark.parametrize("stop", ["return", "n):\n", "é", "日本", "  ", "x"])
def test_a_stop_string_is_found_with_the_token_that_completes_it(text, stop):
    ids = text.encode(f"def fib({ODD_TEXT} n):\n    return x")
    stops = StopTexts(text, ["never", stop])
    found = [stops.found(token) for token in ids]
    first = found.index(True)
    assert stop in text.decode(ids[: first + 1])
    assert stop not in text.decode(ids[:first])


def test_a_stop_string_may_be_spread_over_many_tokens(text):
    stop = "日本語é"
    ids = text.encode("ab" + stop)
    assert len(ids) > len(stop) + 2
    stops = StopTexts(text, [stop])
    assert [stops.found(token) for token in ids] == [False] * (len(ids) - 1) + [True]


def test_a_stop_string_that_does_not_come_is_not_found(text):
    stops = StopTexts(text, ["retturn"])
    assert not any(stops.found(token) for token in text.encode("def fib(n): return return"))


def test_text_is_cut_at_the_first_of_all_stop_strings():
    assert cut_at_stop("one two three", ["three", "two"]) == "one "
    assert cut_at_stop("one two three", ["four"]) == "one two three"
    assert cut_at_stop("one two", ["one"]) == ""
    assert cut_at_stop("one", []) == "one"


def test_an_empty_stop_string_is_refused(text):
    with pytest.raises(TextError, match="a stop string is empty"):
        StopTexts(text, ["a", ""])


def test_a_folder_without_a_tokenizer_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(TextError, match=r"tokenizer.json does not exist; copy .* or give --prompt-ids"):
        Text.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": 3}'])
def test_a_file_that_is_no_tokenizer_is_refused(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TextError, match=r"tokenizer.json is not a tokenizer"):
        Text.from_folder(tmp_path)
