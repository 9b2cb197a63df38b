"""Which secrets and personal data are in a text, and what stands in their place?"""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import partial

from datatrove.pipeline.formatters.base import BaseFormatter
from datatrove.pipeline.formatters.pii import PIIFormatter, PIIReplacer, public_ip_validator

# Kind, what must occur in a text for the pattern to be tried, pattern; its group `secret`, if any, is what is replaced.
PATTERNS = (
    (
        "private key",
        ("PRIVATE KEY-----",),
        r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----(?P<secret>[^-]{40,})-----END (?:[A-Z]+ )*PRIVATE KEY-----",
    ),
    ("AWS key id", ("AKIA", "ASIA"), r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    (
        "AWS secret",
        ("aws", "AWS"),
        r"(?i:aws)[^\n]{0,30}?[\"'=:\s](?P<secret>(?=[A-Za-z/+]*[0-9])[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])",
    ),
    (
        "GitHub token",
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        r"\bgh[pousr]_[A-Za-z0-9]{36,255}\b|\bgithub_pat_[A-Za-z0-9_]{22,255}\b",
    ),
    ("Slack token", ("xox",), r"\bxox[abeprs]-[A-Za-z0-9-]{10,250}"),
    ("Google key", ("AIza",), r"\bAIza[0-9A-Za-z_-]{35}(?![0-9A-Za-z_-])"),
    ("Hugging Face token", ("hf_",), r"\bhf_[A-Za-z0-9]{30,}\b"),
    ("OpenAI key", ("sk-",), r"\bsk-(?:proj-)?[A-Za-z0-9_-]{40,}"),
    ("Stripe key", ("k_live_",), r"\b[rs]k_live_[0-9A-Za-z]{20,}"),
    ("JWT", ("eyJ",), r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"),
    (
        "password",
        ("",),
        r"(?i:password|passwd|passphrase|secret|token|api_?key|access_?key|credential)\w{0,20}[\"']?\s{0,3}[:=]\s{0,3}"
        r"(?:[rbu]{0,2})(?P<quote>[\"'])(?P<secret>[^\s\"'{}()<>\\]{10,200})(?P=quote)",
    ),
)
# Bits per character from which an assigned string looks random: 11 different characters have 3.46.
MIN_ENTROPY = 3.4
# No host can have these addresses and names: RFC 5737 and RFC 2606.
SAFE_IP, SAFE_EMAIL = "192.0.2.1", "email@example.com"
# A name in code, as in `a@b.T`, is no address: the last part is a word of two letters or more, and no call follows.
EMAIL = (
    r"\b(?!git@)[A-Za-z0-9!#$%&*+/?^_{|}~-]+(?:\.[A-Za-z0-9!#$%&*+/?^_{|}~-]+)*"
    r"@(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{2,24}\b(?![\w(\[.-]*[(\[])"
)
# Not part of a longer dotted number, such as an object identifier.
OCTET = r"(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
IP = rf"(?<![\d.])(?:{OCTET}\.){{3}}{OCTET}(?!\.?\d)"


def entropy(text: str) -> float:
    """Bits per character of a text's own distribution of characters."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())


def looks_random(text: str) -> bool:
    """Whether an assigned string is likely to be a real password rather than a word, a path or an example."""
    mixed = re.search(r"[0-9]", text) and re.search(r"[A-Za-z]", text)
    return bool(mixed) and entropy(text) >= MIN_ENTROPY


class SecretScrubber(BaseFormatter):
    """Replaces keys, tokens and random-looking passwords by their kind; counts them and never logs them."""

    name = "secrets"

    def __init__(self) -> None:
        super().__init__()
        self.patterns = tuple((kind, hints, re.compile(pattern)) for kind, hints, pattern in PATTERNS)

    def format(self, text: str) -> str:
        """The text without its secrets."""
        for kind, hints, pattern in self.patterns:
            if any(hint in text for hint in hints):
                text = pattern.sub(partial(self._replace, kind), text)
        return text

    def _replace(self, kind: str, match: re.Match[str]) -> str:
        group = "secret" if "secret" in match.re.groupindex else 0
        if kind == "password" and not looks_random(match.group(group)):
            return match.group()
        self.stat_update(f"removed {kind}")
        mark = f"REMOVED_{kind.upper().replace(' ', '_')}"
        start, end = (position - match.start() for position in match.span(group))
        whole = match.group()
        return (
            f"{whole[:start]}\n{mark}\n{whole[end:]}" if kind == "private key" else whole[:start] + mark + whole[end:]
        )


class PersonalData(PIIFormatter):
    """datatrove's formatter for e-mail and public IP addresses, counted.

    Its patterns take `a@b.T` for an address and object identifiers for IP numbers, hence narrower ones here; and one
    replacement instead of several in turn, so that a document does not depend on those before it.
    """

    name = "personal data"

    def __init__(self) -> None:
        super().__init__()
        self.emails_replacer = PIIReplacer(EMAIL, SAFE_EMAIL, lambda found: found != SAFE_EMAIL)
        self.ip_replacer = PIIReplacer(IP, SAFE_IP, public_ip_validator)

    def format(self, text: str) -> str:
        """The text without addresses."""
        for kind, replacer in (("e-mail address", self.emails_replacer), ("IP address", self.ip_replacer)):
            found = [match.group() for match in replacer.regex.finditer(text)]
            count = sum(replacer.validator is None or replacer.validator(hit) for hit in found)
            if count:
                self.stat_update(f"removed {kind}", value=count)
                text = replacer.replace(text)
        return text
