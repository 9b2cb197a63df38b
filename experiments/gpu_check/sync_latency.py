"""What does a sync cost alone: all programs over a counter, and a row of words from one program to another and back?"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from common import arguments, run_kernel, save, sizes, spread

from laneformer.kernels.memory import LINE
from laneformer.kernels.sync import ABORT_WORDS, poll_words, rearm, signal, to_words, wait

# Words of a message, as many as rows that a program owns in the 2B.
WORDS = 32
LIMIT = tl.constexpr(1 << 22)


@triton.jit
def meet(counter, p_abort, aborts, rounds, P: tl.constexpr, SCOPE: tl.constexpr, AMD: tl.constexpr):
    """Every program signals, then waits for all, `rounds` times."""
    p = tl.program_id(0)
    for i in range(rounds):
        signal(counter, SCOPE, AMD)
        wait(counter, (i + 1) * P, p_abort, aborts, 0, p, 0, LIMIT, 1, SCOPE)


@triton.jit
def ping_pong(boxes, out, p_abort, aborts, rounds, N: tl.constexpr, AMD: tl.constexpr):
    """Two programs send each other rows of words, one after the other; boxes [2, 4, N], re-armed as in the kernel."""
    p = tl.program_id(0)
    words = tl.arange(0, N)
    one = tl.arange(0, 1)[:, None]
    value = words.to(tl.float32) + 1.0
    for i in range(rounds):
        p_theirs = boxes + ((1 - p) * 4 + i % 4) * N + words
        p_own = boxes + ((p * 4) + i % 4) * N + one * 0 + words[None, :]
        if p == 0:
            tl.store(p_theirs, to_words(value), cache_modifier=".wt")
        got, _ = poll_words(p_own, (one == 0) & (words[None, :] >= 0), one, p_abort, aborts, 0, p, 0, LIMIT, 1, AMD)
        rearm(p_own, (one == 0) & (words[None, :] >= 0))
        value = tl.sum(got.to(tl.float32, bitcast=True), 0) + 1.0
        if p == 1:
            tl.store(p_theirs, to_words(value), cache_modifier=".wt")
    tl.store(out + p * N + words, value)


def timed(s, run, rounds: int) -> float:
    """Microseconds a round of a launch."""
    if s.tiny:
        run()
        return float("nan")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / rounds


def main() -> None:
    """The step."""
    options = arguments(__doc__)
    s = sizes(options.tiny)
    rounds = 3 if s.tiny else 2000
    abort = torch.zeros(int(ABORT_WORDS.value), dtype=torch.int32, device=s.device)
    aborts = torch.tensor([abort.data_ptr()], dtype=torch.int64, device=s.device)
    amd = torch.version.hip is not None
    found = {"rounds": rounds, "counter": [], "words": []}
    for programs in (2, 3) if s.tiny else (8, 32, s.programs):
        for scope in ("gpu", "sys"):
            times = []
            for _ in range(s.rounds):
                counter = torch.zeros(int(LINE.value), dtype=torch.int32, device=s.device)

                def run(counter=counter, programs=programs, scope=scope):
                    sizes_of = {"P": programs, "SCOPE": scope, "AMD": amd}
                    run_kernel(meet, programs, (counter, abort, aborts, rounds), sizes_of, {"abort": abort})

                times.append(timed(s, run, rounds))
                assert counter[0] == programs * rounds, "a signal was lost"
            # The first launch compiles.
            found["counter"].append({"programs": programs, "scope": scope, "us": spread(times[1:])})
    times = []
    for _ in range(s.rounds):
        boxes = torch.full((2 * 4 * WORDS,), -1, dtype=torch.int32, device=s.device)
        out = torch.zeros(2 * WORDS, device=s.device)

        def run(boxes=boxes, out=out):
            run_kernel(ping_pong, 2, (boxes, out, abort, aborts, rounds), {"N": WORDS, "AMD": amd}, {"abort": abort})

        times.append(timed(s, run, rounds))
        first = torch.arange(WORDS) + 1.0
        assert torch.equal(out[WORDS:].cpu(), first + 2 * rounds - 1), "a word came wrong"
    found["words"].append({"words": WORDS, "round_trip_us": spread(times[1:])})
    assert int(abort[0]) == 0, f"a wait ran into its limit: {abort.tolist()}"
    save(options.json, found)
    print(found)


if __name__ == "__main__":
    main()
