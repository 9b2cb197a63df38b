"""The fixed order in which lanes are summed, whatever the number of ranks.

Sums follow a balanced binary tree over the lanes. A rank sends the largest subtrees that lie wholly within its lanes,
and every rank finishes the tree itself.

Shape suffixes: L lanes of a rank, n tree nodes of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True)
class SumTree:
    """Which lanes' sums each rank sends, and how all of them combine.

    `nodes[r]` lists rank r's (first, last + 1) lane ranges, each a subtree of the balanced tree over all lanes.
    """

    lanes: int
    nodes: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def over(cls, lanes: int, ranks: int) -> SumTree:
        """Equal shares of lanes; raises ValueError when `ranks` does not divide them."""
        if not 1 <= ranks <= lanes or lanes % ranks:
            fits = [r for r in range(1, lanes + 1) if lanes % r == 0]
            raise ValueError(f"{lanes} lanes cannot be shared equally by {ranks} ranks; ranks may be {fits}")
        share = lanes // ranks
        return cls(lanes, tuple(tuple(_cover(0, lanes, r * share, (r + 1) * share)) for r in range(ranks)))

    @property
    def width(self) -> int:
        """The most nodes a rank sends."""
        return max(len(nodes) for nodes in self.nodes)

    def own(self, rank: int, x_L: Tensor) -> Tensor:
        """The sums that `rank` sends, [n, ...] in the accumulation type, from its lanes' x [L, ...]."""
        import torch

        from laneformer.ops import tree_sum

        first = rank * (self.lanes // len(self.nodes))
        return torch.stack([tree_sum(x_L[lo - first : hi - first]) for lo, hi in self.nodes[rank]])

    def own_rows(self, rank: int, x_LD: np.ndarray) -> list[np.ndarray]:
        """The sums that `rank` sends, n arrays [D], from its lanes' rows; the same bits as `own` gives."""
        first = rank * (self.lanes // len(self.nodes))

        def add(lo: int, hi: int) -> np.ndarray:
            if hi - lo == 1:
                return x_LD[lo - first]
            middle = lo + (hi - lo) // 2
            return add(lo, middle) + add(middle, hi)

        return [add(lo, hi) for lo, hi in self.nodes[rank]]

    def finish(self, sums: Sequence[Iterable[Any]]) -> Any:
        """The sum over all lanes from every rank's node sums, tensors or arrays alike."""
        found = {node: part for nodes, part_n in zip(self.nodes, sums, strict=True)
                 for node, part in zip(nodes, part_n, strict=False)}  # fmt: skip

        def add(lo: int, hi: int) -> Any:
            if (lo, hi) in found:
                return found[lo, hi]
            middle = lo + (hi - lo) // 2
            return add(lo, middle) + add(middle, hi)

        return add(0, self.lanes)


def _cover(lo: int, hi: int, first: int, end: int) -> list[tuple[int, int]]:
    """The largest subtrees of the tree over lo..hi that lie within first..end."""
    if first <= lo and hi <= end:
        return [(lo, hi)]
    if hi <= first or end <= lo:
        return []
    middle = lo + (hi - lo) // 2
    return _cover(lo, middle, first, end) + _cover(middle, hi, first, end)
