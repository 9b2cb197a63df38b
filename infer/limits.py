"""Numbers and names that the parent process and the ranks must agree on."""

from __future__ import annotations

# Prompt positions a forward pass takes at once; the same for every number of ranks, so that the bits are.
PREFILL_CHUNK = 64
# Seconds a rank may wait for another, or make no progress, before the run is ended.
WAIT_LIMIT_S = 3.5
# How forward passes can be executed.
RUNNERS = ("eager", "compiled", "graph", "persistent")
# The same wait for a kernel that is interpreted, statement by statement.
INTERPRETED_LIMIT_S = 120.0
