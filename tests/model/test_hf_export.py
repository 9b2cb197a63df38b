"""Folders that carry their code: the same bits in a process that cannot import this package."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import save_tiny, tiny_config
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from laneformer import Laneformer, hf

GOLDEN = Path(__file__).parents[1] / "golden"
WINDOWED = "dtp-delay2-swa"


@pytest.fixture
def tiny(tmp_path):
    """Saves a random tiny model when called, with its arguments as changes; returns it with its folder."""
    return partial(save_tiny, tmp_path / "tiny")


def word_tokenizer():
    words = Tokenizer(WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "lanes": 8, "sync": 9, "rarely": 10}, "<pad>"))
    words.pre_tokenizer = Whitespace()
    return words


# What a process does that has never heard of this package: argv names the exports, results go beside them.
STRANGER = """
import importlib.abc, sys

class NoLaneformer(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "laneformer":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoLaneformer())
try:
    import laneformer
    raise SystemExit("laneformer is importable")
except ModuleNotFoundError:
    pass

import torch
from pathlib import Path
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
for out in map(Path, sys.argv[1:]):
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    ids = AutoTokenizer.from_pretrained(out)("lanes sync rarely lanes lanes sync", return_tensors="pt").input_ids
    tokens = {k: model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0, cache_implementation=k)
              for k in ("dynamic", "static")}
    save_file({"ids": ids, "logits": model(ids).logits, **tokens}, out / "stranger.safetensors")
    model.save_pretrained(out / "again")
    again = AutoModelForCausalLM.from_pretrained(out / "again", trust_remote_code=True)
    assert torch.equal(again(ids).logits, model(ids).logits)
"""


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Three exports, loaded by a fresh process without this package; by name, with the folders they came from."""
    root = tmp_path_factory.mktemp("exports")
    torch.manual_seed(4)
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        tied = {"tie_word_embeddings": True} if dtype is torch.bfloat16 else {"head_norms": True}
        Laneformer(tiny_config(**tied), dtype=dtype).save_pretrained(root / name)
    sources = {WINDOWED: GOLDEN / WINDOWED, "tied.bfloat16": root / "bfloat16", "0-head-norms": root / "float32"}
    for name, folder in sources.items():
        hf.export(folder, root / "out" / name, tokenizer=word_tokenizer(), max_shard_size="20KB")
    places = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "home"), "HF_MODULES_CACHE": str(root / "modules")}
    folders = [str(root / "out" / name) for name in sources]
    command = [sys.executable, "-I", "-c", STRANGER, *folders]
    done = subprocess.run(command, env={**os.environ, **places}, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: (folder, root / "out" / name) for name, folder in sources.items()}


@pytest.mark.parametrize("name", [WINDOWED, "tied.bfloat16", "0-head-norms"])
def test_an_export_gives_a_process_without_this_package_the_same_bits(exports, name):
    folder, out = exports[name]
    found = load_file(out / "stranger.safetensors")
    assert found["ids"].tolist() == [[8, 9, 10, 8, 8, 9]]
    assert torch.equal(found["logits"], Laneformer.from_pretrained(folder)(found["ids"]))
    here = AutoModelForCausalLM.from_pretrained(folder)
    for kind in ("dynamic", "static"):
        tokens = here.generate(
            found["ids"], max_new_tokens=16, do_sample=False, pad_token_id=0, cache_implementation=kind
        )
        assert torch.equal(found[kind], tokens), kind


def test_an_export_is_a_published_folder_too(exports):
    folder, out = exports[WINDOWED]
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    assert type(AutoModelForCausalLM.from_pretrained(out)) is hf.LaneformerForCausalLM
    one, other = Laneformer.from_pretrained(folder), Laneformer.from_pretrained(out)
    assert one.config == other.config
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())
    assert json.loads((out / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2}
    assert not list(out.glob(".*"))


def test_the_code_of_an_export_does_not_take_the_place_of_the_installed_one(exports, monkeypatch):
    out = exports[WINDOWED][1]
    monkeypatch.syspath_prepend(out.parent)
    remote = importlib.import_module(f"{out.name}.hf")
    assert remote.LaneformerConfig is not hf.LaneformerConfig
    assert type(AutoConfig.from_pretrained(GOLDEN / WINDOWED)) is hf.LaneformerConfig


def test_an_export_says_the_type_its_weights_have(tmp_path, tiny):
    _, folder = tiny(torch.bfloat16)
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, "torch_dtype": "float32"}))
    assert AutoModelForCausalLM.from_pretrained(hf.export(folder, tmp_path / "out")).dtype is torch.bfloat16


def test_an_export_carries_the_tokenizer_and_the_generation_config_it_is_given(tmp_path, tiny):
    _, folder = tiny()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(), eos_token="</s>", bos_token="<s>")
    hf.export(folder, tmp_path / "object", tokenizer=fast, generation_config=GenerationConfig(top_k=7, eos_token_id=9))
    assert AutoTokenizer.from_pretrained(tmp_path / "object").eos_token_id == 2
    assert GenerationConfig.from_pretrained(tmp_path / "object").top_k == 7
    # Another export takes both from a folder: the tokenizer it names, the generation config of the checkpoint.
    shutil.copy(tmp_path / "object" / "generation_config.json", folder)
    out = hf.export(folder, tmp_path / "folder", tokenizer=tmp_path / "object")
    assert AutoTokenizer.from_pretrained(out).encode("sync rarely") == [9, 10]
    assert GenerationConfig.from_pretrained(out).eos_token_id == 9
    # And a third finds the tokenizer in the checkpoint.
    assert AutoTokenizer.from_pretrained(hf.export(out, tmp_path / "third")).eos_token == "</s>"
    hf.export(folder, out, generation_config={"eos_token_id": [2, 7]})
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == [2, 7]


def test_an_export_that_cannot_be_leaves_nothing(tmp_path, tiny):
    _, folder = tiny()
    with pytest.raises(ValueError, match="tokenizer is a int"):
        hf.export(folder, tmp_path / "out", tokenizer=3)
    with pytest.raises(ValueError, match="holds no tokenizer"):
        hf.export(folder, tmp_path / "out", tokenizer=folder)
    with pytest.raises(ValueError, match="generation_config is a str"):
        hf.export(folder, tmp_path / "out", generation_config="greedy")
    with pytest.raises(ValueError, match="to another folder"):
        hf.export(folder, folder / ".." / "tiny")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        hf.export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
