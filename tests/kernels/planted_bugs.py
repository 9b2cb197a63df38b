"""Bugs of the protocol to plant in copies of the kernel, and what it takes to notice one."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from simulated_ranks import Ranks, broken
from torch import Tensor

from laneformer.config import LaneConfig
from laneformer.infer.weights import RankWeights
from laneformer.kernels.simulate import Deadlock, ProgramError
from laneformer.model import Laneformer


@dataclass(frozen=True)
class Bug:
    """Replacements (file, text, other text) in the source, or constants of the kernel; seeds it may take to show."""

    name: str
    changes: tuple[tuple[str, str, str], ...] = ()
    constants: dict[str, Any] = field(default_factory=dict)
    text: str = "delayed:1"
    seeds: int = 10
    tokens: int = 2
    head: str = "replicate"


SIGNAL = 'tl.atomic_add(counter, 1, sem="release", scope=SCOPE)'
ATTENDED = "signal_to(me, mem.C_ATTENTION, SCOPE, AMD)"
WAIT = 'tl.atomic_add(counter, 0, sem="acquire", scope=SCOPE)'
BUGS = (
    Bug("no block barrier before the release", (("sync", f"    block_barrier(AMD)\n    {SIGNAL}", f"    {SIGNAL}"),)),
    Bug("relaxed instead of release", (("sync", SIGNAL, SIGNAL.replace("release", "relaxed")),)),
    Bug("relaxed instead of acquire", (("sync", WAIT, WAIT.replace("acquire", "relaxed")),)),
    Bug("scope of a block within a device", constants={"SCOPE": "cta"}),
    Bug("an epoch off by one", (("decode", "stream += P\n", "stream += P - 1\n"),)),
    Bug("the embedding is not waited for", (("decode", "stream += P\n", "stream += 0\n"),)),
    Bug("attention signals before it has stored", (
        ("phases", "        for task in range(", f"        {ATTENDED}\n        for task in range("),
        ("phases", f"            )  # fmt: skip\n        {ATTENDED}", "            )  # fmt: skip"),
    )),
    Bug("gate and up do not wait for the stream", (
        ("phases", "polls = wait_for(me, mem.C_MIDDLE, target, rank, p, place, limit, R, SCOPE)", "polls = 0"),
    )),
    Bug("output and down do not wait for their input", (
        ("phases", "counted = wait_for(me, WAIT, target, rank, p, place, limit, R, SCOPE)", "counted = 0"),
    )),
    Bug("no block barrier before a partial is read back", (
        ("phases", "                block_barrier(AMD)\n                boxes", "                boxes"),
    )),
    Bug("a ring of one message", constants={"GENERATIONS": 1}, tokens=3),
    Bug("never re-armed", (("sync", "tl.store(pointers, SENTINEL, mask=mask)", "pass"),), tokens=4),
    Bug("re-armed before it is read", (
        ("exchange", "        words, polls = poll", "        rearm(pointers, m_tile)\n        words, polls = poll"),
    )),
    Bug("a message landed a module early", (
        ("phases", "(message_base + message) % GENERATIONS", "(message_base + message + 1) % GENERATIONS"),
    )),
    Bug("a message sent to the wrong generation", (
        ("phases", "((message_base + number) % GENERATIONS) * (S * D)",
         "((message_base + number + 1) % GENERATIONS) * (S * D)"),
    )),
    Bug("polls without volatile", (
        ("sync", "tl.load(pointers, mask=mask, other=0, volatile=True)", "tl.load(pointers, mask=mask, other=0)"),
    )),
)  # fmt: skip
# Shows only when one rank is a whole token ahead of another's slowest program.
RARE = Bug(
    "logits of two tokens in one box",
    (("decode", "parity = ((decoded_before + t) % 2)", "parity = ((decoded_before + t) % 1)"),),
    text="silent", tokens=4, seeds=60, head="vocab_parallel",
)  # fmt: skip


def tiny_weights(head: str = "replicate", ranks: int = 2, lanes: int = 2) -> list[RankWeights]:
    """A model of two layers, each rank's share of its lanes."""
    torch.manual_seed(3)
    config = LaneConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=lanes, head_dim=6, intermediate_size=5 * lanes,
        vocab_size=16, num_lanes=lanes, max_position_embeddings=16, lm_head_type=head,
    )  # fmt: skip
    model = Laneformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        share = lanes // ranks
        return [RankWeights.load(folder, list(range(r * share, (r + 1) * share))) for r in range(ranks)]


def outcome(bug: Bug, seed: int, kernel: Any = None, memory: str = "weak") -> Tensor | str:
    """The logits of some tokens, or what went wrong; constants of the bug only with a kernel."""
    ranks = Ranks(tiny_weights(bug.head), bug.text, 8, 2, tile=64)
    changes = bug.constants if kernel is not None else {}
    try:
        _, logits, _ = ranks.run(5, 0, bug.tokens, seed, memory, kernel=kernel, **changes)
    except (Deadlock, ProgramError) as error:
        return f"{type(error).__name__}: {error}"
    codes = [int(shared.abort[0]) for shared in ranks.shared]
    return logits if not any(codes) else f"abort codes {codes}"


def seeds_until_caught(bug: Bug, memory: str = "weak") -> tuple[int, str] | None:
    """How many seeds it takes until a run goes wrong, and how, or None if none of the bug's number does."""
    right = outcome(bug, 0, memory="sequential")
    assert isinstance(right, Tensor), right
    with broken(*bug.changes) as module:
        for seed in range(bug.seeds):
            found = outcome(bug, seed, module.decode, memory)
            if isinstance(found, str):
                return seed + 1, found.split(":")[0]
            if not torch.equal(found, right):
                return seed + 1, "wrong logits"
    return None
