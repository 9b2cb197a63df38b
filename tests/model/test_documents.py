"""Training's own paths through the model: documents packed in one row, recomputed modules, one stream for all lanes."""

from __future__ import annotations

import pytest
import torch

from laneformer import LaneConfig, Laneformer

ROW = torch.tensor([[3, 14, 15, 9, 26, 5, 8, 17, 2, 11, 23]])
DOCUMENTS = torch.tensor([[4, 4, 4, 5, 5, 5, 5, 5, 6, 6, 6]])


def model_of(schedule="delayed:2", **changes):
    keys = {
        "hidden_size": 14, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4,
        "intermediate_size": 15, "vocab_size": 30, "num_lanes": 3, "broadcast_delay": 1,
    }  # fmt: skip
    torch.manual_seed(3)
    return Laneformer(LaneConfig(**{**keys, **changes}), schedule, dtype=torch.float64)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("window", [None, 2, 20])
@pytest.mark.parametrize("schedule", ["tensor-parallel", "delayed:3", "ladder"])
def test_a_packed_document_sees_nothing_of_its_neighbours(schedule, window):
    changes = {} if window is None else {"sliding_window": window, "swa_layers": (0, 2)}
    model = model_of(schedule, **changes)
    packed = model(ROW, documents_BS=DOCUMENTS)
    # Rope turns by differences of positions, so a document alone gives what it gives further along a row.
    alone = torch.cat([model(ROW[:, DOCUMENTS[0] == document]) for document in (4, 5, 6)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(packed, model(ROW))


def test_documents_go_with_neither_cache_nor_padding():
    model = model_of()
    with pytest.raises(ValueError, match="neither cache"):
        model(ROW, cache=model.new_cache(20), documents_BS=DOCUMENTS)
    with pytest.raises(ValueError, match=r"\[1, 3\] for tokens \[1, 11\]"):
        model(ROW, documents_BS=DOCUMENTS[:, :3])


@pytest.mark.parametrize("schedule", ["tensor-parallel", "delayed:3", "ladder"])
def test_recomputing_modules_changes_no_bit_of_the_gradients_and_keeps_less(schedule):
    kept = {}
    for recompute in (False, True):
        model = model_of(schedule)
        model.recompute = recompute
        saved = []

        def keep(x, saved=saved):
            saved.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = model(ROW, documents_BS=DOCUMENTS).square().sum()
        loss.backward()
        kept[recompute] = (gradients(model), sum(saved))
    assert all(torch.equal(kept[True][0][name], grad) for name, grad in kept[False][0].items())
    assert kept[True][1] < kept[False][1] / 2


@pytest.mark.parametrize("schedule", ["tensor-parallel", "ladder"])
@pytest.mark.parametrize("head", ["replicate", "lane", "vocab_parallel"])
def test_one_stream_for_all_lanes_gives_what_stacked_lanes_give(schedule, head, monkeypatch):
    model = model_of(schedule, lm_head_type=head)
    assert model.one_stream
    merged = model(ROW)
    merged.square().sum().backward()
    expected = gradients(model)
    model.zero_grad()
    monkeypatch.setattr(Laneformer, "one_stream", False)
    stacked = model(ROW)
    stacked.square().sum().backward()
    torch.testing.assert_close(merged, stacked, rtol=1e-10, atol=1e-10)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-10)


def test_streams_that_differ_are_not_merged():
    assert not model_of("delayed:1").one_stream
    assert not model_of("tensor-parallel", replicated_rmsn_scale=False).one_stream
