"""What is a word when documents are compared: the one answer that deduplication and decontamination share."""

from __future__ import annotations

from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import TextNormConfig
from datatrove.utils.word_tokenizers import WordTokenizer

# Lower case, no punctuation, numbers as 0, white space as one space. Accents stay: to look at every character for
# one costs more than all the rest, and code has few.
NORMALISED = TextNormConfig(norm_unicode_diacritics=False)
# datatrove's default, xxhash, takes no strings any more in its current versions.
HASHES = HashConfig(precision=64, hash_fc="sha1")


class Words(WordTokenizer):
    """What white space separates; the tokenizers of datatrove need packages that code gains nothing from."""

    def word_tokenize(self, text: str) -> list[str]:
        """The words of a text."""
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        """The lines of a text, which stand for its sentences."""
        return [line for line in text.splitlines() if line.strip()]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Where the lines of a text begin and end."""
        spans, start = [], 0
        for line in text.splitlines(keepends=True):
            spans.append((start, start + len(line)))
            start += len(line)
        return spans
