"""What the whole suite shares: one thread a process, and where the golden checkpoints lie."""

from __future__ import annotations

import os
from pathlib import Path

# Without a GPU kernels run under Triton's interpreter, which is chosen when triton is first imported, by whomever.
if not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

# Ranks are forked here, and a pool of threads that the parent has started is not there in a fork.
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Tiny models run fastest on one thread, and sums keep one order."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden checkpoints."""
    return Path(__file__).parent / "golden"
