"""What the sandbox says of honest programs, and that its statuses are kept apart."""

from __future__ import annotations

import os

import pytest

from laneformer.evaluation.problems import read_problems
from laneformer.evaluation.sandbox import Job, Limits, Sandbox, SandboxError


@pytest.fixture(scope="module")
def run():
    """Runs code against assert statements."""
    try:
        sandbox = Sandbox(Limits(seconds=20.0, memory_bytes=256 << 20))
    except SandboxError as error:
        pytest.skip(str(error))

    def run(code, test, kind="asserts", **more):
        return sandbox.run(Job(code, kind, "f", test, **more))

    run.sandbox = sandbox
    return run


def test_statuses_are_kept_apart(run):
    assert run("def f(x):\n    return x + 1\n", "assert f(1) == 2").status == "passed"
    assert run("def f(x):\n    return x + 2\n", "assert f(1) == 2").status == "failed"
    assert run("def f(x) return x\n", "assert f(1) == 2").status == "syntax"
    assert run("def f(x):\n    return [0] * 10**12\n", "assert f(1) == 2").status == "memory"
    assert run("def f(x):\n    return x + 1\n", "assert f(1 ==", "check").status == "infrastructure"
    assert run("def g(x):\n    return x + 1\n", "assert f(1) == 2").status == "failed"


@pytest.mark.parametrize(
    "value",
    ["-7", "10**400", "1.5", "float('inf')", "2+3j", "'a\\ud800é'", "b'\\x00'", "None", "True", "[1, (2, {3: {4}})]",
     "frozenset({1})", "range(3, 9, 2)", "OrderedDict(a=1)", "Counter('aab')", "Decimal('1.10')", "Fraction(1, 3)",
     "deque([1, 2])", "date(2020, 2, 29)", "timedelta(days=1, seconds=5)"],
)  # fmt: skip
def test_plain_values_arrive_as_they_are_in_both_directions(run, value):
    names = (
        "from collections import OrderedDict, Counter, deque\nfrom decimal import Decimal\n"
        "from fractions import Fraction\nfrom datetime import date, timedelta\n"
    )
    code = f"{names}def f(x):\n    assert type(x) is type({value}) and x == {value}\n    return {value}\n"
    outcome = run(code, f"{names}assert f({value}) == {value}\nassert type(f({value})) is type({value})")
    assert outcome.status == "passed", outcome


TOO_MUCH = {
    "print('x' * (2 << 20), flush=True)": "printed",
    "open('a', 'wb').write(bytes(9 << 20))": "File too large",
    "[open(str(i), 'wb').write(bytes(7 << 20)) for i in range(9)]": "No space left",
    "[open('/dev/null') for i in range(40)]": "Too many open files",
    "[os.fork() or os._exit(time.sleep(9)) for i in range(12)]": "temporarily unavailable",
    "bytearray(300 << 20)": "memory",
}


@pytest.mark.parametrize("deed", TOO_MUCH)
def test_a_right_answer_does_not_count_when_a_limit_was_passed(run, deed):
    code = f"import os, time\ndef f(x):\n    {deed}\n    return x\n"
    outcome = run(code, "assert f(1) == 1")
    assert outcome.status in ("failed", "memory") and TOO_MUCH[deed] in outcome.text, outcome


def test_answers_that_are_long_or_deep_are_refused_unread(run):
    assert "limit" in run("def f(x):\n    return 'x' * (5 << 20)\n", "assert len(f(1)) == 5 << 20").text
    nested = "def f(x):\n    for _ in range(99):\n        x = [x]\n    return x\n"
    assert "deeper" in run(nested, "assert f(1) != 1").text
    raw = "import os\nraw = b'[' * 100000\n"
    raw += "def f(x):\n    os.write(3, len(raw).to_bytes(4, 'big') + raw)\n    return 1\n"
    assert run(raw, "assert f(1) == 1").status == "failed"


def test_named_tuples_and_enumerations_equal_their_plain_values_as_in_one_process(run):
    code = (
        "from collections import namedtuple\nfrom enum import IntEnum\nPoint = namedtuple('Point', 'x y')\n"
        "class Three(IntEnum):\n    THREE = 3\ndef f(x):\n    return Point(x, [Three.THREE])\n"
    )
    assert run(code, "assert f(2) == (2, [3])").status == "passed"
    assert run(code, "assert f(2) == (2, [True])").status == "failed"


def test_an_answer_that_was_not_asked_for_ends_the_run(run):
    code = """
import json, os
def f(x):
    form = json.dumps({"event": "value", "number": 99, "value": {"int": "0x2"}}).encode()
    os.write(3, len(form).to_bytes(4, "big") + form)
    return 2
"""
    outcome = run(code, "assert f(1) == 2")
    assert outcome.status == "failed" and "out of turn" in outcome.text


def test_nan_minus_zero_and_iterators_keep_their_nature(run):
    code = "def f(x):\n    return float('nan') if x else -0.0\ndef g():\n    return (i for i in range(3))\n"
    test = "import math\nassert math.isnan(f(1))\nassert math.copysign(1, f(0)) == -1\nassert f(1) != f(1)\n"
    test += "assert g() != [0, 1, 2]\nassert list(g()) == [0, 1, 2]"
    assert run(code, test).status == "passed"


def test_exceptions_of_the_candidate_can_be_expected_by_a_test(run):
    code = "class Own(KeyError):\n    pass\ndef f(x):\n    raise Own('no') if x else ValueError('bad')\n"
    test = (
        "def raises(kind, x):\n    try:\n        f(x)\n    except kind as error:\n        return 'no' in str(error)\n"
    )
    assert run(code, test + "assert raises(LookupError, 1)\nassert raises(ValueError, 0) is False").status == "passed"
    assert run(code, test + "assert raises(ValueError, 1)").status == "failed"


def test_a_test_that_catches_everything_does_not_turn_an_exit_into_a_pass(run):
    test = "try:\n    f(1)\nexcept BaseException:\n    pass"
    assert run("def f(x):\n    raise ValueError\n", test).status == "passed"
    assert run("import os\ndef f(x):\n    os._exit(0)\n", test).status == "failed"
    assert run("def f(x):\n    raise SystemExit(0)\n", test).status == "failed"


def test_objects_of_the_candidates_classes_go_back_to_it_but_are_never_believed(run):
    code = (
        "class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\n    def __eq__(self, other):\n"
        "        return True\ndef f(pair):\n    return pair.a + pair.b\ndef make():\n    return Pair(1, 2)\n"
    )
    assert run(code, "assert f(Pair(1, 2)) == 3", setup="").status == "passed"
    assert run(code, "assert f(p) == 7", setup="p = Pair(1, 2)\np.b = 6").status == "passed"
    outcome = run(code, "assert make() == 3")
    assert outcome.status == "failed" and "Pair" in outcome.text


def test_a_function_may_have_a_builtin_name_when_the_solution_defines_it(run):
    code = "def sum(a, b):\n    return a * b\n"
    assert run(code, "assert sum(3, 4) == 12", canonical=code).status == "passed"
    assert run("def f(a):\n    return 1\n", "assert sum([3, 4]) == 7 and f(0) == 1").status == "passed"


def test_what_a_candidate_prints_is_dropped_and_its_helpers_cannot_replace_the_problems(run):
    prompt = "def helper(x):\n    return x * 2\ndef f(x):\n"
    check = "def check(candidate):\n    assert helper(candidate(3)) == 12\n"
    good = prompt + "    print('hello')\n    return 2 * x\n"
    assert run(good, check, "check", canonical=prompt + "    return 2 * x\n").status == "passed"
    bad = prompt + "    return 0\ndef helper(x):\n    return 12\n"
    assert run(bad, check, "check", canonical=prompt + "    return 2 * x\n").status == "failed"


def test_inputs_without_outputs_are_compared_with_the_canonical_solution_in_its_own_process(run):
    canonical = "def f(x, y):\n    return x / y\n"
    inputs = ([1, 3], [2.0, 7])
    job = {"canonical": canonical, "inputs": inputs, "kind": "inputs"}
    assert run("def f(x, y):\n    return x * (1 / y)\n", "", **job).status == "passed"
    assert run("def f(x, y):\n    return x // y\n", "", **job).status == "failed"
    typed = {
        "canonical": "def f(x, y):\n    return (len({x}), sorted(y))\n", "kind": "inputs",
        "inputs": ([[1, 2], [3, 3]], [[3], []]), "example": ((0,), {9}),
    }  # fmt: skip
    assert run("def f(x, y):\n    assert type(x) is tuple\n    return (1, list(y))\n", "", **typed).status == "passed"
    broken = run(canonical, "", **{**job, "inputs": ([1, 0],)})
    assert broken.status == "infrastructure" and "canonical" in broken.text


def test_a_candidate_sees_no_environment_no_problems_and_an_empty_folder(run, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    code = "import os\ndef f():\n    return [os.environ.get('SECRET'), os.listdir('.'), os.getcwd()]\n"
    assert run(code, "found = f()\nassert found[0] is None and found[1] == []").status == "passed"
    if run.sandbox.namespaces:
        code = "import os\ndef f():\n    return [os.path.exists('/proc/1'), os.path.exists('/tmp'), os.getpid()]\n"
        assert run(code, "assert f() == [False, False, 2]").status == "passed"
        code = "import os\ndef f():\n    at = os.path.dirname(os.__file__) + '/site-packages'\n"
        code += "    return os.path.isdir(at) and os.listdir(at)\n"
        assert run(code, "assert not f()").status == "passed"


def test_limits_and_weak_sandboxes_are_checked():
    with pytest.raises(SandboxError, match="64 MiB"):
        Limits(memory_bytes=1000)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up an id that only root has")
def test_without_namespaces_root_runs_code_as_a_user_that_owns_nothing_or_refuses():
    try:
        weak = Sandbox(namespaces=False)
    except SandboxError as error:
        # An interpreter in a private folder of root's, which no other user may enter.
        assert "Permission denied" in str(error)
        return
    code = "import os\ndef f():\n    return os.getuid()\n"
    assert weak.run(Job(code, "asserts", "f", "assert f() > 0")).status == "passed"


SAMPLE = (0, 1, 10, 32, 33, 38, 50, 53, 64, 129, 137, 163)


def canonical(run, problems):
    outcomes = [(problem.task_id, run.sandbox.run(problem.job(problem.prefix + problem.canonical)))
                for problem in problems]  # fmt: skip
    return [(task, outcome) for task, outcome in outcomes if outcome.status != "passed"]


def test_canonical_solutions_of_some_humaneval_and_mbpp_problems_pass(run):
    problems = read_problems("humaneval")
    assert len(problems) == 164
    assert canonical(run, [problems[at] for at in SAMPLE]) == []
    mbpp = {problem.task_id: problem for problem in read_problems("mbpp")}
    assert len(mbpp) == 500
    # A class of the candidate's in the arguments, a set-up with one, a function named like a builtin one.
    assert canonical(run, [mbpp["Mbpp/367"], mbpp["Mbpp/126"], mbpp["Mbpp/11"]]) == []


def test_an_empty_body_solves_nothing(run):
    problem = read_problems("humaneval")[0]
    assert run.sandbox.run(problem.job(problem.prefix)).status == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["humaneval", "mbpp"])
def test_every_canonical_solution_passes(run, suite):
    assert canonical(run, read_problems(suite)) == []
