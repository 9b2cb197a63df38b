"""The gate: a runner's logits against the float64 reference model, before any speed of it is told.

Shape suffixes: S positions, V vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laneformer.config import LaneConfig
from laneformer.infer.request import RequestError

# Largest error over largest logit that a right implementation in this type stays under, on random weights.
TOLERANCE = {"float64": 1e-6, "float32": 2e-4, "float16": 1e-2, "bfloat16": 8e-2}
GATE_TOKENS = 24
# Above this many parameters the float64 reference would not fit a small machine, so float32 stands in for it.
FLOAT64_PARAMETERS = 1_000_000_000


@dataclass(frozen=True)
class Verdict:
    """The largest error over the largest logit, what it may be, and what it was measured against."""

    error: float
    tolerance: float
    reference: str

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the tolerance."""
        return self.error <= self.tolerance


def judge(logits_SV: np.ndarray, expected_SV: np.ndarray, dtype: str, reference: str) -> Verdict:
    """Compares logits of a runner in `dtype` with expected ones; a NaN anywhere fails."""
    if logits_SV.shape != expected_SV.shape:
        raise RequestError(f"{reference} has logits {list(expected_SV.shape)}, the model gives {list(logits_SV.shape)}")
    worst = float(np.abs(logits_SV.astype(np.float64) - expected_SV).max() / np.abs(expected_SV).max())
    return Verdict(worst if np.isfinite(worst) else float("inf"), TOLERANCE[dtype], reference)


def reference_logits(
    folder: str | os.PathLike, tokens: tuple[int, ...], schedule: str, dtype: str
) -> tuple[np.ndarray, str]:
    """Logits [S, V] of the reference model, and the name of its type.

    The weights are first rounded to `dtype`, as the runner has them, so that only its arithmetic is judged.
    """
    import torch

    from laneformer.cost import count_parameters
    from laneformer.model import Laneformer

    large = count_parameters(LaneConfig.from_pretrained(folder)).total > FLOAT64_PARAMETERS
    wide = torch.float32 if large else torch.float64
    model = Laneformer.from_pretrained(folder, dtype=getattr(torch, dtype), schedule=schedule).to(wide)
    with torch.inference_mode():
        return model(torch.tensor([tokens]))[0].numpy(), str(wide).removeprefix("torch.")


def expected_file(path: str | os.PathLike) -> tuple[tuple[int, ...], np.ndarray]:
    """Token ids [S] and logits [S, V] of a file with `input_ids` and `logits`."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise RequestError(f"{path} is not a safetensors file: {error}") from None
    missing = [name for name in ("input_ids", "logits") if name not in tensors]
    if missing:
        raise RequestError(f"{Path(path).name} lacks {' and '.join(missing)}; it holds {', '.join(sorted(tensors))}")
    return tuple(int(i) for i in tensors["input_ids"]), tensors["logits"].astype(np.float64)


def gate_tokens(config: LaneConfig, count: int = GATE_TOKENS) -> tuple[int, ...]:
    """Token ids to try a model with, the same every time."""
    count = min(count, config.max_position_embeddings)
    return tuple(int(i) for i in np.random.default_rng(0).integers(0, config.vocab_size, count))
