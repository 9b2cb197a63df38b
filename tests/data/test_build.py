"""The quick path: which files are read and held out, and the folder of shards that they become."""

from __future__ import annotations

import json

import numpy as np
import pytest

from laneformer.data.build import EXCLUDE, SUFFIXES, build_shards
from laneformer.data.held_out import HASHES, content_hash, held_out_below
from laneformer.data.naming import shard_stem
from laneformer.data.shards import file_sha256, open_shard, read_manifest
from laneformer.data.text_files import find_files, first_bytes, read_documents, split_text
from laneformer.data.tokenizer import read_tokenizer, save_tokenizer, train_tokenizer


def write(folder, texts):
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def read(corpus, fraction=0.05):
    return read_documents(corpus, SUFFIXES, EXCLUDE, fraction)


def decoded(folder):
    """The documents of each split, decoded."""
    manifest, (tokenizer, _) = read_manifest(folder), read_tokenizer(folder)
    found = {}
    for info in manifest.shards:
        shard = open_shard(folder, info, manifest)
        ends = shard.documents[:, 0]
        assert shard.tokens[0] == manifest.end_id and (shard.tokens[ends - 1] == manifest.end_id).all()
        starts = [1, *ends[:-1]]
        texts = [tokenizer.decode(shard.tokens[a : b - 1], False) for a, b in zip(starts, ends, strict=True)]
        assert [len(text.encode()) for text in texts] == shard.documents[:, 1].tolist()
        found[info.split] = texts
    return found


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
        read(write(tmp_path / "bad", {"a.txt": b"\xff\xfe", "b.txt": b""}))


def test_what_is_held_out_depends_on_content_alone_and_is_never_learnt(tmp_path):
    texts = [f"text number {n}\n" * 3 for n in range(20)]
    one = write(tmp_path / "one", {f"{n:02}.txt": text for n, text in enumerate(texts)})
    two = write(tmp_path / "two", {f"{99 - n}.txt": text for n, text in enumerate(texts)})
    write(two, {"copy.txt": texts[4], "copy2.txt": texts[7], "latin.txt": b"\xe9t\xe9", "empty.txt": b""})
    first, second = read(one, 0.25), read(two, 0.25)
    assert len(first.valid) == 5 and first.valid == second.valid
    assert sorted(first.train) == sorted(second.train) == sorted(set(texts) - set(first.valid))
    assert (second.duplicates, second.not_utf8, second.empty) == (2, 1, 1)
    assert "left out: 2 duplicate, 1 not UTF-8, 1 empty" in second.summary()


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_at_least_one_document_lies_on_either_side(tmp_path, fraction):
    documents = read(write(tmp_path, {f"{n}.txt": f"{n}" for n in range(3)}), fraction)
    assert len(documents.train) + len(documents.valid) == 3 and documents.train and documents.valid


def test_a_single_file_is_held_out_from_a_line_on(tmp_path):
    text = "".join(f"{n}\n" for n in range(100, 200))
    documents = read(write(tmp_path, {"one.txt": text}) / "one.txt", 0.1)
    assert documents.train[0] + documents.valid[0] == text
    assert documents.valid[0].splitlines() == [str(n) for n in range(190, 200)]
    with pytest.raises(ValueError, match="no line to cut"):
        split_text("all on one line", 0.5)


def test_text_is_limited_in_bytes_and_no_character_is_cut():
    assert first_bytes(["abc", "déf", "ghi"], 5) == ["abc", "d"]
    assert first_bytes(["abc", "déf", "ghi"], 6) == ["abc", "dé"]
    assert first_bytes(["abc"], 100) == ["abc"]


@pytest.mark.parametrize("fraction", [0, 1e-9, 0.05, 0.5, 0.999])
@pytest.mark.parametrize("count", [1, 2, 3, 400])
def test_a_share_of_the_hashes_is_held_out_and_something_stays_on_either_side(fraction, count):
    hashes = [content_hash(f"{n}") for n in range(count)]
    below = held_out_below(fraction, min(hashes), max(hashes))
    held_out = sum(number < below for number in hashes)
    if count == 1 or fraction == 0:
        assert held_out == 0
    else:
        assert 1 <= held_out <= count - 1
    if count == 400 and fraction in (0.05, 0.5):
        assert held_out == sum(number / HASHES < fraction for number in hashes)
        assert abs(held_out - fraction * count) < 6 * (count * fraction * (1 - fraction)) ** 0.5


def test_shards_hold_the_texts_of_both_sides(tmp_path):
    texts = {f"{n}.py": f"def f{n}():\n    return '<|endoftext|> é☃ {n}'\n" for n in range(9)}
    write(tmp_path / "corpus", texts)
    built = build_shards(tmp_path / "corpus", tmp_path / "deep" / "out", vocab_size=280, valid_fraction=0.3)
    expected = read(tmp_path / "corpus", 0.3)
    assert decoded(tmp_path / "deep" / "out") == {"train": expected.train, "valid": expected.valid}
    manifest = built.manifest
    assert (manifest.vocab_size, manifest.end_id, manifest.dtype, len(expected.valid)) == (280, 0, "uint16", 3)
    assert manifest.tokenizer_sha256 == file_sha256(tmp_path / "deep" / "out" / "tokenizer.json")
    assert "6 documents" in built.summary and "3 held out" in built.summary and "bytes a token" in built.summary
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_the_tokenizer_sees_nothing_that_is_held_out(tmp_path):
    texts = {f"{letter}.py": f"zq{letter}" * 40 for letter in "abcdef"}
    write(tmp_path / "corpus", texts)
    build_shards(tmp_path / "corpus", tmp_path / "out", vocab_size=900, valid_fraction=0.2)
    expected = train_tokenizer(read(tmp_path / "corpus", 0.2).train, 900)
    assert read_tokenizer(tmp_path / "out")[0].to_str() == expected.to_str()


def test_the_same_inputs_are_used_again_and_others_rebuild(tmp_path):
    corpus = write(tmp_path / "corpus", {f"{n}.py": f"x = {n}\n" for n in range(4)})
    out = tmp_path / "out"
    assert not build_shards(corpus, out, vocab_size=263).reused
    when = (out / "manifest.json").stat().st_mtime_ns
    assert build_shards(corpus, out, vocab_size=263).reused
    assert (out / "manifest.json").stat().st_mtime_ns == when
    for change in ({"vocab_size": 264}, {"valid_fraction": 0.6}, {"source": "other"}):
        assert not build_shards(corpus, out, **{"vocab_size": 263, **change}).reused
    write(corpus, {"4.py": "x = 4\n"})
    assert not build_shards(corpus, out, vocab_size=263).reused
    (out / "manifest.json").unlink()
    assert not build_shards(corpus, out, vocab_size=263).reused


def test_an_adopted_tokenizer_makes_the_shards(tmp_path):
    save_tokenizer(tmp_path / "tokenizer", train_tokenizer(["x = 12345\n"] * 3, 280))
    corpus = write(tmp_path / "corpus", {f"{n}.py": f"x = {n}\n" for n in range(4)})
    built = build_shards(corpus, tmp_path / "out", tokenizer=tmp_path / "tokenizer")
    assert file_sha256(tmp_path / "out/tokenizer.json") == file_sha256(tmp_path / "tokenizer/tokenizer.json")
    assert built.manifest.tokenizer_sha256 == file_sha256(tmp_path / "tokenizer/tokenizer.json")
    with pytest.raises(ValueError, match="copy it elsewhere"):
        build_shards(corpus, tmp_path / "out", tokenizer=tmp_path / "out", valid_fraction=0.4)


def test_a_folder_of_something_else_and_a_failed_build_change_nothing(tmp_path):
    corpus = write(tmp_path / "corpus", {f"{n}.py": f"x = {n}\n" for n in range(4)})
    write(tmp_path / "out", {"thesis.txt": "years"})
    with pytest.raises(ValueError, match="not made here"):
        build_shards(corpus, tmp_path / "out", vocab_size=263)
    build_shards(corpus, tmp_path / "good", vocab_size=263)
    with pytest.raises(ValueError, match="need 263"):
        build_shards(corpus, tmp_path / "good", vocab_size=5)
    assert json.loads((tmp_path / "good" / "manifest.json").read_text())["vocab_size"] == 263
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["corpus", "good", "out"]


def test_sources_that_no_file_can_be_named_after_stay_apart():
    names = {shard_stem(source, "train", 0, 3) for source in ("a/b", "a:b", "a-b", "../b", ".b", "é")}
    assert len(names) == 6 and not any("/" in name or name.startswith(".") for name in names)
    assert shard_stem("the-stack_v2.py", "valid", 7, 12) == "the-stack_v2.py-valid-00007-0012"


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path):
    tokenizer = train_tokenizer(["a b c"], 263)
    tokenizer.add_tokens([f"<{n}>" for n in range(2**16)])
    save_tokenizer(tmp_path / "tokenizer", tokenizer)
    corpus = write(tmp_path / "corpus", {"a.py": f"a<{2**16 - 1}>", "b.py": f"b<{2**16 - 2}>"})
    manifest = build_shards(corpus, tmp_path / "out", tokenizer=tmp_path / "tokenizer").manifest
    assert manifest.dtype == "uint32"
    shards = [open_shard(tmp_path / "out", info, manifest) for info in manifest.shards]
    assert all(shard.tokens.dtype == np.uint32 and shard.tokens[2] > 2**16 for shard in shards)
