"""How fast is the share of one rank of eight, with the mailboxes of seven ghosts on the same GPU?

The kernel and its protocol are the true ones (laneformer/kernels/ghosts.py); what is missing is the link, so that this
is a lower bound of a token's time on eight GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from common import SCHEDULES, Sizes, arguments, random_weights, save, sizes, speeds, spread

from laneformer.cache import KVCache
from laneformer.infer.bandwidth import device_bandwidth
from laneformer.infer.weights import RankWeights
from laneformer.kernels.ghosts import ghost_peers
from laneformer.kernels.launch import RankLaunch
from laneformer.kernels.plan import DeviceShape, Plan
from laneformer.schedule import Schedule
from laneformer.view import turns

RANKS = 8
# Weights of a tile and positions of a block to try beside the kernel's own.
SHAPES = ((16384, 32), (16384, 64), (16384, 128), (8192, 32), (8192, 64))


def launch_of(s: Sizes, weights: RankWeights, text: str, shape: DeviceShape) -> RankLaunch:
    """Rank 0 of eight, ready to start."""
    config = s.config
    plan = Plan(config, Schedule.parse(text, config), RANKS, shape, s.capacity)
    cache = KVCache(config, s.capacity, 1, len(weights.lanes), s.dtype, s.device)
    cos, sin = turns(config, torch.arange(s.capacity, device=s.device)[None], torch.float32)
    peers = ghost_peers(plan, s.device)
    launch = RankLaunch(plan, 0, weights, cache.k, cache.v, peers, cos[0, 0, 0], sin[0, 0, 0], s.tokens)
    launch.clear()
    return launch


def main() -> None:
    """The step."""
    options = arguments(__doc__)
    s = sizes(options.tiny)
    weights = random_weights(s, range(s.config.num_lanes // RANKS))
    launches = {}
    for shape in SHAPES[:1] if s.tiny else SHAPES:
        device = DeviceShape(s.programs, tile=shape[0], block_positions=shape[1])
        # Silent shows what the exchange costs, which needs no more than one shape.
        for text in SCHEDULES if shape == SHAPES[0] else SCHEDULES[:2]:
            launches[text, shape] = launch_of(s, weights, text, device)
    if options.compile_only:
        for launch in launches.values():
            launch.compile()
        return
    bandwidth = None if s.tiny else device_bandwidth(s.device)
    times: dict[Any, list[float]] = {key: [] for key in launches}
    polls: dict[Any, tuple[int, int]] = {}
    for _ in range(s.rounds):
        for key, launch in launches.items():
            times[key].append(time_of(s, launch))
            polls[key] = launch.polls()
    rows = []
    for (text, shape), values in times.items():
        us = spread(values[1:])
        row = {
            "schedule": text, "tile": shape[0], "block_positions": shape[1], "us_per_token": us,
            "polls_of_own_per_token": polls[text, shape][0] / s.tokens,
            "polls_of_messages_per_token": polls[text, shape][1] / s.tokens,
        }  # fmt: skip
        row |= speeds(us, weights.streamed_bytes, bandwidth)
        rows.append(row)
        print(row, flush=True)
    found = {"streamed_bytes": weights.streamed_bytes, "programs": s.programs, "rows": rows, "tokens": s.tokens}
    save(options.json, found | {"bandwidth_gb_s": bandwidth and bandwidth / 1e9, "position": s.position})


def time_of(s: Sizes, launch: RankLaunch) -> float:
    """Microseconds a token of one launch, as the device has it; 0 in a rehearsal."""
    launch.start(5, s.position, s.tokens, 60.0 if s.tiny else 5.0)
    found, abort = launch.finish()
    if abort is not None or found != s.tokens:
        raise RuntimeError(f"{found} tokens, {abort}")
    return (launch.elapsed_us() or 0.0) / s.tokens


if __name__ == "__main__":
    main()
