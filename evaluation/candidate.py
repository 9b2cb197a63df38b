"""What runs inside the sandbox's interpreter: loads a candidate's code and serves calls of its functions.

Nothing here is trusted: the code it loads can change all of it. That is harmless, because all this process can do is
answer calls with plain data (wire.py), and the checker, elsewhere, decides whether the answers are right.
Standard library only.
"""

from __future__ import annotations

import builtins
import socket
import sys
import types
from typing import Any

from laneformer.evaluation.wire import WireClosed, WireError, decode, encode, receive, send

MODULE = "candidate"


def main(descriptor: str) -> None:
    """Serves the checker at the other end of a socket until it closes."""
    channel = socket.socket(fileno=int(descriptor))
    server = Server(channel)
    try:
        send(channel, {"event": "ready"})
        server.load(receive(channel)["code"])
        while True:
            server.answer(receive(channel))
    except WireClosed:
        return


class Server:
    """Loads code once, then answers one call after another."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.module = types.ModuleType(MODULE)
        self.objects: list[Any] = []
        sys.modules[MODULE] = self.module

    def load(self, code: str) -> None:
        """Runs the code as a module of its own."""
        try:
            program = compile(code, MODULE, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError) as error:
            send(self.channel, {"event": "syntax", "text": f"{type(error).__name__}: {error}"[:500]})
            raise WireClosed from None
        except MemoryError:
            send(self.channel, {"event": "memory"})
            raise WireClosed from None
        try:
            exec(program, self.module.__dict__)
        except BaseException as error:
            send(self.channel, raised(error))
        else:
            send(self.channel, {"event": "loaded"})

    def answer(self, request: dict[str, Any]) -> None:
        """Carries out one request: a call, or an attribute read or set."""
        try:
            value = self.carry_out(request)
            foreign = self.keep if request["objects"] else None
            reply = {"event": "value", "number": request["number"], "value": encode(value, foreign)}
            send(self.channel, reply)
        except WireClosed:
            raise
        except BaseException as error:
            send(self.channel, {**raised(error), "number": request["number"]})

    def carry_out(self, request: dict[str, Any]) -> Any:
        """The value that a request asks for."""
        arguments = [decode(form, self.objects.__getitem__) for form in request["arguments"]]
        named = {name: decode(form, self.objects.__getitem__) for name, form in request["named"].items()}
        if request["target"] is None:
            return getattr(self.module, request["name"])(*arguments, **named)
        target = self.objects[request["target"]]
        if request["op"] == "set":
            return setattr(target, request["name"], arguments[0])
        if request["op"] == "get":
            return getattr(target, request["name"])
        return target(*arguments, **named)

    def keep(self, value: Any) -> int:
        """A number by which the checker may name an object that it cannot see."""
        self.objects.append(value)
        return len(self.objects) - 1


def raised(error: BaseException) -> dict[str, Any]:
    """What is said of an exception: the nearest builtin class, and its text."""
    if isinstance(error, MemoryError):
        return {"event": "memory"}
    if isinstance(error, WireError):
        return {"event": "unsendable", "text": str(error)[:500]}
    kinds = [kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind]
    try:
        text = str(error)[:500]
    except BaseException:
        text = ""
    return {"event": "raised", "kind": kinds[0] if kinds else "Exception", "own": type(error).__name__, "text": text}
