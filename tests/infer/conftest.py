"""What the tests of decoding share: small random checkpoints, written once, and a watch over what a run leaves."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest
import torch

from laneformer import LaneConfig, Laneformer
from laneformer.random_weights import write_random_checkpoint

# Odd sizes: no dimension is a multiple of what a kernel works on at once, and the vocabulary is none of the lanes.
SIZES = {
    "hidden_size": 44, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6,
    "intermediate_size": 52, "vocab_size": 101, "max_position_embeddings": 160, "num_lanes": 4, "broadcast_delay": 1,
    "rope_theta": 50.0, "norm_eps": 1e-3,
}  # fmt: skip
# Seconds within which a failure must have been handled.
HANDLED_S = 5.0


@pytest.fixture(scope="session", autouse=True)
def one_compiling_process():
    """Compile here: a pool of compilers would take the cores that the tests need."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A function from changes to SIZES to the folder of a random checkpoint; the same changes, the same folder."""
    made: dict[tuple, Path] = {}

    def make(**changes) -> Path:
        key = tuple(sorted(changes.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("checkpoint")
            write_random_checkpoint(LaneConfig(**{**SIZES, **changes}), made[key], seed=3)
            enliven(made[key])
        return made[key]

    return make


def enliven(folder):
    """Makes weights larger and norms uneven, so that a wrong schedule or a forgotten norm shows."""
    model = Laneformer.from_pretrained(folder)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=random))
            else:
                parameter.mul_(1.7)
    model.save_pretrained(folder)


@pytest.fixture
def nothing_left():
    """Fails a test after which a child process or a name in /dev/shm is there that was not before."""
    me, shared = psutil.Process(), Path("/dev/shm")
    children = {child.pid for child in me.children(recursive=True)}
    names = set(os.listdir(shared)) if shared.exists() else set()
    yield
    deadline = time.monotonic() + HANDLED_S
    while time.monotonic() < deadline and {c.pid for c in me.children(recursive=True)} - children:
        time.sleep(0.05)
    assert {c.pid for c in me.children(recursive=True)} - children == set()
    if shared.exists():
        assert {name for name in set(os.listdir(shared)) - names if "laneformer" in name or "torch" in name} == set()
