"""Saving over an old checkpoint: a save that fails or is killed on the way leaves the old one whole."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

from laneformer import LaneConfig, Laneformer
from laneformer.files import replace_files, text_writer


def build(seed=0):
    torch.manual_seed(seed)
    return Laneformer(LaneConfig(hidden_size=20, num_hidden_layers=2, num_attention_heads=10, intermediate_size=35,
                                 vocab_size=45, num_lanes=5, broadcast_delay=1))  # fmt: skip


def assert_holds(folder, model):
    """The checkpoint in `folder` is `model`, bit by bit."""
    state, again = model.state_dict(), Laneformer.from_pretrained(folder).state_dict()
    assert all(torch.equal(state[key], again[key]) for key in state)


def test_files_take_their_places_together_or_not_at_all(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("old")

    def fails(path):
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_files({one: text_writer("new"), two: fails})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("one", "old")]
    replace_files({one: text_writer("new"), two: text_writer("zwölf")})
    assert (one.read_text(), two.read_bytes().decode("utf-8")) == ("new", "zwölf")


@pytest.mark.parametrize(("before", "after"), [("5GB", "5GB"), ("10KB", "5GB"), ("5GB", "10KB"), ("10KB", "10KB")])
@pytest.mark.parametrize("writes", [0, 1])
def test_a_save_that_fails_leaves_the_old_checkpoint_whole(tmp_path, monkeypatch, before, after, writes):
    old = build()
    old.save_pretrained(tmp_path, max_shard_size=before)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    saved = []

    def full_disk(tensors, path, metadata=None):
        if len(saved) == writes:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        saved.append(save_file(tensors, path, metadata))

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    if writes and after == "5GB":
        monkeypatch.setattr(LaneConfig, "to_dict", lambda self: {"not json": object()})
    with pytest.raises((OSError, TypeError)):
        build(seed=1).save_pretrained(tmp_path, max_shard_size=after)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    assert_holds(tmp_path, old)


def save_and_die(folder, syncs):
    """Saves another model and dies without any clean-up at the sync number `syncs`."""
    count = iter(range(1000))
    os.fsync = lambda descriptor: os._exit(7) if next(count) == syncs else None
    build(seed=1).save_pretrained(folder, max_shard_size="10KB")


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.parametrize("syncs", [0, 2])
def test_a_process_that_is_killed_while_saving_leaves_the_old_checkpoint_whole(tmp_path, syncs):
    old = build()
    old.save_pretrained(tmp_path, max_shard_size="10KB")
    child = multiprocessing.get_context("fork").Process(target=save_and_die, args=(tmp_path, syncs))
    child.start()
    child.join(30)
    assert child.exitcode == 7
    assert_holds(tmp_path, old)
