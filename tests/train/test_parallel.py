"""Training over ranks against one process, in float64: data-parallel, sharded, lane-parallel, and their products."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks_of_training import run_training_ranks
from rich.console import Console

from laneformer.train import state
from laneformer.train.loss import count_targets
from laneformer.train.parallel import Layout, add_shared_gradients
from laneformer.train.prepare import prepare

QUIET = Console(quiet=True)
SIZES = {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 2,
         "intermediate_size": 20, "vocab_size": 264, "num_lanes": 4, "broadcast_delay": 1}  # fmt: skip
# (ranks, ranks that share the lanes, how data-parallel ranks hold weights)
PLACES = [(2, 1, "ddp"), (2, 1, "fsdp"), (2, 2, "ddp"), (4, 4, "ddp"), (4, 2, "ddp"), (4, 2, "fsdp")]
HEADS = [
    {}, {"pre_norm_lane_agg": True}, {"lm_head_type": "lane"}, {"lm_head_type": "vocab_parallel"},
    {"lm_head_type": "vocab_parallel", "tie_word_embeddings": True}, {"tie_word_embeddings": True},
    {"replicated_rmsn_scale": False}, {"head_norms": True},
]  # fmt: skip


@pytest.fixture
def run_settings(settings_for):
    """Settings of a float64 run of 4 lanes."""

    def build(lanes=1, shard="ddp", schedule="delayed:2", model=None, **changes):
        keys = {"precision": "float64", "schedule": schedule, "model": {**SIZES, **(model or {})}, "steps": 3,
                "data": {"batch": 8, "micro_batch": 1, "sequence_length": 19}, "optim": {"z_loss": 1e-3, "clip": 0.5},
                "parallel": {"lanes": lanes, "shard": shard, "timeout": 30.0}}  # fmt: skip
        return settings_for(**{**keys, **changes})

    return build


def first_gradients(place, settings):
    """Loss and every whole gradient of the first step."""
    trainer = prepare(settings, QUIET, place).trainer
    batches = trainer.micro_batches()
    counts = torch.tensor([float(sum(count_targets(batch.targets_BS) for batch in batches))])
    targets = int(place.sum(counts, "data"))
    nats = place.sum(trainer.gradients(batches, targets), "data")
    add_shared_gradients(trainer.model, place)
    grads = {name: state.whole(p.grad, name, trainer).numpy() for name, p in trainer.model.named_parameters()}
    return float(nats), grads


def trained(place, settings):
    """Losses, gradient norms and whole weights after three steps."""
    trainer = prepare(settings, QUIET, place).trainer
    results = [trainer.step() for _ in range(3)]
    weights = {name: tensor.numpy() for name, tensor in state.weights(trainer).items()}
    return [(r.loss, r.grad_norm, r.targets) for r in results], weights


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name in got:
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=1e-10 * max(scale, 1e-3), err_msg=name)


@pytest.mark.parametrize("schedule", ["tensor-parallel", "delayed:3", "delayed:2:early", "ladder", "silent"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_layout_gives_one_processs_loss_and_gradients(place, schedule, run_settings, tmp_path):
    ranks, lanes, shard = place
    loss, grads = first_gradients(Layout(), run_settings(schedule=schedule, out=str(tmp_path / "one")))
    answers = run_training_ranks(ranks, first_gradients, run_settings(lanes, shard, schedule))
    for got, got_grads in answers:
        assert got == pytest.approx(loss, rel=1e-12)
        assert_same(got_grads, grads)


@pytest.mark.parametrize("changes", HEADS, ids=str)
def test_lane_parallel_ranks_agree_for_every_head_and_norm(changes, run_settings, tmp_path):
    loss, grads = first_gradients(Layout(), run_settings(model=changes, out=str(tmp_path / "one")))
    for got, got_grads in run_training_ranks(2, first_gradients, run_settings(2, model=changes)):
        assert got == pytest.approx(loss, rel=1e-12)
        assert_same(got_grads, grads)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("place", [(2, 2, "ddp"), (2, 1, "fsdp"), (4, 2, "fsdp"), (4, 2, "ddp")], ids=str)
def test_three_steps_over_ranks_leave_one_processs_weights(place, optimizer, run_settings, tmp_path):
    ranks, lanes, shard = place
    optim = {"name": optimizer, "clip": 0.5, "lr": 1e-2}
    one, weights = trained(Layout(), run_settings(optim=optim, out=str(tmp_path / "one")))
    assert one[0][1] > 0.5, "the gradients are to be clipped"
    for results, got in run_training_ranks(ranks, trained, run_settings(lanes, shard, optim=optim)):
        np.testing.assert_allclose(np.array(results), np.array(one), rtol=1e-8)
        for name in weights:
            # AdamW divides by the root of the gradient's square, which makes small differences larger.
            np.testing.assert_allclose(got[name], weights[name], rtol=0, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_micro_batches_change_nothing(micro_batch, run_settings, tmp_path):
    data = {"batch": 8, "sequence_length": 19, "micro_batch": 4}
    one, weights = trained(Layout(), run_settings(data=data, out=str(tmp_path / "one")))
    other = run_settings(data={**data, "micro_batch": micro_batch}, out=str(tmp_path / "other"))
    results, got = trained(Layout(), other)
    np.testing.assert_allclose(np.array(results), np.array(one), rtol=1e-9)
    for name in weights:
        np.testing.assert_allclose(got[name], weights[name], rtol=0, atol=1e-8, err_msg=name)


def test_recomputing_and_ranks_go_together(run_settings, tmp_path):
    loss, grads = first_gradients(Layout(), run_settings(out=str(tmp_path / "one")))
    for got, got_grads in run_training_ranks(2, first_gradients, run_settings(2, recompute=True)):
        assert got == pytest.approx(loss, rel=1e-12)
        assert_same(got_grads, grads)


def test_bfloat16_over_sharded_weights_stays_near_float32_and_keeps_wide_weights(run_settings, tmp_path):
    narrow = {"precision": "bfloat16", "optim": {"clip": 0.5}}
    one, _ = trained(Layout(), run_settings(precision="float32", optim={"clip": 0.5}, out=str(tmp_path / "one")))
    for results, weights in run_training_ranks(2, trained, run_settings(1, "fsdp", **narrow)):
        np.testing.assert_allclose(np.array(results)[:, 0], np.array(one)[:, 0], rtol=2e-2)
        assert results != one and {array.dtype for array in weights.values()} == {np.dtype(np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("place", [(2, 2, "ddp"), (2, 1, "fsdp"), (2, 1, "ddp")], ids=str)
def test_compiled_modules_over_ranks_give_one_processs_steps(place, run_settings, tmp_path):
    ranks, lanes, shard = place
    one, _ = trained(Layout(), run_settings(out=str(tmp_path / "one")))
    for results, _ in run_training_ranks(ranks, trained, run_settings(lanes, shard, compile=True)):
        np.testing.assert_allclose(np.array(results), np.array(one), rtol=1e-8)
