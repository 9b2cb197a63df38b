"""Whether a candidate passes a problem's tests: decided here, in a process that the candidate cannot reach.

The tests run in this process with a stand-in for the candidate's function: a call sends the arguments to the sandbox
and gets plain data back (wire.py), so every comparison is made here, between real builtins. Arguments travel as
copies: a candidate cannot change what it is compared with. Problem files are trusted; their tests run as they are.
Standard library only, unless a test itself imports more.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import resource
import signal
import sys
import time
from typing import Any

from laneformer.evaluation.compare import coerce, same
from laneformer.evaluation.remote import START_S, Remote, Verdict, stand_in
from laneformer.evaluation.wire import decode

MEMORY_BYTES = 8 << 30


def main(spec: str) -> None:
    """Reads a job (JSON) from standard input and writes one verdict (JSON) to what was standard output."""
    keys = json.loads(spec)
    job = json.loads(sys.stdin.read())
    # The tests may print; only this function writes where the verdict is read.
    out, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(null, fd)
    limit = int(job["seconds"] + START_S)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    status, text = judge(job, keys["channel"], keys["reference"])
    os.write(out, json.dumps({"status": status, "text": text[:1000]}).encode())
    os._exit(0)


def judge(job: dict[str, Any], channel: int, reference: int | None) -> tuple[str, str]:
    """The status and what is to be said about it."""
    remote = Remote(channel, job["seconds"])
    try:
        try:
            remote.start(job["code"])
            # What comes back can also be slow to read or to compare; then this process is ended.
            signal.setitimer(signal.ITIMER_REAL, (2 if reference else 1) * job["seconds"] + 1)
            KINDS[job["kind"]](job, remote, reference)
        except Verdict as verdict:
            return verdict.status, verdict.text
        # A test that catches everything has caught a verdict too, which counts all the same.
        if remote.verdict is not None:
            return remote.verdict.status, remote.verdict.text
    except AssertionError as error:
        return "failed", f"a test does not hold {error}".strip()
    except MemoryError:
        return "memory", "what the candidate returned does not fit the checker's memory"
    except BaseException as error:
        return "failed", f"{type(error).__name__}: {error}"
    return "passed", ""


def run_check(job: dict[str, Any], remote: Remote, _: int | None) -> None:
    """HumanEval's form: a function check(candidate); helpers of the prompt come from the canonical solution."""
    names: dict[str, Any] = {}
    define(job["canonical"], names)
    proxy = stand_in(remote, job["entry_point"])
    names[job["entry_point"]] = proxy
    define(job["test"], names)
    if "check" not in names:
        raise Verdict("infrastructure", "the problem's test defines no check(candidate)")
    names["check"](proxy)


def run_asserts(job: dict[str, Any], remote: Remote, _: int | None) -> None:
    """MBPP's form: assert statements; every name that neither they nor Python define is the candidate's."""
    names: dict[str, Any] = {}
    tests = ast.parse(job["test"])
    setup = ast.parse(job["setup"])
    both = [*ast.walk(setup), *ast.walk(tests)]
    found = [node for node in both if isinstance(node, ast.Name)]
    known = {node.id for node in found if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
    known |= {alias.asname or alias.name for node in both if isinstance(node, ast.Import | ast.ImportFrom)
              for alias in node.names}  # fmt: skip
    # A task may ask for a function with the name of a builtin one.
    theirs = {node.id for node in found} - (known - defined_in(job["canonical"]))
    for name in {n.value.id for n in both if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)} & theirs:
        if name in sys.stdlib_module_names:
            names[name] = importlib.import_module(name)
            theirs.discard(name)
    for name in theirs:
        names[name] = names[inner_name(name)] = stand_in(remote, name, objects=True)
    trusted(setup, names)
    for name in theirs:
        names[name] = stand_in(remote, name)
    trusted(ast.fix_missing_locations(InnerCalls(theirs).visit(tests)), names)


def defined_in(code: str) -> set[str]:
    """The names of functions and classes at the top of a program."""
    return {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def inner_name(name: str) -> str:
    """The name of a stand-in whose result only goes back to the candidate, so that it may be any object."""
    return f"_object_{name}"


class InnerCalls(ast.NodeTransformer):
    """Renames calls of the candidate's names inside the arguments of another such call, as f(Pair(1, 2))."""

    def __init__(self, names: set[str]) -> None:
        self.names, self.inside = names, False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """One call; what is below a candidate's call is inner."""
        theirs = isinstance(node.func, ast.Name) and node.func.id in self.names
        if theirs and self.inside:
            node.func = ast.Name(inner_name(node.func.id), ast.Load())  # type: ignore[attr-defined]
        before, self.inside = self.inside, theirs
        node.args = [self.visit(argument) for argument in node.args]
        node.keywords = [self.visit(keyword) for keyword in node.keywords]
        self.inside = before
        return node


def run_inputs(job: dict[str, Any], remote: Remote, reference: int | None) -> None:
    """evalplus' form: inputs only; the canonical solution, in a sandbox of its own, says what is expected."""
    assert reference is not None
    truth = Remote(reference, job["seconds"])
    name = job["entry_point"]
    try:
        truth.start(job["canonical"])
    except Verdict as verdict:
        raise Verdict("infrastructure", f"the canonical solution does not load: {verdict.text}") from None
    for given in coerce(decode(job["inputs"]), decode(job["example"])):
        try:
            began = time.monotonic()
            truth.deadline = began + job["seconds"]
            expected = truth.call(name, tuple(given), {})
            remote.deadline += time.monotonic() - began
        except (Verdict, Exception) as error:
            raise Verdict("infrastructure", f"the canonical solution fails on {str(given)[:100]}: {error}") from None
        found = remote.call(name, tuple(given), {})
        if not same(name, given, found, expected, job["atol"]):
            raise AssertionError(f"for {str(given)[:100]}")


def define(source: str, names: dict[str, Any]) -> None:
    """Runs definitions of the problem file, which the candidate has no part in."""
    try:
        trusted(source, names)
    except Exception as error:
        raise Verdict("infrastructure", f"the problem's own code fails: {type(error).__name__}: {error}") from None


def trusted(source: Any, names: dict[str, Any]) -> None:
    """Runs code of the problem file."""
    try:
        program = compile(source, "problem", "exec", dont_inherit=True)
    except SyntaxError as error:
        raise Verdict("infrastructure", f"the problem's own code is no Python: {error}") from None
    exec(program, names)


KINDS = {"check": run_check, "asserts": run_asserts, "inputs": run_inputs}
