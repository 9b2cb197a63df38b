"""What a rank holds: slices of the checkpoint, its own lanes only, and no second copy while loading."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from laneformer import LaneConfig, Laneformer
from laneformer.checkpoint import CheckpointError
from laneformer.cost import decode_bytes
from laneformer.infer.weights import RankWeights
from laneformer.random_weights import write_random_checkpoint

FEATURES = [
    {}, {"head_norms": True, "replicated_rmsn_scale": False}, {"lm_head_type": "lane"}, {"tie_word_embeddings": True},
    {"lm_head_type": "vocab_parallel", "vocab_size": 104}, {"pre_norm_lane_agg": True, "replicated_rmsn_scale": False},
    {"lm_head_type": "vocab_parallel", "vocab_size": 104, "tie_word_embeddings": True}, {"torch_dtype": "bfloat16"},
]  # fmt: skip
SHARES = [(0, 1, 2, 3), (0, 1), (2, 3), (1,), (3,)]


def name(changes):
    return "-".join(changes) or "plain"


def head_rows(file, config):
    """The head as rows of the vocabulary [V, D], filled with zero rows to equal shares."""
    rows = file["model.tok_embeddings.weight"] if config.tie_word_embeddings else file["lm_head.weight"]
    rows = rows.flatten(0, -2)
    share = -(-config.vocab_size // config.num_lanes)
    missing = share * config.num_lanes - config.vocab_size
    return torch.cat((rows, rows.new_zeros(missing, rows.shape[1]))).split(share)


@pytest.mark.parametrize("changes", FEATURES, ids=name)
@pytest.mark.parametrize("lanes", SHARES)
def test_packed_weights_are_the_slices_of_the_checkpoint(changes, lanes, checkpoint):
    folder = checkpoint(**changes)
    config, file = LaneConfig.from_pretrained(folder), load_file(folder / "model.safetensors")
    held = RankWeights.load(folder, lanes)
    own, kind = list(lanes), "weight" if config.replicated_rmsn_scale else "scale"
    assert torch.equal(held.embedding_VD, file["model.tok_embeddings.weight"])

    def scale(key):
        tensor = file[key]
        return tensor.expand(len(own), -1) if tensor.dim() == 1 else tensor[own]

    for i, layer in enumerate(held.layers):
        at = f"model.layers.{i}."
        q, k, v, out = (file[f"{at}attention.w{n}.weight"][own] for n in "qkvo")
        gate, down, up = (file[f"{at}feed_forward.w{n}.weight"][own] for n in "123")
        assert torch.equal(layer.qkv_LOI, torch.cat((q, k, v), 1)) and torch.equal(layer.out_LOI, out)
        assert torch.equal(layer.gate_up_LOI, torch.cat((gate, up), 1)) and torch.equal(layer.down_LOI, down)
        assert torch.equal(layer.attention_norm_LD, scale(f"{at}attention_norm.{kind}"))
        assert torch.equal(layer.ffn_norm_LD, scale(f"{at}ffn_norm.{kind}"))
        for norm in ("q_norm", "k_norm"):
            found = getattr(layer, f"{norm}_E")
            assert torch.equal(found, file[f"{at}attention.{norm}.weight"]) if config.head_norms else found is None
    last = "weight" if config.pre_norm_lane_agg else kind
    assert torch.equal(held.norm_LD, scale(f"model.norm.{last}"))
    for head, lane in zip(held.head_L, lanes, strict=True):
        if config.lm_head_type == "lane":
            assert torch.equal(head, file["lm_head.linear.weight"].chunk(4, 1)[lane])
        else:
            assert torch.equal(head, head_rows(file, config)[lane])


@pytest.mark.parametrize("changes", FEATURES, ids=name)
def test_a_model_in_memory_packs_to_what_its_checkpoint_does(changes, checkpoint):
    folder = checkpoint(**changes)
    loaded, packed = RankWeights.load(folder), RankWeights.from_model(Laneformer.from_pretrained(folder))
    assert (packed.config, packed.lanes, packed.dtype) == (loaded.config, loaded.lanes, loaded.dtype)
    pairs = [(loaded.embedding_VD, packed.embedding_VD), (loaded.norm_LD, packed.norm_LD)]
    pairs += zip(loaded.head_L, packed.head_L, strict=True)
    for one, other in zip(loaded.layers, packed.layers, strict=True):
        pairs += zip(vars(one).values(), vars(other).values(), strict=True)
    assert all(one is other is None or torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("changes", FEATURES, ids=name)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_bytes_read_for_a_token_are_those_the_cost_model_counts(changes, ranks, checkpoint):
    # A vocabulary that all lanes share equally: zero rows that fill up a head are read, but are no cost of the model.
    folder = checkpoint(**{**changes, "vocab_size": 104})
    config = LaneConfig.from_pretrained(folder)
    held = RankWeights.load(folder, range(config.num_lanes // ranks))
    cost = decode_bytes(config, held.dtype, ranks=ranks)
    assert held.streamed_bytes == sum(cost.weights) + cost.head


def test_the_bytes_held_are_those_read_and_the_embedding_unless_it_is_the_head(checkpoint):
    # Sizes at which no lane needs padding to start at an aligned address.
    for tied in (False, True):
        held = RankWeights.load(checkpoint(tie_word_embeddings=tied, vocab_size=104, hidden_size=64))
        assert held.num_bytes == held.streamed_bytes + (0 if tied else 104 * 64 * 4)


def test_the_type_asked_for_is_what_the_matrices_have(checkpoint):
    exact, half = RankWeights.load(checkpoint()), RankWeights.load(checkpoint(), dtype=torch.float16)
    assert half.dtype == torch.float16
    assert torch.equal(half.layers[2].down_LOI, exact.layers[2].down_LOI.half())
    assert all(torch.equal(h, e.half()) for h, e in zip(half.head_L, exact.head_L, strict=True))


def test_a_checkpoint_in_several_files_packs_alike(checkpoint, tmp_path):
    whole = checkpoint()
    Laneformer.from_pretrained(whole).save_pretrained(tmp_path, max_shard_size=40_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    one, other = RankWeights.load(whole, (1, 2)), RankWeights.load(tmp_path, (1, 2))
    assert all(
        torch.equal(a.gate_up_LOI, b.gate_up_LOI) and torch.equal(a.qkv_LOI, b.qkv_LOI)
        for a, b in zip(one.layers, other.layers, strict=True)
    )


def test_lanes_that_do_not_exist_and_folders_without_weights_are_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"lanes must be distinct and among 0\.\.3"):
        RankWeights.load(checkpoint(), (3, 4))
    (tmp_path / "config.json").write_text((checkpoint() / "config.json").read_text())
    with pytest.raises(CheckpointError, match="holds neither"):
        RankWeights.load(tmp_path)


MEASURE = """
import json, sys, torch
from laneformer.infer.weights import RankWeights
from laneformer.infer.worker import peak_memory
torch.set_num_threads(1)
torch.zeros(64, 64) @ torch.zeros(64, 64)
before = peak_memory()
held = RankWeights.load(sys.argv[1], range(int(sys.argv[2])))
print(json.dumps({"peak": peak_memory() - before, "held": held.num_bytes}))
"""


def peak_while_loading(folder, lanes):
    command = [sys.executable, "-c", MEASURE, str(folder), str(lanes)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


def write_large(folder, **changes):
    """A checkpoint of some hundred megabytes and four lanes; returns its bytes."""
    write_random_checkpoint(LaneConfig.preset("small", num_lanes=4, **changes), folder)
    return (folder / "model.safetensors").stat().st_size


def test_one_of_two_ranks_never_has_more_than_its_share_of_the_checkpoint_resident(tmp_path):
    size = write_large(tmp_path, num_hidden_layers=4, vocab_size=1024)
    assert size > 100e6
    measured = peak_while_loading(tmp_path, 2)
    assert 0.5 * size < measured["held"] < 0.55 * size
    assert measured["peak"] < 0.6 * size


@pytest.mark.slow
def test_one_of_two_ranks_of_the_small_preset_stays_under_six_tenths_of_the_checkpoint(tmp_path):
    size = write_large(tmp_path)
    assert size > 280e6
    assert peak_while_loading(tmp_path, 2)["peak"] < 0.6 * size
    assert peak_while_loading(tmp_path, 4)["peak"] < 1.1 * size
