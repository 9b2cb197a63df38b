"""Runs a function on several training ranks, forked processes that meet as torchrun's would."""

from __future__ import annotations

import os
import socket

import torch
from forked import run_ranks

from laneformer.train.parallel import layout
from laneformer.train.settings_build import build_settings


def run_training_ranks(count, function, settings, *args):
    """[function(place, settings, *args) for every rank]; settings are Settings or the nested values of some."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return run_ranks(count, _ranked, count, port, function, settings, args)


def _ranked(rank, count, port, function, settings, args):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    with layout(build_settings(settings, "test") if isinstance(settings, dict) else settings) as place:
        return function(place, settings, *args)
