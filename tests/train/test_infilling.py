"""Infilling: pieces of packed rows rearranged in place, cut anywhere between two characters."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from shard_folders import TEXTS, small_tokenizer, text_folder, text_manifest
from tokenizers import normalizers

from laneformer.data.shards import open_shard, read_manifest
from laneformer.train.infilling import Infiller, _parts
from laneformer.train.loss import IGNORED
from laneformer.train.packing import Stream, padded_row

TOKENIZER = small_tokenizer()
MANIFEST = text_manifest(TOKENIZER, [])
PREFIX, SUFFIX, MIDDLE, END = (
    MANIFEST.special_tokens[role] for role in ("fim_prefix", "fim_suffix", "fim_middle", "end")
)
LENGTH = 301


def infiller(rate=1.0, spm=0.5, tokenizer=TOKENIZER, manifest=MANIFEST):
    return Infiller(tokenizer, manifest, rate, spm)


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    folder = text_folder(tmp_path_factory.mktemp("texts"), TOKENIZER, TEXTS * 60)
    manifest = read_manifest(folder)
    return Stream(open_shard(folder, manifest.shards[0], manifest), END)


def row_of(text, *, ended=True, length=None):
    """A row of one document alone."""
    ids = [*TOKENIZER.encode(text).ids, *([END] if ended else [])]
    inputs, targets = np.array([END, *ids[:-1]]), np.array(ids)
    return padded_row(inputs, targets, np.zeros(len(ids), np.int64), length or len(ids), END)


def pieces_of(row):
    """The targets of each document in a row, its padding left out."""
    bounds = [0, *(np.flatnonzero(np.diff(row.documents_S)) + 1).tolist(), len(row.documents_S)]
    pieces = [row.targets_S[a:b].tolist() for a, b in pairwise(bounds)]
    return [piece for piece in pieces if piece[0] != IGNORED]


def taken_apart(ids):
    """Order, prefix, suffix and middle of a rearranged piece, as texts."""
    assert ids[0] == PREFIX and ids[-1] == END and ids.count(END) == 1
    suffix, middle = ids.index(SUFFIX), ids.index(MIDDLE)
    assert sorted(set(ids) & {PREFIX, SUFFIX, MIDDLE}) == sorted([PREFIX, SUFFIX, MIDDLE])
    if suffix == 1:
        return "spm", TOKENIZER.decode(ids[2:middle]), ids[middle + 1 : -1]
    return "psm", TOKENIZER.decode(ids[1:suffix]), TOKENIZER.decode(ids[suffix + 1 : middle]), ids[middle + 1 : -1]


def test_prefix_and_middle_and_suffix_are_the_text_again():
    text = TEXTS[0]
    row, orders = row_of(text), []
    for window in range(40):
        (done,) = infiller().rows([row], [(1, 0, window)])
        if done is row:
            continue
        order, *parts, last = taken_apart(done.targets_S.tolist())
        orders.append(order)
        if order == "psm":
            whole, suffix = parts[0] + TOKENIZER.decode(last), parts[1]
        else:
            whole, suffix = TOKENIZER.decode(last), parts[0]
        # The suffix gave up its end for the new tokens, the middle nothing.
        assert text.startswith(whole + suffix) and suffix and len(whole + suffix) < len(text)
        assert done.filled == len(row.inputs_S)
    assert orders.count("psm") > 8 and orders.count("spm") > 8


def test_targets_follow_their_inputs_behind_an_end_token():
    (done,) = infiller().rows([row_of(TEXTS[0])], [(1, 0, 2)])
    assert done.targets_S[0] == PREFIX and done.inputs_S[0] == END
    assert done.inputs_S[1:].tolist() == done.targets_S[:-1].tolist()


@pytest.mark.parametrize("spm", [0.0, 1.0])
def test_the_share_of_the_orders_is_kept(spm):
    rows = [row_of(TEXTS[0])] * 30
    done = infiller(spm=spm).rows(rows, [(1, 0, n) for n in range(30)])
    orders = {taken_apart(new.targets_S.tolist())[0] for new, old in zip(done, rows, strict=True) if new is not old}
    assert orders == {"spm" if spm else "psm"}


def test_the_rate_is_the_share_of_pieces_that_are_rearranged():
    text = "".join(f"{n} and so on, " for n in range(60))
    row = row_of(text)
    for rate in (0.0, 0.3):
        done = infiller(rate).rows([row] * 1000, [(9, 4, n) for n in range(1000)])
        share = sum(new is not row for new in done) / 1000
        # Four standard deviations, and the few per cent whose suffix is too short.
        assert abs(share - rate) <= 4 * np.sqrt(rate * (1 - rate) / 1000) + 0.04 * rate


def test_cuts_are_uniform_over_the_places_between_characters_and_fall_inside_tokens():
    assert _parts("abc", (0, 2**64 - 1)) == ["", "abc", ""]
    assert _parts("abc", (2**64 - 1, 2**62)) == ["a", "bc", ""]
    places = [len(_parts("abcd", (n * 2**64 // 1000 + 1, 0))[1]) for n in range(1000)]
    assert np.bincount(places).tolist() == [200] * 5
    row, inside = row_of(TEXTS[0]), 0
    starts = set(np.cumsum([len(TOKENIZER.decode([token])) for token in row.targets_S]).tolist())
    for window in range(20):
        (done,) = infiller(spm=0.0).rows([row], [(1, 0, window)])
        if done is not row:
            inside += len(taken_apart(done.targets_S.tolist())[1]) not in {0, *starts}
    assert inside > 3


def test_only_chosen_pieces_change_and_nothing_moves(stream):
    rows = [stream.row(window, LENGTH) for window in range(12)]
    done = infiller(0.5).rows(rows, [(1, 0, window) for window in range(12)])
    changed = kept = 0
    for old, new in zip(rows, done, strict=True):
        for before, after in zip(pieces_of(old), pieces_of(new), strict=True):
            assert len(before) == len(after)
            kept, changed = kept + (before == after), changed + (before != after)
            if before != after:
                taken_apart(after)
        # Each document starts behind an end token, those inside the row and those that are rearranged.
        starts = np.flatnonzero(np.diff(new.documents_S)) + 1
        assert (new.inputs_S[starts] == END).all()
        inside = np.setdiff1d(np.arange(1, LENGTH), starts)
        assert (new.inputs_S[inside] == new.targets_S[inside - 1]).all()
        assert new.inputs_S[0] == (END if new.targets_S[0] == PREFIX else old.inputs_S[0])
    assert changed > 20 and kept > 20


def test_a_piece_from_inside_a_document_stands_between_end_tokens_all_the_same():
    row = row_of(TEXTS[0], ended=False)
    row = replace(row, inputs_S=np.array([77, *row.inputs_S[1:]]))
    (done,) = infiller().rows([row], [(1, 0, 2)])
    taken_apart(done.targets_S.tolist())
    assert done.inputs_S[0] == END and done.targets_S[-1] == END and done.filled == len(row.inputs_S)


def test_draws_depend_on_every_part_of_the_key_and_on_the_piece():
    row = row_of(TEXTS[0])
    keys = [(1, 0, 2), (2, 0, 2), (1, 1, 2), (1, 0, 3)]
    done = [new.targets_S.tolist() for new in infiller().rows([row] * 4, keys)]
    assert len({tuple(ids) for ids in done}) == 4
    assert infiller().rows([row], [(1, 0, 2)])[0].targets_S.tolist() == done[0]
    twice = replace(
        row,
        inputs_S=np.tile(row.inputs_S, 2), targets_S=np.tile(row.targets_S, 2),
        documents_S=np.repeat([0, 1], row.filled), filled=2 * row.filled,
    )  # fmt: skip
    first, second = pieces_of(infiller().rows([twice], [(1, 0, 2)])[0])
    assert first == done[0] and second != first


def test_what_cannot_be_an_example_is_left_alone():
    text = TEXTS[0]
    snow = TOKENIZER.encode("雪の日は雪の日は雪の日").ids
    broken = padded_row(
        np.array([END, *snow[1:-1]]), np.array(snow[1:]), np.zeros(len(snow) - 1, int), len(snow) - 1, END
    )
    spelt = row_of(text)
    spelt.targets_S[5] = MANIFEST.special_tokens["im_start"]
    for row in [
        row_of("nine char"),
        replace(row_of(text), masked=True),
        row_of(text, length=200),
        broken,
        spelt,
    ]:
        for window in range(20):
            assert infiller().rows([row], [(1, 0, window)])[0] is row


def test_a_suffix_too_short_to_make_room_leaves_the_piece_alone():
    filler, row = infiller(spm=0.0), row_of(TEXTS[0])
    (piece,) = filler._drawn(row, 0, (1, 0, 2))
    room = row.filled
    assert filler._arranged(piece, [50] * (room - 10), [51] * 6, [52] * 3) is None
    done = filler._arranged(piece, [50] * (room - 11), [51] * 6, [52] * 4)
    assert done == [PREFIX, *[50] * (room - 11), SUFFIX, 52, MIDDLE, *[51] * 6, END]


def test_a_piece_that_comes_out_shorter_leaves_padding_behind_the_row():
    filler, row = infiller(), row_of(TEXTS[0])
    (piece,) = filler._drawn(row, 0, (1, 0, 2))
    done = filler._rebuilt(row, [(piece, [PREFIX, 50, SUFFIX, MIDDLE, END])])
    assert done.filled == 5 and done.inputs_S[:6].tolist() == [END, PREFIX, 50, SUFFIX, MIDDLE, END]
    assert done.targets_S[:5].tolist() == [PREFIX, 50, SUFFIX, MIDDLE, END] and (done.targets_S[5:] == IGNORED).all()
    assert done.documents_S.tolist() == [0] * 5 + [1] * (row.filled - 5)


def test_a_tokenizer_that_cannot_serve_is_refused():
    with pytest.raises(ValueError, match=r"no fim_prefix, fim_suffix, fim_middle token; set data\.infilling=0"):
        infiller(manifest=replace(MANIFEST, special_tokens={"end": 0}))
    lower = small_tokenizer()
    lower.normalizer = normalizers.NFC()
    with pytest.raises(ValueError, match="does not give text back"):
        infiller(tokenizer=lower)
