"""Is a document fit to learn from? Licence, then rules for code and for prose."""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePosixPath

from datatrove.data import Document
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.filters.base_filter import BaseFilter

from laneformer.data.licences import UNKNOWN, is_allowed
from laneformer.data.words import Words

PYTHON = (".py", ".pyi")
CODE_SUFFIXES = frozenset(
    (*PYTHON, ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".cs", ".go", ".java", ".js", ".jsx", ".kt", ".lua")
    + (".m", ".php", ".pl", ".pyx", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".ts", ".tsx", ".zig")
)
GENERATED = re.compile(
    r"\bauto[- ]?generated|^\W*generated (by|from|automatically)|generated (by|from) .*\w\.py\b"
    r"|(file|code|module) (is|was|has been) (auto\w* )?generated|generated and used by"
    r"|do not (edit|modify)|@generated",
    re.I | re.M,
)
# Where a file says that it was generated: its head.
HEAD = 1000


@dataclass(frozen=True)
class QualityLimits:
    """What a document may look like: sizes in bytes and characters, shares from 0 to 1.

    The line and alphanumeric limits for code are those of StarCoder (arXiv 2305.06161); those for prose are
    Gopher's (arXiv 2112.11446, table A1) as datatrove has them.
    """

    min_bytes: int = 64
    max_bytes: int = 1_000_000
    max_line: int = 1000
    max_mean_line: float = 100.0
    min_alphanumeric: float = 0.25
    max_repeated_lines: float = 0.5
    min_prose_words: int = 50

    def __post_init__(self) -> None:
        if not 0 <= self.min_bytes < self.max_bytes:
            raise ValueError(f"min_bytes {self.min_bytes} must be below max_bytes {self.max_bytes}")
        for name in ("min_alphanumeric", "max_repeated_lines"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a share from 0 to 1")


def is_code(document: Document) -> bool:
    """Whether the rules for code apply: the document's `kind` where it has one, else its path's suffix."""
    kind = document.metadata.get("kind")
    if kind in ("code", "prose"):
        return kind == "code"
    return suffix(document) in CODE_SUFFIXES


def suffix(document: Document) -> str:
    """The suffix of a document's path, lower case."""
    return PurePosixPath(str(document.metadata.get("path", ""))).suffix.lower()


class LicenceFilter(BaseFilter):
    """Keeps documents whose licence is on the list; the reason for a removal is the licence."""

    name = "licence"

    def __init__(self, allowed: tuple[str, ...]) -> None:
        super().__init__()
        self.allowed = allowed

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """See BaseFilter."""
        licence = str(doc.metadata.get("license") or UNKNOWN)
        return True if is_allowed(licence, self.allowed) else (False, licence)


class SizeFilter(BaseFilter):
    """Removes documents that are very short or very long."""

    name = "size"

    def __init__(self, limits: QualityLimits) -> None:
        super().__init__()
        self.limits = limits

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """See BaseFilter."""
        size = len(doc.text.encode())
        if size < self.limits.min_bytes:
            return False, "too short"
        return True if size <= self.limits.max_bytes else (False, "too long")


class CodeFilter(BaseFilter):
    """Removes code that was generated, minified, is mostly data or repetition, or is no valid Python."""

    name = "quality of code"

    def __init__(self, limits: QualityLimits) -> None:
        super().__init__()
        self.limits = limits

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """See BaseFilter."""
        if not is_code(doc):
            return True
        reason = self.fault(doc.text) or ("does not parse" if suffix(doc) == ".py" and not parses(doc.text) else "")
        return (False, reason) if reason else True

    def fault(self, text: str) -> str:
        """What is wrong with the text of a program, or nothing."""
        lines, limits = text.splitlines(), self.limits
        if GENERATED.search(text[:HEAD]):
            return "generated"
        if max(map(len, lines)) > limits.max_line:
            return "line too long"
        if len(text) / len(lines) > limits.max_mean_line:
            return "lines too long on average"
        if sum(map(str.isalnum, text)) / len(text) < limits.min_alphanumeric:
            return "few letters and digits"
        return "repetition" if repeated_lines(lines) > limits.max_repeated_lines else ""


def repeated_lines(lines: list[str]) -> float:
    """The share of characters in lines that occurred before, of lines long enough to say something."""
    counts = Counter(stripped for line in lines if len(stripped := line.strip()) >= 10)
    total = sum(len(line) * count for line, count in counts.items())
    return sum(len(line) * (count - 1) for line, count in counts.items()) / total if total else 0.0


def parses(text: str) -> bool:
    """Whether this Python accepts the text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


class ProseQuality(GopherQualityFilter):
    """datatrove's Gopher rules for documents that are not code; words are what white space separates."""

    name = "quality of prose"

    def __init__(self, limits: QualityLimits) -> None:
        super().__init__(min_doc_words=limits.min_prose_words, language=Words())

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """See BaseFilter."""
        return True if is_code(doc) else super().filter(doc)


class ProseRepetition(GopherRepetitionFilter):
    """datatrove's Gopher repetition rules for documents that are not code."""

    name = "repetition in prose"

    def __init__(self) -> None:
        super().__init__(language=Words())

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """See BaseFilter."""
        return True if is_code(doc) else super().filter(doc)
