"""What the simulator asks of memory, and the plain answer: every store is seen at once by everybody.

kernels/weak_memory.py is the other answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Region:
    """A tensor's memory: its name, first address, and bytes as they are."""

    name: str
    start: int
    raw: np.ndarray

    @classmethod
    def of(cls, name: str, tensor: Any) -> Region:
        """The memory of a CPU tensor."""
        import ctypes

        size = tensor.numel() * tensor.element_size()
        kind = ctypes.c_uint8 * size
        return cls(name, tensor.data_ptr(), np.frombuffer(kind.from_address(tensor.data_ptr()), np.uint8))


class Memory(Protocol):
    """What the scheduler asks of memory; `version` changes whenever a word does."""

    version: int

    def start(self, programs: Sequence[Any]) -> None: ...
    def load(self, program: Any, ptrs: Any, mask: Any, other: Any, dtype: Any, volatile: bool) -> np.ndarray: ...
    def store(self, program: Any, ptrs: Any, values: Any, mask: Any) -> None: ...
    def atomic(self, program: Any, ptrs: Any, mask: Any, apply: Callable[[], Any], sem: str, scope: str) -> Any: ...
    def barrier(self, program: Any) -> None: ...
    def ended(self, program: Any) -> None: ...
    def drift(self) -> None: ...
    def settle(self) -> bool: ...
    def finish(self) -> None: ...
    def name_of(self, address: int) -> str: ...


class Named:
    """Which tensor an address lies in."""

    def __init__(self, regions: list[Region]) -> None:
        self.regions = regions
        self.starts = np.array([region.start for region in regions], np.uint64)

    def find(self, address: int) -> int:
        """The number of the region, or -1."""
        i = int(np.searchsorted(self.starts, np.uint64(address), "right")) - 1
        return i if i >= 0 and address < self.regions[i].start + self.regions[i].raw.size else -1

    def name_of(self, address: int) -> str:
        """Tensor and byte offset."""
        i = self.find(address)
        return (
            f"{self.regions[i].name} at byte {address - self.regions[i].start}" if i >= 0 else f"address {address:#x}"
        )


class SequentialMemory(Named):
    """Every store is seen at once by everybody."""

    def __init__(self, regions: list[Region]) -> None:
        super().__init__(regions)
        self.version = 0

    def start(self, programs: Sequence[Any]) -> None:
        """Nothing to prepare."""

    def load(self, program: Any, ptrs: Any, mask: Any, other: Any, dtype: Any, volatile: bool) -> np.ndarray:
        """What is there."""
        return interpreter().load(ptrs, mask, other, dtype)

    def store(self, program: Any, ptrs: Any, values: Any, mask: Any) -> None:
        """Puts it there."""
        before = interpreter().load(ptrs, mask, np.zeros_like(values), values.dtype)
        interpreter().store(ptrs, values, mask)
        after = interpreter().load(ptrs, mask, np.zeros_like(values), values.dtype)
        self.version += before.tobytes() != after.tobytes()

    def atomic(self, program: Any, ptrs: Any, mask: Any, apply: Callable[[], Any], sem: str, scope: str) -> Any:
        """The operation itself."""
        width = 8 if self.find(int(ptrs.reshape(-1)[0])) < 0 else 4
        kind = np.dtype(f"u{width}")
        zeros = np.zeros(ptrs.shape, kind)
        before = interpreter().load(ptrs, mask, zeros, kind)
        result = apply()
        self.version += before.tobytes() != interpreter().load(ptrs, mask, zeros, kind).tobytes()
        return result

    def barrier(self, program: Any) -> None:
        """Nothing is delayed."""

    def ended(self, program: Any) -> None:
        """Nothing is left."""

    def drift(self) -> None:
        """Nothing is under way."""

    def settle(self) -> bool:
        """Nothing can still change by itself."""
        return False

    def finish(self) -> None:
        """Everything is there."""


def interpreter() -> Any:
    """Triton's loads and stores at addresses."""
    from triton._C.libtriton import interpreter as found

    return found
