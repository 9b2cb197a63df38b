"""Signals, waits and mailboxes: the only file with memory-order code.

Three things order the programs of all ranks, and this is why each of them is enough.

1. Inside a rank, phases are ordered by counters that only grow. A program that has done its share of a phase calls
   `signal`: a block barrier, then a releasing add by one thread. The barrier orders every thread's stores before that
   thread's release (triton 3.6 and 3.7 emit none themselves), and the release makes them visible before the new count.
   Whoever reads a count that includes the add through `wait`, an acquiring load by one thread followed by a block
   barrier, therefore sees those stores from all of its threads. Releases and acquires are cumulative: what a program
   saw before it signals is visible to whoever waits for it. So "all of phase A, then any of phase B" needs one counter,
   and a buffer may be overwritten once every reader of it has signalled something that the writer waited for.
2. Between ranks a word is its own flag. A mailbox word holds SENTINEL until the one store that fills it; a reader polls
   with volatile loads, which read memory each time, until no word it wants is SENTINEL. No order between words is used:
   each word that is not SENTINEL is a value that was sent. A value whose bits equal SENTINEL is nudged to another NaN.
3. A mailbox word is used again G messages later. Its reader stores SENTINEL back (re-arms it) after its last read, and
   the signal that ends that phase releases at system scope. A sender fills the word again only after it has landed
   messages that this reader sent later than that signal (kernels/plan.py works out the G for which this holds). So the
   chain re-arm -> release -> message -> landing -> next fill orders the two stores to the word.

Between devices the message in that chain is a plain store polled by volatile loads: the PTX model calls that a race,
although no device reorders a store to a word against an older one to it that a fence at system scope has completed.
Hence the scope `sys` on every signal whose phase re-armed or sent something.

On AMD GPUs (constexpr AMD) two things differ, as read off compiled code (experiments/005_compiled_code). A volatile
load is one only with the modifier .cv and with buffer operations switched off, which whoever compiles must do. And a
block barrier does not wait for other waves' stores to leave them, so that each wave first waits for its own.

Every wait has a limit, counted in polls, and looks at the abort words. Who runs into the limit records where, and tells
the peers; then every wait returns at once and all programs leave at the end of the token.
"""

import triton
import triton.language as tl

SENTINEL = tl.constexpr(-1)
OTHER_NAN = tl.constexpr(0x7FC00000)
# Polls between two looks at the abort words.
ABORT_EVERY = tl.constexpr(16)
# Words of an abort block: the code and who set it; then a word that peers set.
ABORT_WORDS = tl.constexpr(16)
PEER_WORD = tl.constexpr(8)
# Threads of a program, of 8 warps or waves (kernels/launch.py).
NVIDIA_THREADS = tl.constexpr(256)
AMD_THREADS = tl.constexpr(512)
OK = tl.constexpr(0)
TIMEOUT = tl.constexpr(1)
BROKEN_LOGITS = tl.constexpr(2)
PEER_ABORTED = tl.constexpr(3)


@triton.jit
def pointer(table, index, DTYPE: tl.constexpr):
    """The pointer at `index` of an int64 table, known to be 16-byte aligned."""
    return tl.multiple_of(tl.load(table + index).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def block_barrier(AMD: tl.constexpr):
    """Orders what the threads of this block stored before against what any of them does after."""
    if AMD:
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)", "=r,r", [tl.arange(0, 1024)], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def signal(counter, SCOPE: tl.constexpr, AMD: tl.constexpr):
    """Says that this program has done its share of a phase; what it stored or saw before is visible to waiters."""
    block_barrier(AMD)
    tl.atomic_add(counter, 1, sem="release", scope=SCOPE)


@triton.jit
def aborted(p_abort):
    """Non-zero once this rank or a peer has given up."""
    # An acquiring add of nothing is a load that no compiler moves or drops.
    own = tl.atomic_add(p_abort, 0, sem="acquire", scope="sys")
    peer = tl.atomic_add(p_abort + PEER_WORD, 0, sem="acquire", scope="sys")
    return own | peer


@triton.jit
def give_up(p_abort, aborts, rank, code, program, place, seen, wanted, R: tl.constexpr):
    """Sets the abort word if nobody has; then records program, place, what was seen and wanted; tells the peers."""
    before = tl.atomic_cas(p_abort, 0, code, sem="relaxed", scope="sys")
    if before == 0:
        tl.store(p_abort + 1, rank)
        tl.store(p_abort + 2, program)
        tl.store(p_abort + 3, place)
        tl.store(p_abort + 4, seen)
        tl.store(p_abort + 5, wanted)
        for r in range(R):
            if r != rank:
                p_peer = tl.load(aborts + r).to(tl.pointer_type(tl.int32))
                tl.store(p_peer + PEER_WORD, rank + 1, cache_modifier=".wt")


@triton.jit
def wait(counter, target, p_abort, aborts, rank, program, place, limit, R: tl.constexpr, SCOPE: tl.constexpr):
    """Polls until the counter has reached `target`; returns the polls it took beyond the first."""
    seen = tl.atomic_add(counter, 0, sem="acquire", scope=SCOPE)
    polls = 0
    stop = 0
    while (seen < target) & (stop == 0):
        polls += 1
        seen = tl.atomic_add(counter, 0, sem="acquire", scope=SCOPE)
        if polls % ABORT_EVERY == 0:
            stop = aborted(p_abort)
        if (polls >= limit) & (stop == 0) & (seen < target):
            give_up(p_abort, aborts, rank, 1, program, place, seen, target, R)
            stop = 1
    return polls


@triton.jit
def to_words(value):
    """Float32 values as the words of a message, never SENTINEL."""
    words = value.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(words == SENTINEL, OTHER_NAN, words)


@triton.jit
def volatile(pointers, mask, AMD: tl.constexpr):
    """Reads words from memory itself, every time it is executed."""
    if AMD:
        return tl.load(pointers, mask=mask, other=0, volatile=True, cache_modifier=".cv")
    else:
        return tl.load(pointers, mask=mask, other=0, volatile=True)


@triton.jit
def look(pointers, mask, COPIES: tl.constexpr, AMD: tl.constexpr):
    """Words [S, N] as memory has them now, or [COPIES, S, N], and whether one is missing."""
    if COPIES == 1:
        words = volatile(pointers, mask, AMD)
        return words, tl.max(tl.max((words == SENTINEL).to(tl.int32), 1), 0)
    else:
        S: tl.constexpr = pointers.shape[0]
        N: tl.constexpr = pointers.shape[1]
        shape: tl.constexpr = (COPIES, S, N)
        words = volatile(tl.broadcast_to(pointers[None, :, :], shape), tl.broadcast_to(mask[None, :, :], shape), AMD)
        return words, tl.max(tl.max(tl.max((words == SENTINEL).to(tl.int32), 2), 1), 0)


@triton.jit
def poll_words(pointers, mask, slots, p_abort, aborts, rank, program, place, limit, R: tl.constexpr, AMD: tl.constexpr):
    """Polls mailbox words [S, N] until all masked ones have arrived: (words, polls beyond the first).

    `slots` [S, 1] numbers the rows; on a time-out the first missing one is recorded. All threads of a program must see
    the same words, or some would go on without the others: a tile with fewer words than threads, which every warp would
    read for itself, is read as so many copies that each thread has one, and they are compared across warps.
    """
    THREADS: tl.constexpr = AMD_THREADS if AMD else NVIDIA_THREADS
    SIZE: tl.constexpr = pointers.shape[0] * pointers.shape[1]
    COPIES: tl.constexpr = THREADS // SIZE if SIZE < THREADS else 1
    words, missing = look(pointers, mask, COPIES, AMD)
    polls = 0
    stop = 0
    while (missing != 0) & (stop == 0):
        polls += 1
        words, missing = look(pointers, mask, COPIES, AMD)
        if polls % ABORT_EVERY == 0:
            stop = aborted(p_abort)
        if (polls >= limit) & (stop == 0) & (missing != 0):
            if COPIES == 1:
                absent = words == SENTINEL
            else:
                absent = tl.max((words == SENTINEL).to(tl.int32), 0) != 0
            first = tl.min(tl.min(tl.where(absent, slots, 1 << 20), 1), 0)
            give_up(p_abort, aborts, rank, 1, program, place, first, -1, R)
            stop = 1
    if COPIES > 1:
        # Once none is missing all copies are alike.
        words = tl.max(words, 0)
    return words, polls


@triton.jit
def rearm(pointers, mask):
    """Makes mailbox words ready for the message that will use them next."""
    tl.store(pointers, SENTINEL, mask=mask)
