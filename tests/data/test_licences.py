"""Licences as people write them, and what an allow list keeps."""

from __future__ import annotations

from email.message import Message

import pytest

from laneformer.data.licences import DEFAULT_ALLOWED, distribution_licence, is_allowed, spdx_id


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MIT", "MIT"),
        ("mit", "MIT"),
        ("MIT License", "MIT"),
        ("MIT License (MIT)", "MIT"),
        ("BSD 3-Clause License", "BSD-3-Clause"),
        ("bsd-2-clause", "BSD-2-Clause"),
        ("Apache 2.0", "Apache-2.0"),
        ("Apache Software License", "Apache-2.0"),
        ("Apache Software License, Version 1.1", "unknown"),
        ("Python Software Foundation License", "PSF-2.0"),
        ("GPL-3.0-or-later", "GPL-3.0-or-later"),
        ("GNU Lesser General Public License v3", "LGPL"),
        ("LLVM-exception", "LLVM-exception"),
        ("(MIT OR Apache 2.0) AND isc", "(MIT OR Apache-2.0) AND ISC"),
        ("Other/Proprietary License", "unknown"),
        ("All rights permitted", "unknown"),
        ("", "unknown"),
    ],
)
def test_a_licence_becomes_its_spdx_id(text: str, expected: str) -> None:
    assert spdx_id(text) == expected


@pytest.mark.parametrize(
    ("expression", "kept"),
    [
        ("MIT", True),
        ("BSD-4-Clause", True),
        ("0BSD", True),
        ("PSF-2.0", True),
        ("GPL-3.0-only", False),
        ("unknown", False),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only AND MIT", False),
        ("MIT AND (GPL-2.0-only OR ISC)", True),
        ("MIT OR GPL-2.0-only AND GPL-3.0-only", True),
        ("(MIT OR GPL-2.0-only) AND GPL-3.0-only", False),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("MIT AND", False),
        ("MIT GPL-2.0-only", False),
        ("(MIT", False),
        ("", False),
    ],
)
def test_an_expression_is_kept_only_when_the_list_allows_all_that_applies(expression: str, kept: bool) -> None:
    assert is_allowed(expression, DEFAULT_ALLOWED) is kept


def metadata(**fields: str | list[str]) -> Message:
    message = Message()
    for name, values in fields.items():
        for value in [values] if isinstance(values, str) else values:
            message[name.replace("_", "-")] = value
    return message


def test_the_licence_expression_counts_before_everything_else() -> None:
    found = metadata(License_Expression="ISC", License="MIT", Classifier=["License :: OSI Approved :: BSD License"])
    assert distribution_licence(found) == "ISC"


def test_a_licence_field_that_says_nothing_leaves_it_to_the_classifiers() -> None:
    found = metadata(License="see LICENSE file", Classifier=["License :: OSI Approved :: MIT License"])
    assert distribution_licence(found) == "MIT"


def test_several_classifiers_must_all_be_allowed() -> None:
    names = ["License :: OSI Approved :: MIT License", "License :: OSI Approved :: GNU General Public License (GPL)"]
    found = distribution_licence(metadata(Classifier=names))
    assert found == "GPL AND MIT"
    assert not is_allowed(found, DEFAULT_ALLOWED)
