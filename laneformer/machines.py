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
    another device takes. `per_node` devices share a node, and each has `network_bandwidth` bytes a second in one
    direction to other nodes, where a message takes `network_latency_us`. None where a figure is not known.
    """

    name: str
    bandwidth: float
    peak_flops: float | None
    memory: float | None
    link_bandwidth: float | None
    link_latency_us: float
    source: str
    network_bandwidth: float | None = None
    network_latency_us: float = 10.0
    per_node: int = 8


class Machine(NamedTuple):
    """`count` devices of one kind."""

    count: int
    device: Device

    def rank_bandwidth(self, ranks: int) -> float:
        """Bytes a second for each of `ranks` ranks; more ranks than devices share what there is."""
        return self.device.bandwidth * min(self.count, ranks) / ranks

    def group_bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes a second of one device in one direction, in a ring of `ranks` devices that are `stride` apart.

        Inside a node that is the link. A ring over nodes uses the networks of all its members in a node, as far as the
        link carries. Raises ValueError where that figure is not known.
        """
        device = self.device
        inside = max(1, device.per_node // stride)
        local = ranks <= inside
        if device.link_bandwidth is None or (not local and device.network_bandwidth is None):
            raise ValueError(f"the {'links' if local else 'network'} of {device.name} are not known: no traffic times")
        if local:
            return device.link_bandwidth
        return min(device.link_bandwidth, inside * (device.network_bandwidth or 0.0))

    def group_latency_us(self, devices: int) -> float:
        """Microseconds of a small message among `devices` neighbours."""
        device = self.device
        return device.link_latency_us if devices <= device.per_node else device.network_latency_us


MACHINES = {
    "h100": Device("H100 SXM", 3.35e12, 989e12, 80e9, 450e9, 2.3,
                   "NVIDIA H100 data sheet (SXM5, HBM3); NVLink 4; latency: best published small all-reduce on 8; "
                   "network: DGX H100, one 400 Gb/s adapter a GPU; its latency assumed", 50e9),
    "h200": Device("H200", 4.8e12, 989e12, 141e9, 450e9, 2.3,
                   "NVIDIA H200 data sheet (SXM, HBM3e); NVLink 4; latency and network as on H100", 50e9),
    "mi300x": Device("MI300X", 5.3e12, 1307e12, 192e9, 448e9, 3.5,
                     "AMD MI300X data sheet (HBM3); 7 Infinity Fabric links; latency: published 3-4 us collectives; "
                     "network: one 400 Gb/s adapter a GPU, assumed", 50e9),
    "a100": Device("A100 80GB SXM", 2.039e12, 312e12, 80e9, 300e9, 3.0,
                   "NVIDIA A100 80GB SXM data sheet (HBM2e); NVLink 3; latency assumed; "
                   "network: DGX A100, one 200 Gb/s adapter a GPU", 25e9),
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
