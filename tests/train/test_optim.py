"""The optimizer against arithmetic by hand, and the learning rate of every step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from laneformer import LaneConfig, Laneformer
from laneformer.train.muon import Muon, orthogonalised
from laneformer.train.optim import adamw, decays, learning_rate, optimizers, orthogonal, set_learning_rate
from laneformer.train.settings import OptimSettings


def rates(steps, **settings):
    return [learning_rate(step, steps, OptimSettings(**settings)) for step in range(steps)]


def test_a_cosine_rises_linearly_and_falls_to_its_final_share():
    got = rates(20, lr=1.0, warmup=0.2, final=0.1)
    assert got[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert got[4:] == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * n / 16)) / 2 for n in range(1, 17)])
    assert got[11] == pytest.approx(0.55) and got[19] == pytest.approx(0.1)


def test_warmup_stable_decay_has_a_plateau_and_a_linear_end():
    got = rates(10, lr=2.0, lr_shape="warmup-stable-decay", warmup=0.2, decay=0.4, final=0.0)
    assert got == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_rates_without_a_rise_or_a_fall():
    assert rates(3, lr=1.0, warmup=0.0, lr_shape="warmup-stable-decay", decay=0.0) == [1.0, 1.0, 1.0]
    assert rates(2, lr=1.0, warmup=0.0, final=0.0) == pytest.approx([0.5, 0.0])
    assert rates(1, lr=1.0, warmup=1.0) == [1.0]


@pytest.mark.parametrize("own_scales", [False, True])
def test_only_matrices_beside_the_embedding_decay(own_scales):
    config = LaneConfig.preset("demo", num_hidden_layers=1, replicated_rmsn_scale=not own_scales, head_norms=True)
    names = [name for name, _ in Laneformer(config, device="meta").named_parameters()]
    matrices = {f"model.layers.0.{m}.weight" for m in ("attention.wq", "attention.wk", "attention.wv", "attention.wo",
                "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")}  # fmt: skip
    assert {name for name in names if decays(name)} == {*matrices, "lm_head.weight"}
    assert len(names) == len(matrices) + 1 + 1 + 5


class Two(nn.Module):
    """A matrix that decays and a norm that does not."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor([[0.5, -2.0], [1.0, 3.0]]))
        self.norm = nn.Parameter(torch.tensor([1.0, 1.5]))


def test_two_steps_equal_adamw_by_hand():
    settings = OptimSettings(lr=0.1, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
    model = Two()
    optimizer = adamw(list(model.named_parameters()), settings)
    expected = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    mean = {name: torch.zeros_like(p) for name, p in expected.items()}
    square = {name: torch.zeros_like(p) for name, p in expected.items()}
    generator = torch.Generator().manual_seed(0)
    for step, rate in ((1, 0.1), (2, 0.05)):
        set_learning_rate([optimizer], settings, rate / 0.1)
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator)
            g = p.grad.double()
            mean[name] = 0.8 * mean[name] + 0.2 * g
            square[name] = 0.9 * square[name] + 0.1 * g * g
            decay = 0.3 if name == "matrix" else 0.0
            update = mean[name] / (1 - 0.8**step) / ((square[name] / (1 - 0.9**step)).sqrt() + 1e-6)
            expected[name] = expected[name] * (1 - rate * decay) - rate * update
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


def test_muon_has_the_lanes_matrices_and_adamw_the_rest():
    model = Laneformer(LaneConfig.preset("demo", num_hidden_layers=1))
    settings = OptimSettings(name="muon", lr=0.01, muon_lr=0.02)
    rest, muon = optimizers(model, settings)
    names = {id(p): name for name, p in model.named_parameters()}
    moved = {names[id(p)].split(".")[-2] for group in muon.param_groups for p in group["params"]}
    assert moved == {"wq", "wk", "wv", "wo", "w1", "w2", "w3"}
    others = {names[id(p)] for group in rest.param_groups for p in group["params"]}
    assert others == {name for name in names.values() if not orthogonal(name)} and "lm_head.weight" in others
    set_learning_rate([rest, muon], settings, 0.5)
    assert {g["lr"] for g in rest.param_groups} == {0.005} and {g["lr"] for g in muon.param_groups} == {0.01}
    assert len(optimizers(model, OptimSettings())) == 1


@pytest.mark.parametrize("shape", [(3, 7, 4), (2, 4, 9), (1, 5, 5)])
def test_muons_update_is_torchs_for_each_lane(shape):
    torch.manual_seed(1)
    start = torch.randn(shape)
    ours = nn.Parameter(start.clone())
    theirs = [nn.Parameter(matrix.clone()) for matrix in start]
    mine = Muon([ours], lr=0.1, momentum=0.9, weight_decay=0.2)
    peers = torch.optim.Muon(theirs, lr=0.1, momentum=0.9, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(shape)
        for lane, parameter in enumerate(theirs):
            parameter.grad = ours.grad[lane].clone()
        mine.step()
        peers.step()
    # torch iterates in bfloat16.
    torch.testing.assert_close(ours.detach(), torch.stack([p.detach() for p in theirs]), rtol=0.05, atol=0.01)


def test_orthogonalised_matrices_keep_their_directions_and_lose_their_lengths():
    torch.manual_seed(2)
    matrices = torch.randn(2, 6, 11) * torch.tensor([1e-3, 50.0])[:, None, None]
    got = orthogonalised(matrices)
    for before, after in zip(matrices, got, strict=True):
        values = torch.linalg.svdvals(after)
        assert values.min() > 0.6 and values.max() < 1.3
        u, _, vh = torch.linalg.svd(before, full_matrices=False)
        rotated = u.T @ after @ vh.T
        assert (rotated - torch.diag(rotated.diagonal())).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "optim.lr must be above 0, got 0.0"),
        ({"beta2": 1.0}, "optim.beta2 must be below 1, got 1.0"),
        ({"warmup": 0.6, "decay": 0.5, "lr_shape": "warmup-stable-decay"}, "0.6 and optim.decay 0.5"),
        ({"name": "mun"}, "did you mean muon"),
        ({"lr_shape": "cosin"}, "did you mean cosine"),
        ({"weight_decay": -0.1}, "optim.weight_decay must be at least 0, got -0.1"),
    ],
)
def test_settings_that_cannot_work_name_the_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        OptimSettings(**changes)
