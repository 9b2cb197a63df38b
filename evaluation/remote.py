"""The functions of a candidate as the trusted checker sees them: stand-ins that call into its process.

Whatever that process does, an answer is plain data (wire.py), an exception of a builtin class, or the end of the tests.
Standard library only.
"""

from __future__ import annotations

import builtins
import socket
import time
from collections.abc import Callable
from typing import Any, NoReturn

from laneformer.evaluation.wire import WireClosed, WireError, WireTimeout, decode, encode, receive, send

START_S = 60.0


class Verdict(BaseException):
    """Ends the tests at once; no test's `except Exception` catches it."""

    def __init__(self, status: str, text: str = "") -> None:
        super().__init__(status, text)
        self.status, self.text = status, text


class Remote:
    """The functions of a candidate, called in its own process before a common deadline."""

    def __init__(self, fd: int, seconds: float) -> None:
        self.channel, self.seconds = socket.socket(fileno=fd), seconds
        self.deadline = time.monotonic() + START_S
        self.number = 0
        self.verdict: Verdict | None = None

    def start(self, code: str) -> None:
        """Waits for the sandbox, hands over the code and waits until it is loaded; only the latter takes its time."""
        try:
            receive(self.channel, self.deadline)
        except (WireClosed, WireError, WireTimeout):
            raise Verdict("infrastructure", "the sandbox did not start") from None
        self.deadline = time.monotonic() + self.seconds
        reply = self.exchange({"code": code})
        if reply.get("event") != "loaded":
            self.end("failed", f"when loaded, {describe(reply)}")

    def end(self, status: str, text: str) -> NoReturn:
        """Ends the tests with a verdict that stays."""
        self.verdict = self.verdict or Verdict(status, text)
        raise self.verdict

    def exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        """One message there and one back; whatever breaks ends the tests."""
        if self.verdict is not None:
            raise self.verdict
        try:
            send(self.channel, message, self.deadline)
            reply = receive(self.channel, self.deadline)
        except WireTimeout:
            self.end("timeout", f"no answer within {self.seconds:g} s")
        except WireClosed:
            self.end("failed", "its process ended before it answered")
        except WireError as error:
            self.end("failed", f"it answered with {error}")
        if reply.get("event") == "syntax":
            self.end("syntax", str(reply.get("text"))[:500])
        if reply.get("event") == "memory":
            self.end("memory", "it ran out of memory")
        return reply

    def call(
        self,
        name: str,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        objects: bool = False,
        target: int | None = None,
        op: str = "call",
    ) -> Any:
        """What a function of the candidate returns; its builtin exceptions are raised here too."""
        self.number += 1
        asked = {"number": self.number, "name": name, "op": op, "objects": objects, "target": target}
        try:
            forms = [encode(value, number_of) for value in arguments]
            named_forms = {key: encode(value, number_of) for key, value in named.items()}
        except WireError as error:
            self.end("infrastructure", f"the test passes {error}")
        reply = self.exchange({**asked, "arguments": forms, "named": named_forms})
        if reply.get("number") != self.number:
            self.end("failed", "it answered out of turn")
        if reply.get("event") != "value":
            self.fail_as(reply)
        try:
            return decode(reply.get("value"), (lambda at: Foreign(self, at)) if objects else None)
        except WireError as error:
            self.end("failed", f"it returned {error}")

    def fail_as(self, reply: dict[str, Any]) -> NoReturn:
        """Raises the exception that a reply tells of, or ends the tests for one that a function may not raise."""
        kind = getattr(builtins, str(reply.get("kind")), None)
        ordinary = isinstance(kind, type) and issubclass(kind, Exception)
        if reply.get("event") != "raised" or not ordinary or kind is MemoryError:
            self.end("failed", describe(reply))
        text = str(reply.get("text"))
        try:
            raise kind(text)  # type: ignore[misc]
        except TypeError as error:
            raise (error if kind is TypeError else Exception(text)) from None


class Foreign:
    """An object that lives in the candidate's process; here it has no value, and equals nothing but itself."""

    def __init__(self, remote: Remote, number: int) -> None:
        object.__setattr__(self, "_own", (remote, number))

    def __getattr__(self, name: str) -> Any:
        remote, number = object.__getattribute__(self, "_own")
        return remote.call(name, (), {}, True, number, "get")

    def __setattr__(self, name: str, value: Any) -> None:
        remote, number = object.__getattribute__(self, "_own")
        remote.call(name, (value,), {}, True, number, "set")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        remote, number = object.__getattribute__(self, "_own")
        return remote.call("", arguments, named, True, number)

    def __bool__(self) -> bool:
        remote, _ = object.__getattribute__(self, "_own")
        remote.end("failed", "a test asks whether an object of the candidate's own class is true")
        return False


def number_of(value: Any) -> int:
    """The number of an object of the candidate; WireError for any other object, which cannot be sent."""
    if type(value) is not Foreign:
        raise WireError(f"an object of type {type(value).__name__}, which cannot be sent to the sandbox")
    return object.__getattribute__(value, "_own")[1]


def describe(reply: dict[str, Any]) -> str:
    """What a reply says, in words."""
    if reply.get("event") == "unsendable":
        return f"it returned {reply.get('text')}"
    if reply.get("event") != "raised":
        return "it answered out of turn"
    return f"it raised {str(reply.get('own'))[:100]}: {str(reply.get('text'))[:300]}"


def stand_in(remote: Remote, name: str, objects: bool = False) -> Callable[..., Any]:
    """What the tests call instead of the candidate's function."""

    def candidate(*arguments: Any, **named: Any) -> Any:
        return remote.call(name, arguments, named, objects)

    candidate.__name__ = name
    return candidate
