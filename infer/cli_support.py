"""What the commands of `infer` share: errors as people want them, a progress bar, JSON out."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from laneformer import terminal
from laneformer.terminal import messages as messages
from laneformer.terminal import progress_bar as progress_bar
from laneformer.terminal import table_console as table_console
from laneformer.terminal import write_json as write_json

DTYPES = ("float32", "float16", "bfloat16")


def check_dtype(dtype: str | None) -> None:
    """Raises ValueError for a type that decoding does not know."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"no dtype {dtype!r}; there are {', '.join(DTYPES)}")


@contextmanager
def checkpoint_of(folder: Path | None, preset: str | None, lanes: int | None = None) -> Iterator[Path]:
    """The folder given, or a temporary one with random weights of a preset."""
    if (folder is None) == (preset is None):
        raise ValueError("give a checkpoint folder or --preset, one of them")
    if folder is not None:
        if lanes is not None:
            raise ValueError("--lanes goes with --preset; a checkpoint has its own number of lanes")
        yield folder
        return
    from laneformer.config import LaneConfig
    from laneformer.random_weights import write_random_checkpoint

    with tempfile.TemporaryDirectory(prefix="laneformer-") as scratch:
        config = LaneConfig.preset(preset or "")
        write_random_checkpoint(config if lanes is None else config.replace(num_lanes=lanes), scratch)
        yield Path(scratch)


@contextmanager
def friendly_errors() -> Iterator[None]:
    """As `terminal.friendly_errors`; ranks, the gate and peers can fail too."""
    from laneformer.infer.bench import GateError
    from laneformer.infer.peers import PeerError
    from laneformer.infer.ranks import RankError

    with terminal.friendly_errors(RankError, GateError, PeerError):
        yield
