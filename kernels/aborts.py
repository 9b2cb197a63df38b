"""What an abort block says, for people: who gave up, where, and whom it waited for. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laneformer.kernels.plan import Plan, lane_slots

# What an abort record calls the phases of a module; a place is token << 16 | module << 4 | phase.
PHASES = ("qkv", "attention", "output", "gate/up", "down", "final", "head", "draw", "control")
# Codes of an abort, and the word of its block that peers write (kernels/sync.py).
TIMEOUT = 1
BROKEN_LOGITS = 2
PEER_WORD = 8


@dataclass(frozen=True)
class Abort:
    """Why a launch ended early: `timeout`, `logits` that are no numbers, or a `peer` that gave up.

    culprit: the rank waited for, or that gave up; None where no single one is known. token: of the launch, from 0.
    """

    kind: str
    text: str
    culprit: int | None = None
    token: int = 0


def read_abort(words: Sequence[int], plan: Plan, rank: int) -> Abort | None:
    """The abort that rank's block of words tells of; None if all went well."""
    code, peer = words[0], words[PEER_WORD]
    if code == BROKEN_LOGITS:
        return Abort("logits", "the logits are not numbers", rank, words[3] >> 16)
    if code == TIMEOUT:
        return timeout(words, plan, rank)
    if peer:
        return Abort("peer", f"rank {peer - 1} gave up first", peer - 1)
    return None


def timeout(words: Sequence[int], plan: Plan, rank: int) -> Abort:
    """A wait that ran into its limit."""
    _, _, program, place, seen, wanted = words[:6]
    token, module, phase = place >> 16, place >> 4 & 0xFFF, PHASES[min(place & 15, len(PHASES) - 1)]
    where = where_is(module, phase, plan)
    waiter = f"program {program} of rank {rank}, token {token} of the launch, {where},"
    if wanted >= 0:
        text = f"{waiter} waited too long for the rank's own programs: {seen} of {wanted} signals had come"
        return Abort("timeout", text, rank, token)
    if phase == "control":
        return Abort("timeout", f"{waiter} waited too long for rank 0 to say whether to go on", 0, token)
    culprit = sender(seen, phase, plan)
    whom = f"rank {culprit}" if culprit is not None else "another rank"
    what = "logits" if phase == "draw" else "a partial"
    return Abort("timeout", f"{waiter} waited too long for {what} of {whom}", culprit, token)


def where_is(module: int, phase: str, plan: Plan) -> str:
    """A module and phase in words."""
    if module >= 2 * plan.config.num_hidden_layers:
        return f"at the end of the token ({phase})"
    return f"layer {module // 2} {'feed-forward' if module % 2 else 'attention'} ({phase})"


def sender(slot: int, phase: str, plan: Plan) -> int | None:
    """The rank that fills a slot of a message."""
    if phase == "draw" and plan.logit_slots == 1:
        return None
    if plan.presummed:
        return slot if slot < plan.ranks else None
    lanes = [lane for lane, place in enumerate(lane_slots(plan.config.num_lanes)) if place == slot]
    return lanes[0] // plan.lanes if lanes else None
