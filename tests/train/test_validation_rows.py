"""Held-out rows: every token a target once, and the bytes of exactly the text that is measured."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from shard_folders import (
    END,
    TEXTS,
    counting,
    small_tokenizer,
    text_folder,
    text_manifest,
    two_sources,
)

from laneformer.data.shards import ShardWriter, write_manifest
from laneformer.data.tokenizer import save_tokenizer
from laneformer.train.loss import IGNORED
from laneformer.train.validation import validation_rows

TOKENIZER = small_tokenizer()


def targets_of(rows):
    targets = rows.targets_NS.flatten()
    return targets[targets != IGNORED].tolist()


@pytest.fixture
def folder(tmp_path):
    return two_sources(tmp_path)


def ended(*documents):
    return [token for ids in documents for token in [*ids, END]]


@pytest.mark.parametrize("length", [1, 4, 7, 100])
def test_every_token_of_the_valid_split_is_a_target_once(folder, length):
    rows = validation_rows([folder], length, 10_000)
    assert list(rows) == ["code", "prose"]
    assert targets_of(rows["code"]) == ended(*counting(100, [5, 9]), *counting(200, [4, 3]))
    assert targets_of(rows["prose"]) == ended(*counting(300, [2, 30]))
    assert (rows["code"].num_bytes, rows["prose"].num_bytes) == (42, 64)
    assert rows["code"].inputs_NS.shape[1] == length


def test_documents_are_told_apart_unless_the_mask_is_off(folder):
    rows = validation_rows([folder], 8, 10_000)["code"]
    assert rows.documents_NS.tolist() == [[0] * 6 + [1] * 2, [0] * 8, [0] * 5 + [1] * 3, [0] + [1] * 7]
    assert rows.inputs_NS[2].tolist() == [END, 200, 201, 202, 203, END, 204, 205]
    plain = validation_rows([folder], 8, 10_000, document_mask=False)["code"]
    assert plain.documents_NS is None and torch.equal(plain.targets_NS, rows.targets_NS)


@pytest.mark.parametrize(
    ("limit", "documents", "num_bytes"),
    [(10, 1, 10), (27, 1, 10), (28, 2, 28), (35, 2, 28), (36, 3, 36), (41, 3, 36), (42, 4, 42), (43, 4, 42)],
)
def test_whole_documents_are_taken_up_to_the_limit_and_their_bytes_counted(folder, limit, documents, num_bytes):
    rows = validation_rows([folder], 7, limit)["code"]
    assert targets_of(rows) == ended(*[*counting(100, [5, 9]), *counting(200, [4, 3])][:documents])
    assert rows.num_bytes == num_bytes


@pytest.mark.parametrize("limit", range(1, 40))
def test_a_first_document_beyond_the_limit_is_cut_behind_a_whole_character(tmp_path, limit):
    text = TEXTS[1]
    rows = validation_rows([text_folder(tmp_path, TOKENIZER, [text, "next"], split="valid")], 7, limit)["text"]
    ids = targets_of(rows)
    whole = TOKENIZER.encode(text).ids
    assert ids == whole[: len(ids)]
    measured = TOKENIZER.decode(ids)
    assert text.startswith(measured) and rows.num_bytes == len(measured.encode())
    if limit > 3:
        assert rows.num_bytes <= limit
        # The next whole character would go beyond the limit.
        texts = (TOKENIZER.decode(whole[:count]) for count in range(len(ids) + 1, len(whole)))
        longer = next(text for text in texts if not text.endswith("\ufffd"))
        assert len(longer.encode()) > limit


def test_with_a_learn_mask_only_what_is_learnt_counts_without_special_tokens(tmp_path):
    manifest = text_manifest(TOKENIZER, [])
    writer = ShardWriter(tmp_path, "chat", "chat", "valid", 300, manifest.end_id)
    start, stop = manifest.special_tokens["im_start"], manifest.special_tokens["im_end"]
    question, answer, more = (TOKENIZER.encode(text).ids for text in ("what is it?", "café 雪", "yes"))
    ids = [start, *question, stop, *answer, stop, *question, *more]
    learn = [0] * (len(question) + 2) + [1] * (len(answer) + 1) + [0] * len(question) + [1] * len(more) + [1]
    writer.add(ids, 999, learn)
    nothing = ShardWriter(tmp_path, "mute", "mute", "valid", 300, manifest.end_id)
    nothing.add(question, 11, [0] * (len(question) + 1))
    save_tokenizer(tmp_path, TOKENIZER)
    write_manifest(tmp_path, text_manifest(TOKENIZER, [writer.close(), nothing.close()]))
    rows = validation_rows([tmp_path], 6, 10_000)
    assert list(rows) == ["chat"], "a source without a byte to measure is left out"
    assert targets_of(rows["chat"]) == [*answer, stop, *more, manifest.end_id]
    assert rows["chat"].num_bytes == len("café 雪yes".encode())
    assert rows["chat"].inputs_NS.flatten()[: len(ids) + 1].tolist() == [manifest.end_id, *ids]


def test_a_changed_shard_is_refused(folder):
    path = folder / "v1.tokens.bin"
    content = np.fromfile(path, np.uint16)
    content[2] += 1
    content.tofile(path)
    with pytest.raises(ValueError, match=r"v1.tokens.bin was changed"):
        validation_rows([folder], 7, 10_000)
