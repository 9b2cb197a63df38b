"""The same decode by transformers, in a process of its own: what users have today, measured in the same run.

Started as `python -m laneformer.infer.peers FD`. The model is the checkpoint folded into a dense Llama, which computes
what standard tensor parallelism does.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

from laneformer.infer.worker import report_failure, tie_to_parent

PEERS = ("hf-generate", "hf-compiled")
START_LIMIT_S = 900.0


class PeerError(RuntimeError):
    """The peer's process failed."""


class Peers:
    """A running transformers process that times requests; a context manager. Raises PeerError when it fails."""

    def __init__(self, folder: str, dtype: str | None, threads: int, capacity: int) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "laneformer.infer.peers", str(theirs.fileno())]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self._process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        spec = {"folder": folder, "dtype": dtype, "threads": threads, "capacity": capacity, "parent": os.getpid()}
        self._ask(spec)

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
            if not self._connection.poll(START_LIMIT_S):
                raise PeerError(f"transformers did not answer within {START_LIMIT_S:g} s")
            answer = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise PeerError(f"the transformers process ended with exit code {self._process.wait()}") from None
        if answer["event"] == "error":
            raise PeerError(f"transformers raised {answer['kind']}: {answer['text']}")
        return answer

    def timed(self, peer: str, prompt: tuple[int, ...], count: int) -> list[float]:
        """Seconds since the request at which each token came."""
        return self._ask({"op": "time", "peer": peer, "prompt": list(prompt), "count": count})["at_s"]

    def logits(self, tokens: tuple[int, ...]) -> np.ndarray:
        """Float32 logits [S, V]."""
        answer = self._ask({"op": "logits", "tokens": list(tokens)})
        return np.frombuffer(self._connection.recv_bytes(), np.float32).reshape(answer["shape"])


def main() -> None:
    """Serves timing requests until the parent is gone."""
    connection = Connection(int(sys.argv[1]))
    spec = json.loads(connection.recv_bytes())
    tie_to_parent(spec["parent"])
    try:
        serve(connection, spec)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
    except BaseException as error:
        report_failure(connection, error)
        os._exit(1)


def serve(connection: Connection, spec: dict[str, Any]) -> None:
    """Loads the model, answers one request after another."""
    import torch

    from laneformer.dense import to_llama
    from laneformer.hf_decode import CompiledLoop, with_generate
    from laneformer.model import Laneformer

    torch.set_num_threads(spec["threads"])
    dtype = getattr(torch, spec["dtype"]) if spec["dtype"] else None
    with contextlib.redirect_stdout(sys.stderr):
        model = to_llama(Laneformer.from_pretrained(spec["folder"], dtype=dtype, schedule="tensor-parallel")).eval()
    loop: CompiledLoop | None = None
    connection.send_bytes(b'{"event": "ready"}')
    while True:
        message = json.loads(connection.recv_bytes())
        if message["op"] == "logits":
            with torch.inference_mode():
                logits = model(torch.tensor([message["tokens"]])).logits[0].float()
            connection.send_bytes(json.dumps({"event": "done", "shape": list(logits.shape)}).encode())
            connection.send_bytes(logits.numpy().tobytes())
            continue
        if message["peer"] == "hf-generate":
            times = with_generate(model, message["prompt"], message["count"])
        else:
            loop = loop or CompiledLoop(model, spec["capacity"])
            times = loop.times(message["prompt"], message["count"])
        connection.send_bytes(json.dumps({"event": "done", "at_s": times}).encode())


if __name__ == "__main__":
    main()
