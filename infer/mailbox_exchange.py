"""Partials through shared memory: the exchange of ranks on one machine.

It gives the same bits as every other exchange, for all sum as laneformer.infer.sum_tree says. The `..._rows` calls do
for one token's float32 rows what the others do for tensors, with as little as can run between two modules.

Shape suffixes: L lanes of this rank, D hidden, C a lane's share of the vocabulary, n tree nodes of a rank.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from laneformer.infer.mailbox import Mailbox, WaitTimeout
from laneformer.infer.shared_memory import name_module
from laneformer.infer.sum_tree import SumTree


class MailboxExchange:
    """Partials through shared memory, one-sided."""

    def __init__(self, mailbox: Mailbox, lanes: int) -> None:
        self.mailbox = mailbox
        self.tree = SumTree.over(lanes, mailbox.ranks)
        self._sent: dict[int, tuple[int, Tensor]] = {}
        self._sent_rows: dict[int, tuple[int, list[np.ndarray]]] = {}
        self._head_wait = 0.0
        self._head_module = mailbox.status.modules
        # Two ranks that each send one sum: the tree is that one addition.
        self._one_pair = mailbox.ranks == 2 and self.tree.width == 1

    def at(self, module: int) -> None:
        """Notes progress in shared memory."""
        self.mailbox.progress.at(module)

    def set_latency(self, seconds: float) -> None:
        """Sets the emulated link; every rank must do so between the same two messages."""
        self.mailbox.latency_s = seconds

    def take_waits(self) -> tuple[float, float]:
        """Seconds waited since last asked: for module partials, and for the head's exchanges."""
        waits = self.mailbox.waited_s - self._head_wait, self._head_wait
        self.mailbox.waited_s = self._head_wait = 0.0
        return waits

    def post(self, module: int, partial_L: Tensor) -> None:
        """Pushes the sums over this rank's lanes to every peer."""
        own = self.tree.own(self.mailbox.rank, partial_L)
        self._sent[module] = (self.mailbox.post(own.numpy().reshape(-1)), own)

    def land(self, module: int) -> Tensor:
        """Waits for every peer's sums of `module`, and finishes the tree."""
        number, own = self._sent.pop(module)
        return self._combine(number, own, lambda: f"the partial of {self._name(module)}")

    def _name(self, module: int) -> str:
        return name_module(module, self.mailbox.status.modules)

    def _combine(self, number: int, own: Tensor, what: Callable[[], str]) -> Tensor:
        sums = []
        for rank in range(self.mailbox.ranks):
            if rank == self.mailbox.rank:
                sums.append(own)
                continue
            shape = (len(self.tree.nodes[rank]), *own.shape[1:])
            sums.append(self._take(number, rank, shape, what))
        return self.tree.finish(sums)

    def _take(self, number: int, peer: int, shape: tuple[int, ...], what: Callable[[], str]) -> Tensor:
        out = np.empty(shape, np.float32)
        try:
            self.mailbox.take(number, peer, out.reshape(-1))
        except WaitTimeout as error:
            raise WaitTimeout(f"{error}; it carries {what()}", error.peer) from None
        return torch.from_numpy(out)

    def sum_lanes(self, x_L: Tensor) -> Tensor:
        """The sum over all lanes, at once, in as many messages as its size needs."""
        own = self.tree.own(self.mailbox.rank, x_L)
        what = "the final sum over lanes"
        parts = self._in_pieces(
            own.flatten(1), self.mailbox.words // self.tree.width, lambda n, x: self._combine(n, x, lambda: what)
        )
        return torch.cat(parts).view(own.shape[1:])

    def gather_lanes(self, x_L: Tensor) -> Tensor:
        """x of all lanes in lane order, in as many messages as its size needs."""

        def gather(number: int, piece: Tensor) -> Tensor:
            ranks = range(self.mailbox.ranks)
            shape = tuple(piece.shape)
            return torch.cat([
                piece if r == self.mailbox.rank else self._take(number, r, shape, lambda: "the logits") for r in ranks
            ])  # fmt: skip

        parts = self._in_pieces(x_L.float().flatten(1), self.mailbox.words // x_L.shape[0], gather)
        return torch.cat(parts, 1).view(-1, *x_L.shape[1:])

    def _in_pieces(self, x: Tensor, width: int, finish: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
        """Posts x [n, ...] in pieces of `width` columns, each finished before the next; its waits are the head's."""
        before = self.mailbox.waited_s
        parts = []
        for i in range(0, x.shape[1], width):
            piece = x[:, i : i + width].contiguous()
            parts.append(finish(self.mailbox.post(piece.numpy().reshape(-1)), piece))
        self._head_wait += self.mailbox.waited_s - before
        return parts

    def post_rows(self, module: int, partial_LD: np.ndarray) -> None:
        """Pushes one token's sums over this rank's lanes to every peer."""
        self._sent_rows[module] = self._post_rows(partial_LD)

    def _post_rows(self, x_LD: np.ndarray) -> tuple[int, list[np.ndarray]]:
        own_n = [x_LD] if x_LD.ndim == 1 else self.tree.own_rows(self.mailbox.rank, x_LD)
        return self.mailbox.post(own_n[0] if len(own_n) == 1 else np.concatenate(own_n)), own_n

    def land_rows(self, module: int) -> np.ndarray:
        """Waits for every peer's sums of `module`, and finishes the tree straight from the mailbox."""
        return self._finish_rows(*self._sent_rows.pop(module), module)

    def _finish_rows(self, number: int, own_n: list[np.ndarray], module: int) -> np.ndarray:
        mailbox = self.mailbox
        taken = {
            peer: self._message(number, peer, len(self.tree.nodes[peer]) * len(own_n[0]), module)
            for peer in mailbox.peers
        }
        if self._one_pair:
            (message,) = taken.values()
            total = own_n[0] + message
        else:
            total = self.tree.finish([
                own_n if rank == mailbox.rank else np.split(taken[rank], len(self.tree.nodes[rank]))
                for rank in range(mailbox.ranks)
            ])  # fmt: skip
        for message in taken.values():
            message.fill(0)
        return total

    def _message(self, number: int, peer: int, count: int, module: int) -> np.ndarray:
        try:
            return self.mailbox.wait(number, peer, count)
        except WaitTimeout as error:
            raise WaitTimeout(f"{error}; it carries the partial of {self._name(module)}", error.peer) from None

    def sum_rows(self, x_LD: np.ndarray) -> np.ndarray:
        """The sum over all lanes of one token's rows, at once."""
        before = self.mailbox.waited_s
        total = self._finish_rows(*self._post_rows(x_LD), self._head_module)
        self._head_wait += self.mailbox.waited_s - before
        return total

    def gather_rows(self, x_LC: np.ndarray) -> np.ndarray:
        """One token's rows of all lanes in lane order, flat."""
        mailbox, before, own = self.mailbox, self.mailbox.waited_s, x_LC.reshape(-1)
        number = mailbox.post(own)
        out = np.empty((mailbox.ranks, len(own)), np.float32)
        out[mailbox.rank] = own
        for peer in mailbox.peers:
            message = self._message(number, peer, len(own), self._head_module)
            out[peer] = message
            message.fill(0)
        self._head_wait += mailbox.waited_s - before
        return out.reshape(-1)
