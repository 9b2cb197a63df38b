"""Checkpoints: written and read back bit by bit, refused by name, read in part, and never left half-written."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from laneformer import LaneConfig, Laneformer
from laneformer.checkpoint import Checkpoint, CheckpointError, has_lane_axis, parse_size, save_checkpoint

WQ = "model.layers.0.attention.wq.weight"
EMBEDDING = "model.tok_embeddings.weight"


def config(**changes):
    keys = {
        "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 6,
        "intermediate_size": 35, "vocab_size": 45, "num_lanes": 5, "broadcast_delay": 1, "norm_eps": 1e-6,
    }  # fmt: skip
    return LaneConfig(**{**keys, **changes})


def build(seed=0, dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    return Laneformer(config(**changes), dtype=dtype)


def same_bits(model, other):
    one, two = model.state_dict(), other.state_dict()
    assert list(one) == list(two)
    for key in one:
        assert one[key].dtype == two[key].dtype, key
        assert torch.equal(one[key], two[key]), key


@pytest.fixture
def folder(tmp_path):
    """A saved checkpoint."""
    build().save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder, **changes):
    """Saves the tensors anew with some replaced; None leaves one out."""
    tensors = load_file(folder / "model.safetensors") | {key.replace("/", "."): value for key, value in changes.items()}
    save_file({key: value for key, value in tensors.items() if value is not None}, folder / "model.safetensors")


CHANGES = [
    {}, {"lm_head_type": "lane"}, {"lm_head_type": "vocab_parallel"}, {"tie_word_embeddings": True},
    {"replicated_rmsn_scale": False}, {"replicated_rmsn_scale": False, "pre_norm_lane_agg": True}, {"head_norms": True},
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changes", CHANGES, ids=lambda c: "-".join(c) or "plain")
def test_a_saved_model_is_read_back_bit_by_bit(tmp_path, changes, dtype):
    model = build(dtype=dtype, **changes)
    model.save_pretrained(tmp_path)
    again = Laneformer.from_pretrained(tmp_path)
    same_bits(model, again)
    assert again.config == model.config.replace(torch_dtype=str(dtype).removeprefix("torch."))
    tokens = torch.tensor([[1, 44, 7]])
    assert torch.equal(model(tokens), again(tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sharded_model_is_read_back_bit_by_bit(tmp_path, dtype):
    model = build(dtype=dtype)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    files = sorted(path.name for path in tmp_path.iterdir())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    state = model.state_dict()
    assert set(index["weight_map"]) == set(state)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in state.values())
    assert files[0] == "config.json"
    assert len(files) == 2 + len(set(index["weight_map"].values())) > 4
    for file in files[1:-1]:
        held = load_file(tmp_path / file)
        assert len(held) == 1 or sum(t.numel() * t.element_size() for t in held.values()) <= 10_000
    same_bits(model, Laneformer.from_pretrained(tmp_path))


@pytest.mark.parametrize(("first", "second"), [("10KB", "5GB"), ("5GB", "10KB"), ("10KB", "20KB")])
def test_a_second_save_leaves_nothing_of_the_first(tmp_path, first, second):
    build().save_pretrained(tmp_path, max_shard_size=first)
    model = build(seed=1)
    model.save_pretrained(tmp_path, max_shard_size=second)
    same_bits(model, Laneformer.from_pretrained(tmp_path))
    used = {"config.json", *(path.name for path in set(Checkpoint(tmp_path)._files.values()))}
    assert {path.name for path in tmp_path.iterdir()} - used <= {"model.safetensors.index.json"}


def test_a_type_may_be_asked_for_at_reading(folder):
    model, again = build(), Laneformer.from_pretrained(folder, dtype=torch.float64)
    assert all(p.dtype == torch.float64 for p in again.parameters())
    assert torch.equal(again.lm_head.weight, model.lm_head.weight.double())


@pytest.mark.parametrize("copy", [False, True])
def test_a_tied_checkpoint_may_or_may_not_carry_the_copy(tmp_path, copy):
    model = build(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    table = model.model.tok_embeddings.weight.detach()
    rewrite(tmp_path, **({"lm_head/weight": table.clone()} if copy else {}))
    same_bits(model, Laneformer.from_pretrained(tmp_path))


def test_a_tied_copy_that_differs_is_refused(tmp_path):
    model = build(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    other = model.model.tok_embeddings.weight.detach().clone()
    other[-1, -1] += 1
    rewrite(tmp_path, **{"lm_head/weight": other})
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from the embedding although tie_word_embedd"):
        Laneformer.from_pretrained(tmp_path)


@pytest.mark.parametrize(("changes", "words"), [
    ({WQ: None}, f"1 of 21 tensors missing, first {WQ}"),
    ({WQ: None, "model.layers.0.attention.wz.weight": torch.ones(2)}, "missing.*; 1 extra, first .*wz.weight"),
    ({"model.layers.0.attention.wqq.weight": torch.ones(2)}, f"not expect, first .*wqq.weight; did you mean {WQ}"),
    ({"zzzzzz": torch.ones(2)}, "1 tensors that config.json does not expect, first zzzzzz$"),
    ({WQ: torch.ones(5, 20, 12)}, r"wq.weight has shape \[5, 20, 12\], config.json expects \[5, 12, 20\]"),
    ({WQ: torch.ones(60, 20)}, r"wq.weight has shape \[60, 20\], config.json expects \[5, 12, 20\]"),
    ({WQ: torch.ones(5, 12, 20, dtype=torch.int32)}, "wq.weight is I32, expected one of F64, F32, F16, BF16"),
    ({EMBEDDING: torch.ones(45, 20, dtype=torch.int8)}, "tok_embeddings.weight is I8, expected one of"),
])  # fmt: skip
def test_tensors_that_the_config_does_not_describe_are_refused_by_name(folder, changes, words):
    rewrite(folder, **changes)
    with pytest.raises(CheckpointError, match=words) as refusal:
        Laneformer.from_pretrained(folder)
    assert str(folder) in str(refusal.value)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.5, 0.999999])
def test_a_truncated_file_is_refused_with_its_size(folder, share):
    path = folder / "model.safetensors"
    size = int(path.stat().st_size * share)
    os.truncate(path, size)
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(path))} \({size} bytes\) is not a whole safetensors"):
        Laneformer.from_pretrained(folder)


def sharded(tmp_path):
    build().save_pretrained(tmp_path, max_shard_size="10KB")
    return tmp_path / "model.safetensors.index.json"


def test_absent_files_are_refused_by_path(tmp_path, folder):
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        Laneformer.from_pretrained(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds neither model"):
        Laneformer.from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        Laneformer.from_pretrained(folder)


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/etc/hostname", "sub/model.safetensors"])
def test_an_index_that_points_outside_the_folder_is_refused(tmp_path, file):
    index = sharded(tmp_path)
    content = json.loads(index.read_text())
    content["weight_map"][WQ] = file
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"names {Path(file).name} outside the folder"):
        Checkpoint(tmp_path)


def test_an_index_that_names_a_missing_file_or_tensor_is_refused(tmp_path):
    index = sharded(tmp_path)
    content = json.loads(index.read_text())
    last = content["weight_map"]["lm_head.weight"]
    content["weight_map"]["lm_head.weight"] = content["weight_map"][WQ]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"holds lm_head\.weight, but it does not"):
        Checkpoint(tmp_path)
    content["weight_map"]["lm_head.weight"] = last
    index.write_text(json.dumps(content))
    (tmp_path / last).unlink()
    with pytest.raises(CheckpointError, match=f"names {last}, which does not exist"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none_is_refused(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not an index of safetensors"):
        Checkpoint(folder)


@pytest.mark.parametrize("lanes", [[2, 3], [4], [3, 0], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("changes", CHANGES, ids=lambda c: "-".join(c) or "plain")
def test_some_lanes_of_a_checkpoint_are_slices_of_the_whole(tmp_path, changes, lanes):
    whole = build(**changes)
    whole.save_pretrained(tmp_path)
    part = Laneformer.from_pretrained(tmp_path, lanes=lanes)
    assert part.lanes == tuple(lanes)
    state = part.state_dict()
    for key, tensor in whole.state_dict().items():
        expected = tensor[lanes] if has_lane_axis(key, whole.config) else tensor
        assert torch.equal(state[key], expected), key


def mapped_bytes(folder):
    """Bytes of the folder's files that are mapped into this process and were touched."""
    smaps, total, inside = Path("/proc/self/smaps").read_text(), 0, False
    for line in smaps.splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="reads /proc/self/smaps, which Linux alone has")
def test_some_lanes_touch_only_their_own_bytes_one_tensor_at_a_time_and_keep_none_mapped(tmp_path, monkeypatch):
    sizes = {"hidden_size": 320, "intermediate_size": 20000, "num_hidden_layers": 1, "num_attention_heads": 20}
    whole = build(**sizes, head_dim=16)
    whole.save_pretrained(tmp_path)
    tensors, touched = Checkpoint.tensors, {}

    def watched(self, names, lanes=None):
        for name, tensor in tensors(self, names, lanes):
            yield name, tensor
            # The reader has copied the tensor, and asks for the next one.
            touched[name] = mapped_bytes(tmp_path)

    monkeypatch.setattr(Checkpoint, "tensors", watched)
    part = Laneformer.from_pretrained(tmp_path, lanes=[2, 3])
    for name, own in part.named_parameters():
        size = own.numel() * own.element_size()
        # The kernel maps whole folios of up to 2 MiB, at both ends of what is read.
        assert size - 65536 <= touched[name] <= size + 2 * 2**21, name
        assert size < 8e6 or touched[name] < 0.65 * whole.get_parameter(name).numel() * own.element_size(), name
    assert mapped_bytes(tmp_path) == 0


def test_rows_and_lanes_of_one_tensor_may_be_read_alone(folder):
    state, checkpoint = build().state_dict(), Checkpoint(folder)
    assert torch.equal(checkpoint.tensor(EMBEDDING, rows=slice(7, 12)), state[EMBEDDING][7:12])
    assert torch.equal(checkpoint.tensor(WQ), state[WQ])
    assert torch.equal(dict(checkpoint.tensors([WQ], [3, 1]))[WQ], state[WQ][[3, 1]])


def test_a_part_of_a_model_is_not_saved_as_a_whole(tmp_path):
    with pytest.raises(ValueError, match=r"holds lanes \[1\] of 5; save a whole one"):
        Laneformer(config(), lanes=[1]).save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 kb", 1500), (7, 7), ("200MB", 2 * 10**8), ("9", 9)]
)
def test_shard_sizes_are_numbers_or_texts(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["GB", "five", "", "-1GB", 0, "0.1B"])
def test_shard_sizes_that_are_none_are_refused(tmp_path, text):
    with pytest.raises(ValueError, match="max_shard_size is"):
        save_checkpoint(config(), {}, tmp_path, text)
