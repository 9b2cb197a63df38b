"""Counting models against a plain dictionary implementation of the same formulas."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from laneformer.evaluation.ngram import NgramModel, discounts


class Slow:
    """Interpolated, modified Kneser-Ney by dictionaries of tuples."""

    def __init__(self, order, vocab_size, end):
        self.order, self.vocab_size, self.end = order, vocab_size, end

    def grams(self, tokens):
        """Every target with the `order - 1` tokens before it, filled up with end tokens."""
        past = [self.end] * (self.order - 1)
        for token in tokens[1:]:
            yield (*past, token)[-self.order :]
            past = [self.end] * (self.order - 1) if token == self.end else [*past, token][1:]

    def fit(self, tokens):
        longest = Counter(self.grams(tokens))
        self.counts = {self.order: longest}
        for length in range(self.order - 1, 0, -1):
            self.counts[length] = Counter(gram[1:] for gram in self.counts[length + 1])
        self.off = {length: self.discount(list(counts.values())) for length, counts in self.counts.items()}
        self.after = {length: defaultdict(list) for length in self.counts}
        for length, counts in self.counts.items():
            for gram, count in counts.items():
                self.after[length][gram[:-1]].append(count)
        return self

    @staticmethod
    def discount(counts):
        n = [counts.count(value) for value in range(5)]
        y = n[1] / (n[1] + 2 * n[2]) if n[1] else 0
        off = {}
        for value in (1, 2, 3):
            estimate = value - (value + 1) * y * n[value + 1] / n[value] if n[value] and n[value + 1] and y else 0.5
            off[value] = estimate if 0 < estimate < value else 0.5
        return off

    def probability(self, gram):
        if not gram:
            return 1 / self.vocab_size
        length, context = len(gram), gram[:-1]
        shorter = self.probability(gram[1:])
        counts = self.after[length].get(context)
        if counts is None:
            return shorter
        off = self.off[length]
        count = self.counts[length].get(gram, 0)
        kept = count - off[min(count, 3)] if count else 0
        return (kept + sum(off[min(one, 3)] for one in counts) * shorter) / sum(counts)

    def nats(self, tokens):
        return -sum(math.log(self.probability(gram)) for gram in self.grams(tokens))


def stream(seed, size, vocab_size, end):
    """Tokens that depend on the one before, in documents of different lengths, one of them empty."""
    random = np.random.default_rng(seed)
    tokens = [end, end]
    for _ in range(size):
        usual = (tokens[-1] * 3 + 1) % vocab_size
        tokens.append(usual if random.random() < 0.6 else int(random.integers(vocab_size)))
    return np.array([*tokens, end], np.uint16)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize(("vocab_size", "end"), [(7, 0), (23, 4)])
def test_the_likelihood_is_that_of_the_dictionaries(order, vocab_size, end):
    seen, new = stream(1, 700, vocab_size, end), stream(2, 160, vocab_size, end)
    fast, slow = NgramModel(order, vocab_size, end).fit(seen), Slow(order, vocab_size, end).fit(seen.tolist())
    assert fast.nats(new) == pytest.approx(slow.nats(new.tolist()), rel=1e-12)
    assert fast.nats(seen) == pytest.approx(slow.nats(seen.tolist()), rel=1e-12)
    assert fast.bits_per_byte(new, 321) == pytest.approx(slow.nats(new.tolist()) / math.log(2) / 321, rel=1e-12)


@pytest.mark.parametrize("order", [1, 2, 4])
def test_probabilities_add_up_to_one_after_seen_and_unseen_contexts(order):
    model = NgramModel(order, 31, 0).fit(stream(3, 300, 20, 0))
    for before in ([0], [0, 5], [0, 30, 29, 28], [0, 4, 13, 0], [0, 1, 4, 13, 0, 1]):
        p_V = model.distribution(np.array(before))
        assert p_V.sum() == pytest.approx(1, abs=1e-12) and p_V.min() > 0
        for token in (0, 7, 30):
            step = model.nats(np.array([*before, token])) - (model.nats(np.array(before)) if len(before) > 1 else 0)
            assert -math.log(p_V[token]) == pytest.approx(step, rel=1e-9)


def test_a_context_does_not_reach_into_the_document_before():
    model = NgramModel(3, 9, 0).fit(stream(4, 400, 9, 0))
    after = [model.distribution(np.array([0, *before, 0, 5])) for before in ([1], [2, 3], [])]
    assert np.array_equal(after[0], after[1]) and np.array_equal(after[0], after[2])


def test_the_order_of_documents_does_not_matter():
    random = np.random.default_rng(5)
    documents = [random.integers(1, 12, size).tolist() for size in (3, 40, 0, 17, 90)]
    one, two = ([0, *(token for text in texts for token in [*text, 0])] for texts in (documents, documents[::-1]))
    new = stream(6, 80, 12, 0)
    assert NgramModel(4, 12).fit(np.array(one)).nats(new) == NgramModel(4, 12).fit(np.array(two)).nats(new)


def test_the_discounts_are_those_of_the_paper():
    counts = np.repeat([1, 2, 3, 4, 9], [40, 20, 10, 6, 3])
    y = 40 / (40 + 2 * 20)
    assert discounts(counts) == pytest.approx([0, 1 - 2 * y * 20 / 40, 2 - 3 * y * 10 / 20, 3 - 4 * y * 6 / 10])
    assert discounts(np.array([5, 6])).tolist() == [0, 0.5, 0.5, 0.5]


def test_a_stream_that_cannot_be_counted_is_refused():
    model = NgramModel(2, 5)
    with pytest.raises(ValueError, match="starts with the end token 0"):
        model.fit(np.array([1, 2, 0]))
    with pytest.raises(ValueError, match="has token 5, the model 5 entries"):
        model.fit(np.array([0, 5]))
    with pytest.raises(ValueError, match="counted nothing"):
        model.nats(np.array([0, 1]))
    with pytest.raises(ValueError, match="order 0"):
        NgramModel(0, 5)
