"""How a rank of the twin draws a token: its best logits, the rounds that top-k and top-p add, and the agreement.

The same steps as kernels/draw.py, in plain PyTorch, with every access checked. Suffixes: V vocabulary, P programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

import laneformer.decode_ops as decode_ops
import laneformer.ops as ops
from laneformer.kernels.plan import LOGIT_GENERATIONS
from laneformer.kernels.plan_phases import SELECT_ROUNDS
from laneformer.kernels.twin_ledger import Actor, Need

if TYPE_CHECKING:
    from laneformer.kernels.launch import Settings
    from laneformer.kernels.twin_rank import Rank

BINS, ID_BITS = 256, 24
# Probability mass of the likeliest token, as an integer.
MASS_ONE = 1 << 40


def selects(sampling: Settings | None, vocab: int) -> tuple[str, ...]:
    """What leaves tokens out in a draw, in the order in which it does."""
    if sampling is None or not sampling.temperature > 0:
        return ()
    return ("top-k",) * (0 < sampling.top_k < vocab) + ("top-p",) * (sampling.top_p < 1)


def order_keys(scores_V: torch.Tensor) -> torch.Tensor:
    """Int64 keys that rise with the score, rounded to float32, and fall with the token's id."""
    bits = scores_V.to(torch.float32).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) + (1 << 31)
    return (ordered << ID_BITS) | ((1 << ID_BITS) - 1 - torch.arange(len(scores_V)))


class Drawing:
    """The part of a rank's memory that draws use, and what a program does in their phases.

    What only one program touches (scores, keys, masses of its own tokens, and what it knows so far) is not checked.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank, self.plan, self.sampling = rank, rank.plan, rank.world.sampling
        programs, vocab = self.plan.programs, rank.config.vocab_size
        self.kinds = selects(self.sampling, vocab)
        self.best_P2 = torch.zeros(2, programs, 2, dtype=torch.float64)
        self.scores_V = torch.full((vocab,), torch.nan, dtype=torch.float64)
        self.histograms = torch.zeros(LOGIT_GENERATIONS, len(self.kinds), SELECT_ROUNDS, BINS, dtype=torch.int64)
        self.keys_V, self.masses_V = (torch.zeros(vocab, dtype=torch.int64) for _ in range(2))
        # Of each program: the best score of all, and where its search stands.
        self.highest = [0.0] * programs
        self.prefix, self.before, self.least = ([0] * programs for _ in range(3))

    def ids(self, chunk: int) -> slice:
        """The token ids of a chunk."""
        return slice(chunk * self.plan.score_chunk, min((chunk + 1) * self.plan.score_chunk, len(self.scores_V)))

    def collect(self, actor: Actor, items: range) -> Iterator[Need]:
        """Collects logits, re-arms their words, and leaves this program's best."""
        rank, parity = self.rank, actor.token % LOGIT_GENERATIONS
        logits_V = rank.world.logits.setdefault(
            (rank.number, actor.token), torch.full((len(self.scores_V),), torch.nan, dtype=rank.wide)
        )
        if self.kinds and actor.program == 0:
            # The other half was used a token ago, and is used again in the next.
            for kind, digit in self.rounds():
                rank.write(actor, "HISTOGRAMS", (1 - parity, kind, digit), actor.token + 1)
            self.histograms[1 - parity] = 0
        whole = self.plan.logit_slots != self.plan.slots
        slots = [slot for slot in range(self.plan.logit_slots) if whole or self.plan.valid_slots >> slot & 1]
        for chunk in items:
            ids = self.ids(chunk)
            pieces = rank.pieces(ids.start, ids.stop)
            keys = tuple(("logit_box", rank.number, parity, slot, *piece) for slot in slots for piece in pieces)
            yield Need(actor, words=keys)
            for key in keys:
                rank.ledger.land(actor, key, (actor.token,), True)
            logits_V[ids] = ops.tree_sum(rank.logit_box[parity, slots, ids])
            rank.logit_box[parity, :, ids] = torch.nan
            self.scores_V[ids] = self.scores(actor, ids, logits_V[ids].double())
        if actor.token > 0:
            rank.read(actor, "SEEN", [0], actor.token - 1)
        noise = self.sampling is not None and self.sampling.temperature > 0 and not self.kinds
        self.leave_best(actor, items, 0, noise)

    def rounds(self) -> list[tuple[int, int]]:
        """Every round of counting, as the number of its kind and its digit."""
        return [(kind, digit) for kind in range(len(self.kinds)) for digit in range(SELECT_ROUNDS)]

    def scores(self, actor: Actor, ids: slice, logits: torch.Tensor) -> torch.Tensor:
        """Scores of ids, penalised if seen and divided by the temperature; their keys are of before the division."""
        sampling = self.sampling
        if sampling is None:
            return logits
        world, penalty = self.rank.world, sampling.repetition_penalty
        fed = {world.token_at(actor._replace(token=token)) for token in range(actor.token + 1)}
        seen = torch.tensor([i in fed for i in range(ids.start, ids.stop)])
        scores = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        if not sampling.temperature > 0:
            return scores
        whole = torch.zeros_like(self.scores_V)
        whole[ids] = scores
        self.keys_V[ids] = order_keys(whole)[ids]
        return scores / sampling.temperature

    def leave_best(self, actor: Actor, items: range, which: int, noise: bool) -> None:
        """Leaves the best of this program's tokens that are kept, for all to read."""
        best = (float("-inf"), 0)
        for chunk in items:
            ids = self.ids(chunk)
            scores = self.scores_V[ids]
            if noise and self.sampling is not None:
                every = torch.arange(ids.start, ids.stop)
                scores = scores + decode_ops.gumbel(every, self.sampling.seed, actor.token + 1)
            if which:
                scores = torch.where(self.keys_V[ids] >= self.least[actor.program], scores, float("-inf"))
            score, place = scores.max(0)
            best = max(best, (score.item(), -(ids.start + int(place))))
        self.rank.write(actor, "BEST", (which, actor.program), actor.token)
        self.best_P2[which, actor.program] = torch.tensor([best[0], -best[1]])

    def best(self, actor: Actor, which: int) -> tuple[float, int]:
        """The best score of all programs and its token, the smallest id among equals."""
        programs = min(self.plan.programs, self.plan.score_chunks)
        self.rank.read(actor, "BEST", [(which, p) for p in range(programs)], actor.token)
        score, token = min((-score, int(token)) for score, token in self.best_P2[which, :programs].tolist())
        return -score, token

    def count(self, actor: Actor, items: range) -> None:
        """A round: what the last one found, then this program's weights by the next eight bits of their keys."""
        p, parity = actor.program, actor.token % LOGIT_GENERATIONS
        name, _, round_number = actor.phase.name.partition(" ")
        kind, digit = self.kinds.index(name), int(round_number)
        place = kind * SELECT_ROUNDS + digit
        if place == 0:
            self.highest[p], _ = self.best(actor, 0)
            self.least[p] = 0
        elif items:
            self.advance(actor, place - 1)
        if digit == 0:
            self.prefix[p] = self.before[p] = 0
        shift = 8 * (SELECT_ROUNDS - 1 - digit)
        for chunk in items:
            ids = self.ids(chunk)
            keys, weights = self.keys_V[ids], torch.ones(ids.stop - ids.start, dtype=torch.int64)
            if name == "top-p":
                if digit == 0:
                    masses = ((self.scores_V[ids] - self.highest[p]).exp() * MASS_ONE + 0.5).to(torch.int64)
                    self.masses_V[ids] = torch.where(keys >= self.least[p], masses.clamp_min(1), 0)
                weights = self.masses_V[ids]
            inside = keys >> (shift + 8) == self.prefix[p]
            bins = (keys >> shift & (BINS - 1))[inside]
            self.histograms[parity, kind, digit].scatter_add_(0, bins, weights[inside])
        if items:
            self.rank.ledger.add(actor, ("HISTOGRAMS", self.rank.number, (parity, kind, digit)), (actor.token,))

    def advance(self, actor: Actor, place: int) -> None:
        """The digit in which the last kept key lies, from the counts of a round; after the last, that key."""
        p, parity = actor.program, actor.token % LOGIT_GENERATIONS
        kind, digit = divmod(place, SELECT_ROUNDS)
        self.rank.read(actor, "HISTOGRAMS", [(parity, kind, d) for d in {0, digit}], actor.token)
        bins = self.histograms[parity, kind, digit]
        assert self.sampling is not None
        limit = float(self.sampling.top_k)
        if self.kinds[kind] == "top-p":
            limit = self.sampling.top_p * float(self.histograms[parity, kind, 0].sum())
        ahead = self.before[p] + bins.sum() - bins.cumsum(0)
        keep = (bins > 0) & (ahead.double() < limit)
        found = int(keep.nonzero()[0]) if keep.any() else BINS - 1
        self.prefix[p] = self.prefix[p] * BINS + found
        self.before[p] += int(bins[found + 1 :].sum())
        if digit == SELECT_ROUNDS - 1:
            self.least[p] = max(self.least[p], self.prefix[p])

    def keep(self, actor: Actor, items: range) -> None:
        """The best of what is kept, noise added."""
        self.advance(actor, len(self.kinds) * SELECT_ROUNDS - 1)
        self.leave_best(actor, items, 1, True)

    def agree(self, actor: Actor) -> None:
        """The token that all programs take."""
        _, token = self.best(actor, 1 if self.kinds else 0)
        self.rank.world.drawn[self.rank.number, actor.program, actor.token] = token
        if actor.program == 0:
            self.rank.write(actor, "SEEN", 0, actor.token)
