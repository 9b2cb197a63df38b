"""Which rank has stopped moving."""

from __future__ import annotations

import time

from laneformer.infer.shared_memory import BUSY, Status


class Watch:
    """Notices a busy rank whose progress has stopped although it waits for nobody."""

    def __init__(self, status: Status, ranks: int, limit_s: float) -> None:
        self.status, self.ranks, self.limit_s = status, ranks, limit_s
        self._seen = [(-1, 0.0)] * ranks

    def stalled(self) -> int | None:
        """The rank that has stalled, if one has; preferably one that waits for nobody."""
        now = time.monotonic()
        late = []
        for rank in range(self.ranks):
            progress = self.status.progress(rank)
            if self.status.stage(rank) != BUSY or progress != self._seen[rank][0]:
                self._seen[rank] = (progress, now)
            elif now - self._seen[rank][1] > self.limit_s:
                late.append(rank)
        causes = [rank for rank in late if self.status.waiting_for(rank) is None]
        return (causes or late or [None])[0]
