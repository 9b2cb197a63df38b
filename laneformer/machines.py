"""The machines a cost is worked out for: nominal figures of named devices, each with its source."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Device:
    """One accelerator's nominal figures: bytes a second, dense 16-bit FLOP/s, bytes, and its link to its peers.

    `link_bandwidth` is bytes a second in one direction; `link_latency_us` is how long a small one-sided message to
    another device takes. None where a figure is not known.
    """

    name: str
    bandwidth: float
    peak_flops: float | None
    memory: float | None
    link_bandwidth: float | None
    link_latency_us: float
    source: str


class Machine(NamedTuple):
    """`count` devices of one kind."""

    count: int
    device: Device

    def rank_bandwidth(self, ranks: int) -> float:
        """Bytes a second for each of `ranks` ranks; more ranks than devices share what there is."""
        return self.device.bandwidth * min(self.count, ranks) / ranks


MACHINES = {
    "h100": Device("H100 SXM", 3.35e12, 989e12, 80e9, 450e9, 2.3,
                   "NVIDIA H100 data sheet (SXM5, HBM3); NVLink 4; latency: best published small all-reduce on 8"),
    "h200": Device("H200", 4.8e12, 989e12, 141e9, 450e9, 2.3,
                   "NVIDIA H200 data sheet (SXM, HBM3e); NVLink 4; latency as on H100"),
    "mi300x": Device("MI300X", 5.3e12, 1307e12, 192e9, 448e9, 3.5,
                     "AMD MI300X data sheet (HBM3); 7 Infinity Fabric links; latency: published 3-4 us collectives"),
    "a100": Device("A100 80GB SXM", 2.039e12, 312e12, 80e9, 300e9, 3.0,
                   "NVIDIA A100 80GB SXM data sheet (HBM2e); NVLink 3; latency assumed"),
}  # fmt: skip


def parse_machine(text: str, measured_bandwidth: float | None = None) -> Machine:
    """(count, device) from `8xh200`, `h200` or `this`, the machine at hand with its measured bytes a second.

    Raises ValueError naming the known machines and the nearest one.
    """
    match = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?(\S+)", text.strip().lower())
    count, name = (int(match[1] or 1), match[2]) if match else (1, text.strip().lower())
    if count < 1:
        raise ValueError(f"machine {text!r} has {count} devices, expected at least 1")
    if name == "this":
        if measured_bandwidth is None or not measured_bandwidth > 0:
            raise ValueError(f"machine 'this' needs its measured bandwidth in bytes a second, got {measured_bandwidth}")
        return Machine(count, Device("this machine", measured_bandwidth / count, None, None, None, 5.0,
                                     "bandwidth measured here over all its devices; link latency assumed"))  # fmt: skip
    if name not in MACHINES:
        close = difflib.get_close_matches(name, [*MACHINES, "this"], n=1, cutoff=0.4)
        hint = f", did you mean {close[0]}?" if close else ";"
        raise ValueError(f"no machine {name!r}{hint} known are {', '.join(MACHINES)} and this, as in 8xh200")
    return Machine(count, MACHINES[name])
