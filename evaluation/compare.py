"""When an output counts as the expected one, for problems that give inputs only (evalplus' HumanEval+ and MBPP+).

The rules are evalplus' (arXiv 2305.01210): equal, or floats within an absolute tolerance; for a few MBPP tasks that
leave it open, the order of the output, or everything but whether there is one, does not count. Standard library only.
"""

from __future__ import annotations

import math
from typing import Any

FLOAT_TOLERANCE, RELATIVE = 1e-6, 1e-7
AS_SETS = ("similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly", "larg_nnum",
           "intersection_array", "find_dissimilar", "Diff")  # fmt: skip
AS_ANY_VALUE = ("check_str", "text_match_three", "text_starta_endb")


def same(entry_point: str, inputs: list[Any], found: Any, expected: Any, atol: float) -> bool:
    """Whether `found` is right for `inputs`, given what the canonical solution returns."""
    if entry_point == "find_zero":
        return is_number(found) and abs(sum(c * math.pow(found, i) for i, c in enumerate(inputs[0]))) <= atol
    if entry_point in AS_SETS:
        return set(found) == set(expected)
    if entry_point in AS_ANY_VALUE:
        found, expected = found is not None, expected is not None
    return found == expected or close(found, expected, atol or FLOAT_TOLERANCE, bool(atol))


def close(found: Any, expected: Any, atol: float, integers: bool = False) -> bool:
    """Whether floats, also in lists and tuples, are within atol; `integers` may differ by that too."""
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return len(found) == len(expected) and all(
            a == b or close(a, b, atol, integers) for a, b in zip(found, expected, strict=True)
        )
    if isinstance(found, list | tuple) or isinstance(expected, list | tuple):
        return False
    if not (is_number(found) and is_number(expected) and (integers or isinstance(expected, float))):
        return False
    if not (math.isfinite(found) and math.isfinite(expected)):
        return math.isnan(found) and math.isnan(expected)
    return abs(found - expected) <= atol + RELATIVE * abs(expected)


def is_number(value: Any) -> bool:
    """A real number that is no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def coerce(inputs: list[list[Any]], example: list[Any] | None) -> list[list[Any]]:
    """Inputs read from JSON with the types of an example's arguments, because JSON has neither tuples nor sets."""
    if example is None:
        return inputs
    return [[shaped(v, example[i]) if i < len(example) else v for i, v in enumerate(given)] for given in inputs]


def shaped(value: Any, example: Any) -> Any:
    """One value in the shape of an example."""
    if isinstance(example, complex) and isinstance(value, str):
        return complex(value)
    if isinstance(example, dict) and isinstance(value, dict):
        model = next(iter(example.values()), None)
        return {key: shaped(item, model) for key, item in value.items()}
    if not isinstance(value, list) or not isinstance(example, list | tuple | set):
        return value
    models = list(example)
    pairwise = isinstance(example, tuple) and len(models) == len(value)
    items = [shaped(v, models[i if pairwise else 0] if models else None) for i, v in enumerate(value)]
    return type(example)(items)
