"""Text to sequences: which files, which are held out, and an order of samples that depends on nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from laneformer.train.data import (
    IGNORED,
    Windows,
    find_files,
    first_bytes,
    permuted,
    read_documents,
    split_text,
    validation_set,
)
from laneformer.train.settings import DataSettings
from laneformer.train.tokens import encode_documents, read_tokenizer, train_tokenizer

END = "<|endoftext|>"


def write(folder, texts):
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


@pytest.mark.parametrize("size", [1, 2, 3, 17, 64, 1000])
def test_each_epoch_is_a_permutation_of_its_own(size):
    epochs = [permuted(np.arange(size), size, seed=5, epoch=epoch).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(size)) for order in epochs)
    if size > 10:
        assert len({tuple(order) for order in epochs}) == 3
        assert permuted(np.arange(size), size, seed=6, epoch=0).tolist() != epochs[0]


def test_the_permutation_is_the_same_in_every_version():
    assert permuted(np.arange(11), 11, seed=3, epoch=2).tolist() == [1, 9, 8, 10, 2, 7, 0, 4, 3, 6, 5]
    large = permuted(np.arange(4), 2**40 + 7, seed=0, epoch=0)
    assert large.tolist() == [617216419816, 517082748679, 859485352522, 792820785203]


def test_every_place_gets_every_value_about_equally_often():
    size, draws = 10, 1500
    counts = np.zeros((size, size))
    for seed in range(draws):
        counts[np.arange(size), permuted(np.arange(size), size, seed, epoch=0).astype(int)] += 1
    expected = draws / size
    # 81 degrees of freedom: six standard deviations above the mean is 81 + 6 sqrt(162).
    assert ((counts - expected) ** 2 / expected).sum() < 158


@pytest.mark.parametrize("batch", [1, 4, 7, 50])
def test_the_order_of_samples_does_not_depend_on_the_batch_size(batch):
    windows = Windows(np.arange(23 * 5 + 3, dtype=np.uint16), 5, seed=1)
    whole = windows.order(0, 60)
    parts = [windows.order(at, min(batch, 60 - at)) for at in range(0, 60, batch)]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert sorted(whole[:23]) == sorted(whole[23:46]) == list(range(23))
    assert whole[:23].tolist() != whole[23:46].tolist(), "the second epoch repeats the first"


def test_every_token_but_the_first_is_a_target_once_an_epoch():
    tokens = np.arange(100, 100 + 7 * 6 + 4, dtype=np.uint16)
    windows = Windows(tokens, 6, seed=2)
    batch = windows.batch(0, windows.count)
    assert torch.equal(batch, batch[:, :1] + torch.arange(7))
    assert sorted(batch[:, 1:].flatten().tolist()) == list(range(101, 101 + 7 * 6))


def test_a_corpus_shorter_than_one_sequence_names_both_lengths():
    with pytest.raises(ValueError, match="has 6 tokens to learn, one sequence needs 7"):
        Windows(np.zeros(6, np.uint16), 6, seed=0)


def test_files_come_in_sorted_order_by_suffix_and_without_excluded_folders(tmp_path):
    write(tmp_path, {"b/z.py": "1", "b.py": "2", "a/c.py": "3", "a/c.bin": "4", ".git/d.py": "5", "b/.git/e.py": "6"})
    found = [path.relative_to(tmp_path).as_posix() for path in find_files(tmp_path, [".py"], [".git"])]
    assert found == ["a/c.py", "b/z.py", "b.py"]
    assert find_files(tmp_path / "a/c.bin", [".py"], []) == [tmp_path / "a/c.bin"]


def test_a_corpus_that_is_not_there_or_holds_nothing_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        find_files(tmp_path / "none", [".py"], [])
    with pytest.raises(ValueError, match=r"no file ending with .py"):
        find_files(write(tmp_path, {"a.txt": "x"}), [".py"], [])
    with pytest.raises(ValueError, match="none of 2 files holds UTF-8 text"):
        read_documents(write(tmp_path / "bad", {"a.txt": b"\xff\xfe", "b.txt": b""}), DataSettings())


def test_what_is_held_out_depends_on_content_alone_and_is_never_learnt(tmp_path):
    texts = [f"text number {n}\n" * 3 for n in range(20)]
    one = write(tmp_path / "one", {f"{n:02}.txt": text for n, text in enumerate(texts)})
    two = write(tmp_path / "two", {f"{99 - n}.txt": text for n, text in enumerate(texts)})
    write(two, {"copy.txt": texts[4], "copy2.txt": texts[7], "latin.txt": b"\xe9t\xe9"})
    first, second = (read_documents(folder, DataSettings(valid_fraction=0.25)) for folder in (one, two))
    assert len(first.valid) == 5 and first.valid == second.valid
    assert sorted(first.train) == sorted(second.train) == sorted(set(texts) - set(first.valid))
    assert (second.duplicates, second.not_utf8) == (2, 1)
    assert "2 duplicate, 1 not UTF-8" in second.summary()


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_at_least_one_document_lies_on_either_side(tmp_path, fraction):
    documents = read_documents(
        write(tmp_path, {f"{n}.txt": f"{n}" for n in range(3)}), DataSettings(valid_fraction=fraction)
    )
    assert len(documents.train) + len(documents.valid) == 3 and documents.train and documents.valid


def test_a_single_file_is_held_out_from_a_line_on(tmp_path):
    text = "".join(f"{n}\n" for n in range(100, 200))
    documents = read_documents(write(tmp_path, {"one.txt": text}) / "one.txt", DataSettings(valid_fraction=0.1))
    assert documents.train[0] + documents.valid[0] == text
    assert documents.valid[0].splitlines() == [str(n) for n in range(190, 200)]
    with pytest.raises(ValueError, match="no line to cut"):
        split_text("all on one line", 0.5)


def test_held_out_text_is_limited_in_bytes_and_no_character_is_cut():
    assert first_bytes(["abc", "déf", "ghi"], 5) == ["abc", "d"]
    assert first_bytes(["abc", "déf", "ghi"], 6) == ["abc", "dé"]
    assert first_bytes(["abc"], 100) == ["abc"]


def test_tokens_decode_to_the_texts_with_an_end_token_around_each():
    texts = ["def f(x):\n    return x\n", "naïve ☃\r\n\t", f"text that spells {END} is text"]
    tokenizer = train_tokenizer(texts, 300, END)
    tokens = encode_documents(tokenizer, texts, END)
    end = tokenizer.token_to_id(END)
    assert tokens.dtype == np.uint16 and (tokens[0], tokens[-1]) == (end, end)
    ends = np.flatnonzero(tokens == end)
    pieces = [tokens[a + 1 : b].tolist() for a, b in itertools.pairwise(ends)]
    assert [tokenizer.decode(piece) for piece in pieces] == texts


def test_a_large_vocabulary_takes_four_bytes_a_token():
    tokenizer = train_tokenizer(["a b c"], 257, END)
    tokenizer.add_tokens([f"<{n}>" for n in range(2**16)])
    tokens = encode_documents(tokenizer, [f"a<{2**16 - 1}>"], END)
    assert tokens.dtype == np.uint32 and tokens[2] == tokenizer.token_to_id(f"<{2**16 - 1}>") > 2**16


def test_a_tokenizer_that_cannot_serve_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"model.vocab_size is 256.*need 257"):
        train_tokenizer(["a"], 256, END)
    with pytest.raises(ValueError, match="does not exist"):
        read_tokenizer(tmp_path / "none.json", END)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        read_tokenizer(tmp_path / "bad.json", END)
    train_tokenizer(["a"], 257, "</s>").save(str(tmp_path / "other.json"))
    with pytest.raises(ValueError, match=r"has no token '<\|endoftext\|>'.*data.end_token"):
        read_tokenizer(tmp_path / "other.json", END)


def test_validation_has_every_token_after_the_first_as_a_target_once():
    valid = validation_set(np.arange(50, 50 + 12, dtype=np.uint16), 4, num_bytes=40)
    assert valid.inputs_NS.shape == valid.targets_NS.shape == (3, 4)
    kept = valid.targets_NS != IGNORED
    assert valid.targets_NS[kept].tolist() == list(range(51, 62))
    assert torch.equal(valid.targets_NS[kept], valid.inputs_NS[kept] + 1)
