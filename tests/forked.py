"""Runs a function on several ranks, each a forked process of its own, and brings back what each returned."""

from __future__ import annotations

import multiprocessing
import pickle
import time
import traceback

LIMIT_S = 60.0


def run_ranks(count, function, *args):
    """[function(rank, *args) for every rank], at the same time; raises AssertionError with a rank's traceback."""
    context = multiprocessing.get_context("fork")
    ends = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [context.Process(target=_run, args=(ends[r][1], function, r, args), daemon=True) for r in range(count)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    try:
        results = []
        for rank, (ours, _) in enumerate(ends):
            assert ours.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} did not answer in {LIMIT_S} s"
            failed, result = ours.recv()
            assert not failed, f"rank {rank} failed:\n{result}"
            results.append(result)
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(end, function, rank, args):
    try:
        answer = (False, function(rank, *args))
        pickle.dumps(answer)
    except BaseException:
        answer = (True, traceback.format_exc())
    end.send(answer)
