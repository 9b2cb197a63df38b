"""Which device a rank computes on, and what it is able to do.

ROCm devices are called `cuda` here, as torch calls them. Nothing here imports torch before it is asked, for the parent
process of a run stays light.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda")
EXCHANGES = ("auto", "mailbox", "gloo", "nccl")
# What the drivers of NVIDIA (also under WSL) and AMD leave in the file system.
DRIVER_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


class DeviceError(ValueError):
    """A device, or an exchange on it, that this machine does not have."""


class DeviceMemoryError(RuntimeError):
    """The device's memory is too small."""


@dataclass(frozen=True)
class Place:
    """Where one of `ranks` ranks computes: `cpu`, or GPU `index` of `count`; `name` is the hardware's, for people."""

    kind: str = "cpu"
    index: int = 0
    count: int = 0
    ranks: int = 1
    name: str = "cpu"

    @property
    def shared(self) -> bool:
        """Whether ranks share a GPU, for there are fewer of them than ranks."""
        return self.kind == "cuda" and self.ranks > self.count

    @property
    def device(self) -> torch.device:
        """The same, as torch takes it."""
        import torch

        return torch.device(self.kind, self.index) if self.kind == "cuda" else torch.device("cpu")

    def exchange(self, wanted: str) -> str:
        """The exchange that `wanted` means here; raises DeviceError for `nccl` without a GPU for every rank."""
        if wanted == "auto":
            return "nccl" if self.kind == "cuda" and not self.shared else "mailbox"
        if wanted == "nccl" and self.kind == "cpu":
            raise DeviceError("the nccl exchange needs GPUs; on CPUs take mailbox or gloo")
        if wanted == "nccl" and self.shared:
            raise DeviceError(
                f"the nccl exchange needs a GPU for each rank, but {self.ranks} ranks share {self.count}; take mailbox"
            )
        return wanted

    def notes(self, exchange: str) -> list[str]:
        """What a user should know about this place, the same on every rank."""
        if self.kind == "cpu" or self.ranks == 1:
            return []
        found = []
        if self.shared:
            gpus = f"{self.count} GPU{'s' if self.count > 1 else ''}"
            found.append(f"{self.ranks} ranks share {gpus}, so their speed says nothing about one GPU a rank")
        if exchange != "nccl":
            found.append(f"the {exchange} exchange works in CPU memory: every partial is copied through the host")
        return found


def check_device(name: str) -> None:
    """Raises DeviceError for a name that is none of DEVICES."""
    if name not in DEVICES:
        raise DeviceError(f"no device {name!r}; there are {', '.join(DEVICES)}")


def may_use_gpu(name: str) -> bool:
    """Whether a rank with this device setting could end up on a GPU, judged without torch."""
    return name == "cuda" or (name == "auto" and any(Path(node).exists() for node in DRIVER_NODES))


def place(name: str, rank: int = 0, ranks: int = 1) -> Place:
    """Where rank `rank` of `ranks` on this machine computes: GPU rank % count, or the CPU where `auto` finds no GPU.

    Raises DeviceError for an unknown name, and for `cuda` without a GPU that torch can use.
    """
    check_device(name)
    if name == "cpu":
        return Place(ranks=ranks)
    import torch

    if not torch.cuda.is_available():
        if name == "auto":
            return Place(ranks=ranks)
        built = torch.version.cuda or torch.version.hip
        why = "torch finds none" if built else f"torch {torch.__version__} is built without GPU support"
        raise DeviceError(f"--device cuda needs a GPU, but {why}; take --device cpu or auto")
    count = torch.cuda.device_count()
    index = rank % count
    return Place("cuda", index, count, ranks, torch.cuda.get_device_name(index))


def take(where: Place) -> None:
    """Makes the place this process's current device, with sums of 16-bit products kept in float32."""
    if where.kind == "cpu":
        return
    import torch

    torch.cuda.set_device(where.index)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@contextmanager
def memory_errors(where: Place, what: str) -> Iterator[None]:
    """Turns a device's lack of memory for `what` into DeviceMemoryError, which says how much there is."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(where.index)
        raise DeviceMemoryError(
            f"{where.name} has no room for {what}: {free / 1e9:.1f} of {total / 1e9:.1f} GB are free; take more ranks "
            "on more GPUs, a 16-bit dtype, or a shorter context"
        ) from None
