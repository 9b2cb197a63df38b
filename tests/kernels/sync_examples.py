"""Small kernels that two ranks meet through, each with a switch for a bug."""

import triton
import triton.language as tl


@triton.jit
def pass_on(flag, data, out, rank, N: tl.constexpr, BARRIER: tl.constexpr, RELEASE: tl.constexpr,
            ACQUIRE: tl.constexpr, SCOPE: tl.constexpr):  # fmt: skip
    """Rank 0 stores N words and raises a flag; rank 1 waits for the flag and copies them."""
    i = tl.arange(0, N)
    if rank == 0:
        tl.store(data + i, i + 1)
        if BARRIER:
            tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem=RELEASE, scope=SCOPE)
    else:
        while tl.atomic_add(flag, 0, sem=ACQUIRE, scope=SCOPE) < 1:
            pass
        tl.store(out + i, tl.load(data + i))


@triton.jit
def meet(count, out, programs, ROUNDS: tl.constexpr):
    """Programs of a grid meet ROUNDS times; each counts how many had arrived when it was let go."""
    pid = tl.program_id(0)
    for turn in range(1, ROUNDS + 1):
        tl.debug_barrier()
        tl.atomic_add(count, 1, sem="release", scope="gpu")
        while tl.atomic_add(count, 0, sem="acquire", scope="gpu") < turn * programs:
            pass
    tl.store(out + pid, tl.atomic_add(count, 0, sem="acquire", scope="gpu"))
