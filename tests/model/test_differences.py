"""What differs between two records, in words."""

from __future__ import annotations

from laneformer.differences import differences


def test_nested_records_differ_by_their_dotted_keys_in_order():
    before = {"a": 1, "b": {"c": [1, 2], "d": None}, "gone": "x"}
    now = {"a": 1, "b": {"c": [1, 3], "d": False}, "new": 2.5}
    assert differences(before, now) == [
        "b.c was [1, 2], is [1, 3]", "b.d was null, is false", 'gone was "x", is null', "new was null, is 2.5",
    ]  # fmt: skip


def test_what_json_writes_alike_is_alike():
    assert differences({"a": (1, 2), "b": {"c": 1.0}}, {"a": [1, 2], "b": {"c": 1.0}}) == []
    assert differences({"a": 1}, {"a": True}) == ["a was 1, is true"]


def test_long_values_are_cut():
    (line,) = differences({"a": "x" * 100}, {"a": 1})
    assert line == f'a was "{"x" * 56}..., is 1'
