"""The golden cases: a checkpoint, a schedule's text form, and the file with the logits it must give."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
CASES = [
    ("attention-comm-off", "checkpoint", "expected"),
    ("dtp-delay1", "checkpoint", "expected"),
    ("dtp-delay1", "delayed:3", "expected-delayed3"),
    ("dtp-delay1", "ladder", "expected-ladder"),
    ("dtp-delay1", "silent", "expected-silent"),
    ("dtp-delay1", "tensor-parallel", "expected-tensor-parallel"),
    ("dtp-delay2-early-comm", "checkpoint", "expected"),
    ("dtp-delay2-swa", "checkpoint", "expected"),
    ("lane-head", "checkpoint", "expected"),
    ("lane-norms-vocab-parallel", "checkpoint", "expected"),
    ("standard-tp", "checkpoint", "expected"),
]
