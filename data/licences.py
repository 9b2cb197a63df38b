"""Under which licence is a text, as an SPDX id, and may it be kept?"""

from __future__ import annotations

import re
from email.message import Message

UNKNOWN = "unknown"
# The names of an allow list; a family stands for every licence whose id it begins.
DEFAULT_ALLOWED = ("MIT", "BSD", "Apache-2.0", "ISC", "PSF")
FAMILIES = {"BSD": ("BSD-", "0BSD"), "PSF": ("PSF-", "Python-2.0")}

KNOWN = (
    *(
        "MIT",
        "MIT-0",
        "ISC",
        "0BSD",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSD-4-Clause",
        "BSD-3-Clause-Clear",
        "Apache-2.0",
    ),
    *(
        "Apache-1.1",
        "PSF-2.0",
        "Python-2.0",
        "Zlib",
        "Unlicense",
        "CC0-1.0",
        "MPL-2.0",
        "HPND",
        "BSL-1.0",
        "BlueOak-1.0.0",
    ),
)

# What people write, lower case, and the id it means. The first pattern that is found decides.
PATTERNS = (
    (r"\blgpl|lesser general public", "LGPL"),
    (r"\bagpl|affero", "AGPL"),
    (r"\bgpl|general public licen[cs]e", "GPL"),
    (r"\bmpl|mozilla public", "MPL-2.0"),
    (r"apache(?!.{0,30}\b1\.)", "Apache-2.0"),
    (r"\b0bsd\b|zero-clause bsd", "0BSD"),
    (r"bsd[ -]*(2|two)|2-clause|simplified bsd", "BSD-2-Clause"),
    (r"\bbsd|3-clause", "BSD-3-Clause"),
    (r"\bisc\b|isc licen[cs]e", "ISC"),
    (r"python software foundation|\bpsfl?\b|python licen[cs]e", "PSF-2.0"),
    (r"\bmit\b|mit licen[cs]e", "MIT"),
    (r"\bunlicense\b", "Unlicense"),
    (r"\bzlib\b", "Zlib"),
    (r"\bcc0\b", "CC0-1.0"),
)
SPDX = re.compile(r"[A-Za-z][A-Za-z0-9.]*(-[A-Za-z0-9.+]+)+")
OPERATORS = ("AND", "OR", "WITH", "(", ")")


def spdx_id(text: str) -> str:
    """The SPDX id or expression of a licence as somebody wrote it; `unknown` where it is not recognised."""
    text = text.strip()
    if not text or len(text) > 200:
        return UNKNOWN
    if not re.search(r"\s(AND|OR|WITH)\s", text):
        return _single(text)
    parts = (part.strip() for part in re.split(r"(\s(?:AND|OR|WITH)\s|[()])", text))
    joined = " ".join(part if part in OPERATORS else _single(part) for part in parts if part)
    return joined.replace("( ", "(").replace(" )", ")")


def _single(text: str) -> str:
    """One licence: an id that is one already stays; a text is looked up."""
    ids = {spdx.lower(): spdx for spdx in KNOWN}
    if text.lower() in ids:
        return ids[text.lower()]
    if text.endswith("-exception"):
        return text
    found = next((spdx for pattern, spdx in PATTERNS if re.search(pattern, text.lower())), UNKNOWN)
    return text if SPDX.fullmatch(text) and found in (UNKNOWN, "GPL", "LGPL", "AGPL") else found


def distribution_licence(metadata: Message) -> str:
    """The licence of an installed distribution: License-Expression, else License, else its classifiers."""
    for field in ("License-Expression", "License"):
        # Some distributions put the whole text there: its first line names it.
        lines = (metadata.get(field) or "").strip().splitlines()
        if lines and (found := spdx_id(lines[0])) != UNKNOWN:
            return found
    names = [c for c in metadata.get_all("Classifier") or [] if c.startswith("License ::")]
    found_ids = sorted({spdx_id(name.rpartition("::")[2]) for name in names} - {UNKNOWN})
    # Several classifiers do not say whether one may choose: all of them must be allowed.
    return " AND ".join(found_ids) if found_ids else UNKNOWN


def is_allowed(expression: str, allowed: tuple[str, ...]) -> bool:
    """Whether an SPDX expression may be kept: one side of an OR, or both of an AND, must be on the list."""
    expression = re.sub(r"\s+WITH\s+\S+", "", expression)
    tokens = re.findall(r"\(|\)|[^\s()]+", expression)
    value, rest = _any_of(tokens, allowed)
    return value and not rest


def _any_of(tokens: list[str], allowed: tuple[str, ...]) -> tuple[bool, list[str]]:
    value, tokens = _all_of(tokens, allowed)
    while tokens and tokens[0] == "OR":
        other, tokens = _all_of(tokens[1:], allowed)
        value = value or other
    return value, tokens


def _all_of(tokens: list[str], allowed: tuple[str, ...]) -> tuple[bool, list[str]]:
    value, tokens = _one(tokens, allowed)
    while tokens and tokens[0] == "AND":
        other, tokens = _one(tokens[1:], allowed)
        value = value and other
    return value, tokens


def _one(tokens: list[str], allowed: tuple[str, ...]) -> tuple[bool, list[str]]:
    if not tokens:
        return False, tokens
    if tokens[0] == "(":
        value, rest = _any_of(tokens[1:], allowed)
        return value, rest[1:] if rest[:1] == [")"] else ["unbalanced"]
    return any(_matches(tokens[0], name) for name in allowed), tokens[1:]


def _matches(licence: str, name: str) -> bool:
    prefixes = FAMILIES.get(name)
    return licence == name if prefixes is None else licence.startswith(prefixes)
