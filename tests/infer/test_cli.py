"""The `infer` command as its users meet it: what it prints, its exit codes, and one plain line for every mistake."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from texts import train_tokenizer
from typer.testing import CliRunner

from laneformer import LaneConfig
from laneformer.infer import cli, figure
from laneformer.infer.tokenizer import Text

GOLDEN = Path(__file__).parents[1] / "golden"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def talker(checkpoint, tmp_path_factory):
    """A small checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("talker")
    vocabulary = train_tokenizer(folder)
    for file in checkpoint(vocab_size=vocabulary).iterdir():
        shutil.copy(file, folder)
    return folder


@pytest.fixture
def infer(monkeypatch):
    """Runs `infer` in this process; its result has exit_code, stdout and stderr."""
    monkeypatch.setattr(cli.messages, "_file", None)
    return lambda *words, stdin=None: CliRunner().invoke(cli.app, [str(word) for word in words], input=stdin)


def last_json(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_generate_continues_a_text_from_any_source_and_shows_what_it_took(infer, talker, tmp_path):
    options = ("--max-tokens", "12", "--threads", "1")
    (tmp_path / "prompt.txt").write_text("the cat")
    asked = infer("generate", talker, "--prompt", "the cat", *options, "--json", "-")
    found = last_json(asked)
    text = Text.from_folder(talker)
    assert found["prompt_tokens"] == len(text.encode("the cat")) and len(found["tokens"]) == 12
    assert asked.stdout.startswith(found["text"]) and found["text"] == "".join(map(text.stream(), found["tokens"]))
    assert (found["finish"], found["ranks"], found["runner"], found["wait_us_per_token"]) == ("length", 1, "eager", 0.0)
    assert found["ttft_ms"] > 0 and found["itl_ms"]["p50"] <= found["itl_ms"]["p99"]
    assert "12 out (length)" in asked.stderr
    read = infer("generate", talker, "--prompt-file", "-", *options, "--no-stream", stdin="the cat")
    assert read.exit_code == 0 and read.stdout == found["text"] + "\n"


def test_generate_stops_at_a_text_that_it_does_not_show_and_writes_a_file(infer, talker, tmp_path):
    (tmp_path / "prompt.txt").write_text("the cat", encoding="utf-8")
    options = ("--prompt-file", tmp_path / "prompt.txt", "--threads", "1", "--ranks", "2", "--temperature", "0.9")
    whole = last_json(infer("generate", talker, *options, "--max-tokens", "30", "--json", "-"))
    stop = whole["text"][8:11]
    shown = whole["text"][: whole["text"].index(stop)]
    result = infer(
        "generate", talker, *options, "--max-tokens", "30", "--stop", stop, "--json", tmp_path / "a" / "b.json"
    )
    assert (result.exit_code, result.stdout) == (0, shown + "\n")
    found = json.loads((tmp_path / "a" / "b.json").read_text())
    assert (found["finish"], found["text"], found["ranks"]) == ("stop_text", shown, 2)
    assert whole["tokens"][: len(found["tokens"])] == found["tokens"]


def test_generate_works_with_token_ids_where_there_is_no_tokenizer(infer):
    result = infer("generate", GOLDEN / "dtp-delay1", "--prompt-ids", "1,2,3", "--max-tokens", "5", "--threads", "1")
    assert result.exit_code == 0
    assert result.stdout == "36 92 52 95 44\n"


def test_check_tells_right_from_wrong_by_its_exit_code(infer, tmp_path):
    folder = GOLDEN / "dtp-delay1"
    right = infer("check", folder, "--expected", folder / "expected.safetensors", "--threads", "1", "--json", "-")
    verdict = last_json(right)
    assert verdict["passed"] and max(verdict["errors"].values()) < verdict["tolerance"] == 2e-4
    assert "PASS" in right.stdout
    wrong = infer("check", folder, "--schedule", "ladder", "--expected", folder / "expected.safetensors", "--json", "-")
    assert wrong.exit_code == 1 and "FAIL" in wrong.stdout
    assert not json.loads(wrong.stdout.strip().splitlines()[-1])["passed"]


def test_bench_writes_a_document_and_a_figure_and_compares_with_transformers(infer, checkpoint, tmp_path):
    folder = checkpoint(vocab_size=104, hidden_size=48)
    words = (
        "bench", folder, "--ranks", "2", "--schedules", "tensor-parallel,silent", "--link-latency", "0,300",
        "--prompt-tokens", "7", "--new-tokens", "5", "--rounds", "2", "--runner", "eager", "--threads", "1",
        "--against", "hf-generate", "--json", "-", "--figure", tmp_path / "speed.png",
    )  # fmt: skip
    result = infer(*words)
    found = last_json(result)
    rows = [(row["schedule"], row["runner"], row["link_latency_us"]) for row in found["results"]]
    assert rows == [
        ("tensor-parallel", "eager", 0.0), ("silent", "eager", 0.0), ("tensor-parallel", "eager", 300.0),
        ("silent", "eager", 300.0), ("dense", "hf-generate", 0.0),
    ]  # fmt: skip
    assert list(found["gates"]) == ["tensor-parallel, 2 ranks", "transformers", "silent, 2 ranks"]
    by_row = dict(zip(rows, found["results"], strict=True))
    assert by_row["silent", "eager", 300.0]["wait_us_per_token"] == 0
    assert by_row["tensor-parallel", "eager", 300.0]["wait_us_per_token"] > 3 * 300
    assert by_row["dense", "hf-generate", 0.0]["ratio_to_tp"]["median"] > 0
    assert (tmp_path / "speed.png").read_bytes().startswith(PNG)
    assert "Decode speed of one request" in result.stdout and "logit checks passed" in result.stdout


def test_cost_tells_parameters_and_floors(infer):
    found = last_json(infer("cost", "--preset", "2b", "--machine", "8xh200", "--json", "-"))
    assert found["parameters"]["total"] == 2_320_069_632
    assert 115 < found["floor_us"]["weights_only"] < 118
    assert list(found["schedules"]) == ["tensor-parallel", "ladder", "checkpoint", "silent"]
    small = infer("cost", "--folder", GOLDEN / "dtp-delay1", "--ranks", "2", "--schedules", "delayed:3", "--json", "-")
    assert last_json(small)["schedules"]["delayed:3"]["messages"] == 7


def mistakes():
    good = ("generate", GOLDEN / "dtp-delay1", "--prompt-ids")
    bench = ("bench", GOLDEN / "dtp-delay1", "--threads", "1")
    check = ("check", GOLDEN / "dtp-delay1", "--expected")
    return [
        (("generate", "/nowhere", "--prompt-ids", "1"), "/nowhere/config.json does not exist"),
        (("generate", GOLDEN / "dtp-delay1"), "give one of --prompt, --prompt-file and --prompt-ids"),
        ((*good, "1", "--prompt", "x"), "give one of --prompt"),
        ((*good, "1,x"), "--prompt-ids is '1,x', expected ids with commas"),
        ((*good, "1,96"), "the prompt holds ids [96] outside the vocabulary 0..95"),
        ((*good, "1", "--max-tokens", "-100"), "max_tokens must be at least 1, got -100"),
        ((*good, ",".join(["1"] * 256)), "the prompt has 256 tokens, but at most 255 fit"),
        ((*good, "1", "--ranks", "3"), "4 lanes cannot be shared equally by 3 ranks; ranks may be [1, 2, 4]"),
        ((*good, "1", "--ranks", "0"), "Invalid value for '--ranks'"),
        ((*good, "1", "--schedule", "delay"), "no schedule 'delay'; the forms are"),
        ((*good, "1", "--schedule", "delayed:11"), "a delay counts modules, 0..10 for 5 layers, got 11"),
        ((*good, "1", "--runner", "fast"), "no runner 'fast'"),
        ((*good, "1", "--device", "gpu"), "no device 'gpu'"),
        ((*good, "1", "--exchange", "mpi"), "no exchange 'mpi'"),
        ((*good, "1", "--dtype", "int8"), "no dtype 'int8'; there are float32, float16, bfloat16"),
        ((*good, "1", "--temperature", "-1"), "temperature must be 0 (greedy) or above, got -1.0"),
        ((*good, "1", "--top-p", "0"), "top_p must be above 0"),
        ((*good, "1", "--link-latency", "-3"), "a link latency must be 0 us or above, got -3.0"),
        ((*good, "1", "--stop", "x"), "tokenizer.json does not exist"),
        (("generate", GOLDEN / "dtp-delay1", "--prompt-file", "/nowhere"), "the prompt file cannot be read"),
        (("bench",), "give a checkpoint folder or --preset"),
        ((*bench, "--ranks", "two"), "--ranks has 'two', expected numbers with commas"),
        ((*bench, "--ranks", "2,2"), "--ranks names 2,2 with something twice"),
        ((*bench, "--new-tokens", "1"), "new tokens must be at least 2, got 1"),
        ((*bench, "--rounds", "0"), "rounds must be at least 1, got 0"),
        ((*bench, "--link-latency", "nan"), "a link latency must be 0 us or above, got nan"),
        ((*bench, "--against", "vllm"), "no peer 'vllm'; there are hf-generate, hf-compiled"),
        ((*bench, "--new-tokens", "200"), "264 tokens in and out were asked for, but the model has 256 positions"),
        ((*bench, "--figure", "speed.gif"), "a figure is written as .png, .svg, .pdf, got 'speed.gif'"),
        (("bench", "--preset", "huge"), "no preset 'huge'; there are 2b, small, demo"),
        (("cost",), "give one of --preset and --folder"),
        (("cost", "--preset", "2b", "--machine", "8xfoo"), "no machine 'foo'"),
        ((*check, GOLDEN / "README.md"), "is not a safetensors file"),
        ((*check, GOLDEN / "dtp-delay1" / "model.safetensors"), "lacks input_ids and logits"),
    ]  # fmt: skip


@pytest.mark.parametrize(("words", "text"), mistakes())
def test_every_mistake_is_one_line_that_names_it_and_exit_code_2(words, text, infer, nothing_left):
    result = infer(*words)
    assert result.exit_code == 2, (result.stderr, result.exception)
    assert result.stdout == "" and "Traceback" not in result.stderr
    plain = " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.stderr).split())
    assert text in plain
    if plain.startswith("error: "):
        assert result.stderr.count("\n") == 1


def test_a_failed_run_is_one_line_and_exit_code_1(infer, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("laneformer.infer.generate.run_generate", fail)
    result = infer("generate", GOLDEN / "dtp-delay1", "--prompt-ids", "1")
    assert result.exit_code == 1
    assert result.stderr == "error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("command", ["generate", "check", "bench", "cost"])
def test_help_shows_what_a_command_is_for_and_an_example(command, infer):
    result = infer(command, "--help")
    assert result.exit_code == 0
    assert f"Example: infer {command} " in " ".join(result.stdout.replace("│", " ").split())
    assert command in infer("--help").stdout


def test_a_figure_is_refused_where_matplotlib_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ValueError, match="a figure needs matplotlib"):
        figure.check_figure_path("speed.png")


def test_a_preset_becomes_a_checkpoint_that_is_gone_afterwards():
    with cli.checkpoint_of(None, "demo") as folder:
        assert LaneConfig.from_pretrained(folder) == LaneConfig.preset("demo")
    assert not folder.exists()
