"""`laneformer export`: a checkpoint of `train` becomes a folder that transformers loads, or one line says why not."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest
import torch
from helpers import assert_close
from typer.testing import CliRunner

from laneformer import Laneformer
from laneformer.data.chat import Message, encode_chat
from laneformer.data.specials import Specials
from laneformer.data.tokenizer import document_encoder, read_tokenizer
from laneformer.infer.cli import app as infer
from laneformer.tools.cli import app
from laneformer.train.cli import main as train

# Odd sizes; three lanes of one head each.
SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
         "head_dim": 6, "intermediate_size": 21, "vocab_size": 275, "num_lanes": 3}  # fmt: skip
CODE = "def area{n}(width, height):\n    return width * height + {n}\n\n\n"
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Write area(width): é"}]


def trained(out, corpus, *more):
    sizes = [f"model.{key}={value}" for key, value in SIZES.items()]
    command = [f"corpus={corpus}", f"out={out}", *sizes, "steps=2", "data.sequence_length=19", "data.batch=3", *more]
    assert train([*command, "threads=1"]) == 0
    return out


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of three files of code."""
    folder = tmp_path_factory.mktemp("code")
    for n in range(3):
        (folder / f"part{n}.py").write_text("".join(CODE.format(n=n + i) for i in range(9)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    """A run of two steps, with its state after the second."""
    return trained(tmp_path_factory.mktemp("run") / "run", corpus, "schedule=delayed:2", "checkpoint.every=2")


@pytest.fixture
def transformers(tmp_path, monkeypatch):
    """transformers, which keeps the code that it loads in this test's folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    module = pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return module


def export(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def fails(result):
    """The one line of a command that exits with 2."""
    assert result.exit_code == 2 and result.stderr.startswith("error: "), result.output
    assert result.stderr.count("\n") == 1 and not result.stdout
    return result.stderr


@pytest.mark.parametrize("name", ["checkpoint", "checkpoints/step-00000002"])
def test_transformers_computes_the_logits_of_the_run(run, name, tmp_path, transformers):
    result = export(run / name, tmp_path / "hf")
    assert result.exit_code == 0 and result.stderr.count("\n") == 1, result.stderr
    assert "0.01 M parameters, float32, 1 weight file, tokenizer with chat template" in result.stderr
    # AutoModelForCausalLM would take this package's class in a process that has registered it.
    load = transformers.dynamic_module_utils.get_class_from_dynamic_module
    theirs = load("hf.LaneformerForCausalLM", str(tmp_path / "hf")).from_pretrained(tmp_path / "hf")
    assert type(theirs).__module__.startswith("transformers_modules.")
    ours = Laneformer.from_pretrained(run / "checkpoint")
    tokens_BS = torch.tensor([[0, 5, 270, 91, 12, 7, 33], [1, 2, 3, 4, 200, 6, 0]])
    with torch.no_grad():
        expected_BSV = ours(tokens_BS)
        assert_close(theirs(tokens_BS).logits, expected_BSV, length=21)
        assert not torch.allclose(Laneformer(ours.config)(tokens_BS), expected_BSV)


def test_the_tokenizer_and_the_chat_template_come_along(run, tmp_path, transformers):
    assert export(run / "checkpoint", tmp_path / "hf").exit_code == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    tokenizer, names = read_tokenizer(run / "checkpoint")
    text = "def area(width):\n\treturn 'é☃'  # 12\n"
    assert theirs(text).input_ids == tokenizer.encode(text).ids and theirs.decode(theirs(text).input_ids) == text
    talk = tuple(Message(**message) for message in MESSAGES)
    ids, _ = encode_chat(document_encoder(tokenizer), Specials.of(tokenizer, names), talk)
    header = tokenizer.encode("<|im_start|>assistant\n").ids
    assert theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False) == ids + header


def test_transformers_stops_at_the_end_of_a_turn_and_of_a_document(run, tmp_path, transformers):
    assert export(run / "checkpoint", tmp_path / "hf").exit_code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    tokenizer, _ = read_tokenizer(run / "checkpoint")
    ends = [tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|im_end|>")]
    assert model.generation_config.eos_token_id == ends
    assert model.generation_config.pad_token_id == tokenizer.token_to_id("<|pad|>")


def test_weights_are_cut_into_files_of_the_size_asked_for(run, tmp_path, transformers):
    result = export(run / "checkpoint", tmp_path / "hf", "--max-shard-size", "20KB")
    count = len(list((tmp_path / "hf").glob("model-*.safetensors")))
    assert count > 1 and f"{count} weight files" in result.stderr
    ours, theirs = (Laneformer.from_pretrained(folder) for folder in (run / "checkpoint", tmp_path / "hf"))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("name", ["checkpoint", "checkpoints/step-00000002"])
def test_infer_generate_continues_a_code_prompt(run, name):
    arguments = ["generate", str(run / name), "--prompt", "def area(", "--max-tokens", "9", "--json", "-"]
    result = CliRunner().invoke(infer, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    tokenizer, _ = read_tokenizer(run / name)
    assert document["text"] and document["text"] == tokenizer.decode(document["tokens"])
    assert document["schedule"] in ("delayed:2", "checkpoint")


def test_a_run_that_is_given_instead_of_its_checkpoint_is_told_which(run, tmp_path):
    assert f"{run} is a training run, not a checkpoint; give {run / 'checkpoint'}" in fails(export(run, tmp_path / "a"))
    assert "is not a folder" in fails(export(tmp_path / "nowhere", tmp_path / "a"))
    (tmp_path / "empty").mkdir()
    assert "config.json" in fails(export(tmp_path / "empty", tmp_path / "a"))
    assert not (tmp_path / "a").exists()


def test_what_is_there_already_is_replaced_only_when_asked(run, tmp_path):
    out = tmp_path / "hf"
    assert export(run / "checkpoint", out, "--max-shard-size", "20KB").exit_code == 0
    (out / "chat_template.jinja").write_text("an old one")
    before = sorted(path.name for path in out.iterdir())
    assert "not empty; --overwrite replaces an earlier export" in fails(export(run / "checkpoint", out))
    assert sorted(path.name for path in out.iterdir()) == before
    assert export(run / "checkpoint", out, "--overwrite").exit_code == 0
    assert (out / "model.safetensors").exists() and not list(out.glob("model-*"))
    assert not (out / "chat_template.jinja").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["hf"], "something half-written is left"


def test_files_that_are_no_export_are_never_deleted(run, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert "other files than an earlier export" in fails(export(run / "checkpoint", tmp_path, "--overwrite"))
    assert "holds the checkpoint itself" in fails(export(run / "checkpoint", run / "checkpoint", "--overwrite"))
    assert "holds the checkpoint itself" in fails(export(run / "checkpoint", run, "--overwrite"))
    assert "is a file" in fails(export(run / "checkpoint", tmp_path / "thesis.txt"))
    assert (tmp_path / "thesis.txt").exists() and (run / "checkpoint" / "model.safetensors").exists()


def test_a_size_that_is_none_leaves_an_earlier_export_alone(run, tmp_path):
    assert export(run / "checkpoint", tmp_path / "hf").exit_code == 0
    assert "max_shard_size is 'much'" in fails(
        export(run / "checkpoint", tmp_path / "hf", "--max-shard-size", "much", "--overwrite")
    )
    torn = tmp_path / "torn"
    shutil.copytree(run / "checkpoint", torn)
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:-9])
    assert "not a whole safetensors file" in fails(export(torn, tmp_path / "hf", "--overwrite"))
    assert Laneformer.from_pretrained(tmp_path / "hf").config.num_lanes == 3


def test_a_schedule_that_transformers_would_not_follow_is_refused(corpus, tmp_path):
    run = trained(tmp_path / "run", corpus, "schedule=ladder", "checkpoint.every=2")
    for name in ("checkpoint", "checkpoints/step-00000002"):
        assert "trained with schedule ladder, which config.json cannot express" in fails(
            export(run / name, tmp_path / "hf")
        )
    assert not (tmp_path / "hf").exists()


def test_without_transformers_the_extra_is_named(run, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "transformers" else found(name))
    assert "pip install 'laneformer[hf]'" in fails(export(run / "checkpoint", tmp_path / "hf"))
