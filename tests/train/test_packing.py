"""Packed rows: every token a target once, documents told apart by their index, padding that nothing learns from."""

from __future__ import annotations

import numpy as np
import pytest
from shard_folders import END, counting, finish, write_shard

from laneformer.data.shards import open_shard, read_manifest
from laneformer.train.folders import read_folders
from laneformer.train.loss import IGNORED
from laneformer.train.packing import SourceWindows, Stream, document_numbers, num_windows

PAD = 1


def stream_of(folder, documents, learn=None):
    finish(folder, [write_shard(folder, "one", "code", documents, learn=learn)])
    manifest = read_manifest(folder)
    return Stream(open_shard(folder, manifest.shards[0], manifest), PAD)


def rows_of(stream, length):
    return [stream.row(window, length) for window in range(num_windows(len(stream.tokens), length))]


@pytest.mark.parametrize("length", [1, 4, 7, 21, 22, 23, 50])
def test_every_token_but_the_first_is_a_target_once_behind_the_one_before_it(tmp_path, length):
    stream = stream_of(tmp_path, counting(100, [5, 1, 9, 3]))
    rows = rows_of(stream, length)
    tokens = stream.tokens.tolist()
    assert len(tokens) == 23
    inputs, targets = (np.concatenate([getattr(row, name) for row in rows]) for name in ("inputs_S", "targets_S"))
    assert targets[targets != IGNORED].tolist() == tokens[1:] and (targets[:22] != IGNORED).all()
    assert inputs[:22].tolist() == tokens[:-1]
    assert (inputs[22:] == PAD).all() and sum(row.filled for row in rows) == 22
    assert all(row.inputs_S.shape == row.targets_S.shape == row.documents_S.shape == (length,) for row in rows)


def naive_numbers(ends, start, count):
    documents = [
        next(d for d, end in enumerate(ends) if end > target) for target in range(start + 1, start + count + 1)
    ]
    return [document - documents[0] for document in documents]


def test_documents_are_numbered_by_the_index_whatever_window_is_taken():
    ends = np.array([3, 4, 9, 10, 11, 20])
    for start in range(19):
        for count in range(1, 20 - start):
            assert document_numbers(ends, start, count).tolist() == naive_numbers(ends, start, count), (start, count)


def test_the_end_token_in_front_of_a_document_belongs_to_it(tmp_path):
    row = stream_of(tmp_path, [[10, 11], [12], [], [13, 14, 15]]).row(0, 10)
    assert row.inputs_S.tolist() == [END, 10, 11, END, 12, END, END, 13, 14, 15]
    assert row.documents_S.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 3, 3]


def test_a_document_that_holds_the_end_token_itself_stays_one(tmp_path):
    row = stream_of(tmp_path, [[10, END, 11, END], [12, 13]]).row(0, 7)
    assert row.documents_S.tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_padding_is_a_document_of_its_own(tmp_path):
    row = stream_of(tmp_path, [[10, 11], [12]]).row(0, 9)
    assert row.documents_S.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert row.targets_S.tolist() == [10, 11, END, 12, END, *[IGNORED] * 4]


def test_what_the_learn_mask_leaves_out_is_no_target_but_still_an_input(tmp_path):
    stream = stream_of(tmp_path, [[10, 11, 12], [13, 14]], learn=[[0, 1, 1, 0], [1, 0, 1]])
    first, second = rows_of(stream, 4)
    assert first.targets_S.tolist() == [IGNORED, 11, 12, IGNORED]
    assert second.targets_S.tolist() == [13, IGNORED, END, IGNORED]
    assert first.inputs_S.tolist() == [END, 10, 11, 12] and second.inputs_S.tolist() == [END, 13, 14, PAD]
    assert first.masked and second.masked


def test_the_windows_of_a_source_are_numbered_through_its_shards(tmp_path):
    shards = [write_shard(tmp_path, f"s{n}", "code", counting(100 * n, [n + 4])) for n in range(4)]
    places = read_folders([finish(tmp_path, shards)]).places("train")["code"]
    windows = SourceWindows(places, 3)
    found = [windows.find(window) for window in range(windows.count)]
    # Shard n has n + 5 targets.
    expected = [(f"s{shard}", number) for shard, count in enumerate([2, 2, 3, 3]) for number in range(count)]
    assert [(place.info.name, number) for place, number in found] == expected
