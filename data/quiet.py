"""How does datatrove run without its log on the terminal, and without tasks that outlive a killed command?"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from datatrove.utils.logging import logger

from laneformer.terminal import progress_bar

# Linux's prctl option that has a process signalled when its parent dies.
PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.2


@contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Sends what the block and its forked tasks write to standard error to a file; a progress bar stays visible."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", buffering=1, encoding="utf-8") as file:
        # rich writes to the stream of this name, so that a redirected standard error does not swallow its bars.
        file.rich_proxied_file = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # pyright: ignore
        with redirect_stderr(file):
            logger.remove()
            logger.add(file, level="DEBUG")
            try:
                yield
            finally:
                # Every task adds a sink of its own; none may point to the file after it is closed.
                logger.remove()


@contextmanager
def children_end_with_us() -> Iterator[None]:
    """Processes forked in the block end at once on SIGTERM and, on Linux, when this one is killed, even by SIGKILL.

    A pool's idle workers wait on a pipe that they hold open themselves, so without their parent they wait for ever.
    A handler for SIGTERM that this process has does not run in a worker that has just begun to wait, and the pool
    would wait for that worker for ever.
    """
    active = [True]
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def end_with_parent() -> None:
        if active[0]:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if prctl is not None:
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    os.register_at_fork(after_in_child=end_with_parent)
    try:
        yield
    finally:
        active[0] = False


@contextmanager
def watched(title: str, total: int, done: Callable[[], int]) -> Iterator[None]:
    """A progress bar that shows how many of a step's tasks are complete while the block runs."""
    stop = threading.Event()
    with progress_bar() as bar:
        task = bar.add_task(title, total=total)

        def follow() -> None:
            while not stop.wait(POLL_SECONDS):
                bar.update(task, completed=done())

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
