"""Where a rank's program finds things: the order of the int64 table of addresses that every rank has.

The host fills the tables (kernels/buffers.py), the kernel reads them (kernels/phases.py).
"""

import triton.language as tl

# A rank's own memory.
STREAM = tl.constexpr(0)  # residual streams, float32 [LR, D]
QKV = tl.constexpr(1)  # queries, keys, values of the new position, float32 [LR, rows]
WEIGHTED = tl.constexpr(2)  # attention's blocks, float32 [LR, H, NB, E]
WEIGHTED_SCALE = tl.constexpr(3)  # largest score and sum of weights, float32 [LR, H, NB, 2]
UNITS = tl.constexpr(4)  # feed-forward units, float32 [LR, F]
RING = tl.constexpr(5)  # own partials, float32 [G + 1, LR, D]
FINAL = tl.constexpr(6)  # what a replicated head reads, float32 [D]
HEAD_PARTS = tl.constexpr(7)  # a lane head's parts, float32 [LR, V]
COUNTERS = tl.constexpr(8)  # int32, a cache line each
TARGETS = tl.constexpr(9)  # the counts reached when the last launch ended, int32
SCORES = tl.constexpr(10)  # float64 [V]
KEYS = tl.constexpr(11)  # int64 [V]
MASSES = tl.constexpr(12)  # int64 [V]
HISTOGRAMS = tl.constexpr(13)  # int64 [2, 14, 256]
BEST_SCORES = tl.constexpr(14)  # float64 [2, P]
BEST_TOKENS = tl.constexpr(15)  # int32 [2, P]
SEEN = tl.constexpr(16)  # int8 [V]
TOKENS = tl.constexpr(17)  # int32, the host reads it while the kernel runs
LOGITS = tl.constexpr(18)  # float32 [tokens, V], kept if asked
RESULT = tl.constexpr(19)  # int32: tokens decoded, why it stopped
WAITS = tl.constexpr(20)  # int64 [P, 2]: polls of counters, polls of mailboxes
CANCEL = tl.constexpr(21)  # int32, set by the host
# Written by peers.
BOXES = tl.constexpr(22)  # int64 [R]: mailboxes of all ranks, int32 [G, S, D]
LOGIT_BOXES = tl.constexpr(23)  # int64 [R]: int32 [2, LS, V]
ABORTS = tl.constexpr(24)  # int64 [R]: abort blocks
CONTROLS = tl.constexpr(25)  # int64 [R]: int32 [4]
# Weights.
EMBEDDING = tl.constexpr(26)
FINAL_NORM = tl.constexpr(27)
LAYERS = tl.constexpr(28)  # int64 [N, LAYER_WORDS]
HEAD = tl.constexpr(29)
HEAD_OFFSETS = tl.constexpr(30)  # int64 [LR], elements from HEAD on
RANK = tl.constexpr(31)  # the rank's number itself
RANK_WORDS = tl.constexpr(32)

# A layer's row of the table LAYERS.
ATTENTION_NORM = tl.constexpr(0)
QKV_WEIGHT = tl.constexpr(1)
OUT_WEIGHT = tl.constexpr(2)
FFN_NORM = tl.constexpr(3)
GATE_UP_WEIGHT = tl.constexpr(4)
DOWN_WEIGHT = tl.constexpr(5)
Q_NORM = tl.constexpr(6)
K_NORM = tl.constexpr(7)
KEY_CACHE = tl.constexpr(8)  # [LR, KV, ring, E]
VALUE_CACHE = tl.constexpr(9)
RING_POSITIONS = tl.constexpr(10)  # positions the cache holds
WINDOW = tl.constexpr(11)  # positions seen, or 0 for all
LAYER_WORDS = tl.constexpr(12)

# What a launch is told, int64.
TOKENS_TO_DECODE = tl.constexpr(0)
POSITION = tl.constexpr(1)
FIRST_TOKEN = tl.constexpr(2)
TOKENS_BEFORE = tl.constexpr(3)  # decoded since the mailboxes were filled, on every rank alike
WAIT_LIMIT = tl.constexpr(4)  # polls
SEED = tl.constexpr(5)
TOP_K = tl.constexpr(6)
STOP_IDS = tl.constexpr(7)  # how many
LAUNCH_WORDS = tl.constexpr(8)
# And float64.
TEMPERATURE = tl.constexpr(0)
TOP_P = tl.constexpr(1)
PENALTY = tl.constexpr(2)

# Counters, in the order of laneformer.kernels.plan.COUNTERS.
C_STREAM = tl.constexpr(0)
C_QKV = tl.constexpr(1)
C_ATTENTION = tl.constexpr(2)
C_MIDDLE = tl.constexpr(3)
C_UNITS = tl.constexpr(4)
C_FINAL = tl.constexpr(5)
C_SCORES = tl.constexpr(6)
C_SELECT = tl.constexpr(7)
LINE = tl.constexpr(32)
