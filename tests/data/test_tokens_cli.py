"""The token commands: what they print, and the exit code of a user's mistake."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from laneformer.data.shards import read_manifest
from laneformer.data.tokenizer import read_tokenizer, save_tokenizer, train_tokenizer
from laneformer.tools.tokens_cli import register

app = typer.Typer()
register(app)


def run(*arguments, code=0):
    """Everything that a command prints."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "documents").mkdir(parents=True)
    lines = [{"text": f"def f{n}():\n    return {n} # é\n", "metadata": {"source": "code"}} for n in range(40)]
    (folder / "documents" / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_corpus_becomes_shards_step_by_step(tmp_path, corpus):
    pytest.importorskip("datatrove")
    said = run("train-tokenizer", corpus, tmp_path / "tokenizer", "--vocab-size", "275")
    assert ": 275 entries from 0.0 MB, " in said and "bytes a token" in said
    said = run("tokenize", corpus, tmp_path / "out", "--tokenizer", tmp_path / "tokenizer", "--valid-fraction", "0.2")
    assert "tokens/s" in said and "MB/s" in said and "code" in said
    manifest = read_manifest(tmp_path / "out")
    assert sum(shard.num_documents for shard in manifest.shards) == 40
    said = run("tokenize", corpus, tmp_path / "out", "--tokenizer", tmp_path / "tokenizer", "--valid-fraction", "0.2")
    assert "already" in said
    said = run("tokenize", corpus, tmp_path / "out", "--tokenizer", tmp_path / "tokenizer", code=2)
    assert "valid_fraction was 0.2, is 0.05" in said and "Traceback" not in said


def test_inspect_shows_counts_and_decoded_documents(tmp_path, corpus):
    from laneformer.data.build import build_shards

    (corpus / "a.py").write_text("print('hello')\n" * 3)
    (corpus / "b.py").write_text("print('hello')\n")
    manifest = build_shards(corpus, tmp_path / "out", vocab_size=270, suffixes=(".py",)).manifest
    said = run("inspect", tmp_path / "out", "--sample", "2")
    tokens = {shard.split: shard.num_tokens for shard in manifest.shards}
    # The first token of a shard is predicted from nothing, so it is no target.
    for split, number in tokens.items():
        assert f" {number} " in said and f" {number - 1} " in said, split
    assert "270" in said and "<|endoftext|> = 0" in said and manifest.tokenizer_sha256[:12] in said
    assert said.count("print('hello')") == 4 and "corpus-valid-00000-0000, document 1" in said
    path = tmp_path / "out" / "corpus-train-00000-0000.tokens.bin"
    path.write_bytes(path.read_bytes()[::-1])
    assert "its hash differs" in run("inspect", tmp_path / "out", code=2)
    assert "holds no manifest.json" in run("inspect", corpus, code=2)


def test_conversations_become_shards_of_which_part_is_learnt(tmp_path):
    save_tokenizer(tmp_path / "tokenizer", train_tokenizer(["user assistant\n"], 270))
    for name in ("a", "b"):
        talk = {"messages": [{"role": "user", "content": name}, {"role": "assistant", "content": "12345"}]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(talk) + "\n")
    files = (tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "out")
    said = run("tokenize-chat", *files, "--tokenizer", tmp_path / "tokenizer", "--valid-fraction", "0")
    # Two answers of five digits and their im_end: 12 tokens for 10 bytes.
    assert "2 conversations (0 duplicates left out)" in said and " 12 " in said and "0.83" in said
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "bot"}]}\n')
    said = run("tokenize-chat", *files, "--tokenizer", tmp_path / "tokenizer", code=2)
    assert "a.jsonl, line 1: message 1 has role 'bot'" in said.replace("\n", "")
    assert "at least one file" in run("tokenize-chat", tmp_path / "out", "--tokenizer", tmp_path / "tokenizer", code=2)


def test_a_tokenizer_is_adopted_with_its_own_end_token(tmp_path):
    tokenizer = train_tokenizer(["abc"], 263)
    tokenizer.add_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    said = run("adopt-tokenizer", tmp_path / "tokenizer.json", tmp_path / "out", "--special", "end=</s>")
    assert "264 entries, 0 of them new" in said and "end=263" in said
    assert read_tokenizer(tmp_path / "out")[1].end == "</s>"
    for given, message in [
        ("end:</s>", "is not ROLE=TOKEN"),
        ("stop=</s>", "no special token's role"),
        ("end=xyz", "no token"),
        ("end=x", "ordinary text that spells it gives it too"),
    ]:
        assert message in run(
            "adopt-tokenizer", tmp_path / "tokenizer.json", tmp_path / "x", "--special", given, code=2
        )
    assert not (tmp_path / "x").exists()


def test_the_tokenizer_does_not_see_what_tokenising_holds_out(tmp_path, corpus):
    from laneformer.data.held_out import HASHES, content_hash
    from laneformer.data.sample import spread_texts, texts

    everything = list(texts(corpus))
    assert len(everything) == 40
    size = sum(len(text.encode()) for text in everything)
    kept = spread_texts(corpus, 10 * size, 0.3)
    assert kept == [text for text in everything if content_hash(text) >= int(0.3 * HASHES)] and 15 < len(kept) < 40
    some = spread_texts(corpus, size // 4, 0.3)
    assert 2 < len(some) < 20 and set(some) < set(kept)
    (corpus / "documents" / "0.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(ValueError, match=r"0.jsonl, line 1"):
        list(texts(corpus))
