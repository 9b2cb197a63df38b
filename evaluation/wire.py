"""How values travel between the trusted checker and the process of a candidate: plain data in frames, nothing else.

A frame is four bytes of length and JSON. Only values of builtin and a few standard-library types have a form in it,
so whatever a hostile candidate sends, what is decoded is a real int, str, list, ... whose equality can be trusted;
an object of a class of its own has no form. Standard library only: both ends run with nothing else.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import itertools
import json
import socket
import time
import types
from collections.abc import Callable
from typing import Any

MAX_FRAME, MAX_DEPTH, MAX_ITEMS = 4 << 20, 60, 100_000
ITERATORS = (map, filter, zip, enumerate, reversed, types.GeneratorType, itertools.chain, *(
    type(iter(kind())) for kind in (tuple, list, str, dict, set, lambda: range(0), lambda: reversed([]))
))  # fmt: skip
BASES: tuple[Any, ...] = (int, float, complex, str, bytes, tuple, list, dict, set, frozenset)
PLAIN = (str, bool, type(None))


class WireError(ValueError):
    """A value without a form, or bytes that are not what this protocol sends."""


class WireTimeout(Exception):
    """Nothing came before the deadline."""


class WireClosed(Exception):
    """The other end is gone."""


def encode(value: Any, foreign: Callable[[Any], int] | None = None, depth: int = 0) -> Any:
    """The JSON form of a value; `foreign` gives a number to an object without one, which raises WireError otherwise."""
    if depth > MAX_DEPTH:
        raise WireError(f"a value nested deeper than {MAX_DEPTH}")
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is list:
        return [encode(item, foreign, depth + 1) for item in value]
    for tag, (known, pack, _) in FORMS.items():
        if kind is known:
            return {tag: pack(value, lambda item: encode(item, foreign, depth + 1))}
    if kind in ITERATORS:
        items = list(itertools.islice(value, MAX_ITEMS + 1))
        if len(items) > MAX_ITEMS:
            raise WireError(f"an iterator over more than {MAX_ITEMS} items")
        return {"iterator": encode(items, foreign, depth + 1)}
    if foreign is not None:
        return {"object": foreign(value)}
    for known in BASES:
        # A named tuple or an integer enumeration equals its plain value, and arrives as that.
        if isinstance(value, known):
            return encode(known(value), foreign, depth + 1)
    raise WireError(f"an object of type {kind.__name__}, which is no plain data")


def decode(form: Any, foreign: Callable[[int], Any] | None = None, depth: int = 0) -> Any:
    """The value of a JSON form; raises WireError for any form that `encode` does not make."""
    if depth > MAX_DEPTH:
        raise WireError(f"a value nested deeper than {MAX_DEPTH}")
    if type(form) in PLAIN:
        return form
    if type(form) is list:
        return [decode(item, foreign, depth + 1) for item in form]
    if type(form) is not dict or len(form) != 1:
        raise WireError("a form that is none of this protocol's")
    ((tag, payload),) = form.items()
    inner = lambda item: decode(item, foreign, depth + 1)  # noqa: E731
    if tag == "object" and foreign is not None and type(payload) is int:
        return foreign(payload)
    if tag == "iterator" and type(payload) is list:
        return iter([inner(item) for item in payload])
    if tag not in FORMS:
        raise WireError(f"a form of the unknown kind {str(tag)[:20]!r}")
    try:
        return FORMS[tag][2](payload, inner)
    except (TypeError, ValueError, ArithmeticError, OverflowError) as error:
        raise WireError(f"a broken form of kind {tag}: {str(error)[:100]}") from None


def _items(payload: Any, inner: Callable[[Any], Any]) -> list[Any]:
    if type(payload) is not list:
        raise WireError("items that are no list")
    return [inner(item) for item in payload]


def _pairs(payload: Any, inner: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    if type(payload) is not list or any(type(pair) is not list or len(pair) != 2 for pair in payload):
        raise WireError("entries that are no pairs")
    return [(inner(key), inner(item)) for key, item in payload]


def _text(payload: Any) -> str:
    if type(payload) is not str:
        raise WireError("a number that is no text")
    return payload


def _sequence(kind: type) -> Any:
    return kind, lambda v, e: [e(item) for item in v], lambda p, d: kind(_items(p, d))


def _mapping(kind: type, make: Callable[[Any], Any]) -> Any:
    pack = lambda v, e: [[e(key), e(item)] for key, item in dict.items(v)]  # noqa: E731
    return kind, pack, lambda p, d: make(_pairs(p, d))


def _texted(kind: type, pack: Callable[[Any], str], make: Callable[[str], Any]) -> Any:
    return kind, lambda v, _: pack(v), lambda p, _: make(_text(p))


# Tag: exact type, value to JSON, JSON to value.
FORMS: dict[str, tuple[type, Callable[..., Any], Callable[..., Any]]] = {
    # Hexadecimal, because decimal text of a long integer takes quadratic time.
    "int": _texted(int, hex, lambda text: int(text, 16)),
    "float": _texted(float, float.hex, float.fromhex),
    "complex": (
        complex,
        lambda v, _: [v.real.hex(), v.imag.hex()],
        lambda p, _: complex(*[float.fromhex(_text(part)) for part in p]),
    ),
    "bytes": _texted(bytes, bytes.hex, bytes.fromhex),
    "bytearray": _texted(bytearray, bytearray.hex, bytearray.fromhex),
    "tuple": _sequence(tuple),
    "set": _sequence(set),
    "frozenset": _sequence(frozenset),
    "deque": _sequence(collections.deque),
    "dict": _mapping(dict, dict),
    "ordered": _mapping(collections.OrderedDict, collections.OrderedDict),
    "counter": _mapping(collections.Counter, lambda pairs: collections.Counter(dict(pairs))),
    # Its factory stays behind; equality and look-ups do not need it.
    "default": _mapping(collections.defaultdict, lambda pairs: collections.defaultdict(None, pairs)),
    "keys": (type({}.keys()), lambda v, e: [e(i) for i in v], lambda p, d: dict.fromkeys(_items(p, d)).keys()),
    "values": (type({}.values()), lambda v, e: [e(i) for i in v], lambda p, d: dict(enumerate(_items(p, d))).values()),
    "items": (type({}.items()), lambda v, e: [[e(k), e(i)] for k, i in v], lambda p, d: dict(_pairs(p, d)).items()),
    "range": (
        range,
        lambda v, e: [e(v.start), e(v.stop), e(v.step)],
        lambda p, d: range(*_items(p, d)),
    ),
    "decimal": _texted(decimal.Decimal, str, decimal.Decimal),
    "fraction": (
        fractions.Fraction,
        lambda v, e: [e(v.numerator), e(v.denominator)],
        lambda p, d: fractions.Fraction(*_items(p, d)),
    ),
    "date": _texted(datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "datetime": _texted(datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "time": _texted(datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "seconds": _texted(
        datetime.timedelta, lambda v: repr(v.total_seconds()), lambda t: datetime.timedelta(seconds=float(t))
    ),
}


def send(channel: socket.socket, message: dict[str, Any], deadline: float | None = None) -> None:
    """One frame out; raises WireError for one that is too long, WireTimeout and WireClosed."""
    raw = json.dumps(message).encode()
    if len(raw) > MAX_FRAME:
        raise WireError(f"a message of {len(raw)} bytes, but {MAX_FRAME} is the limit")
    try:
        channel.settimeout(_left(deadline))
        channel.sendall(len(raw).to_bytes(4, "big") + raw)
    except TimeoutError:
        raise WireTimeout from None
    except OSError:
        raise WireClosed from None


def receive(channel: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    """One frame in; raises WireError for one that is too long or no message, WireTimeout and WireClosed."""
    length = int.from_bytes(_exactly(channel, 4, deadline), "big")
    if length > MAX_FRAME:
        raise WireError(f"a message of {length} bytes, but {MAX_FRAME} is the limit")
    try:
        message = json.loads(_exactly(channel, length, deadline))
    except (ValueError, RecursionError):
        raise WireError("bytes that are no message") from None
    if type(message) is not dict:
        raise WireError("a message that is no object")
    return message


def _exactly(channel: socket.socket, count: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        try:
            channel.settimeout(_left(deadline))
            part = channel.recv(min(count - len(parts), 1 << 16))
        except TimeoutError:
            raise WireTimeout from None
        except OSError:
            raise WireClosed from None
        if not part:
            raise WireClosed
        parts += part
    return bytes(parts)


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise WireTimeout
    return left
