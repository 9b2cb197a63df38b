"""Bits per byte, Python that parses, and infilling, against counts by hand."""

from __future__ import annotations

import gzip
import json
import math

import numpy as np
import pytest
from eval_models import Canned

from laneformer.evaluation.completers import NotOffered, infilling_prompt, sample_seed, windowed_nats
from laneformer.evaluation.problems import Span
from laneformer.evaluation.samples import Sample
from laneformer.evaluation.text_suites import TextsError, bits_per_byte, infilling, is_python, read_texts, syntax_valid


def quiet(done, total):
    pass


def remembering(ids):
    """Logits [S, V] that depend on how much of the window was seen, so that a wrong window shows."""
    seen = np.arange(1, len(ids) + 1)
    rows = np.zeros((len(ids), 11))
    rows[np.arange(len(ids)), (np.asarray(ids) + 1) % 11] = np.log(seen)
    return rows


def by_hand(ids, window):
    """The nats with each token's context counted one by one."""
    total, scored, begin = 0.0, 1, 0
    while scored < len(ids):
        begin = max(0, scored - window // 2)
        for at in range(scored, min(begin + window, len(ids))):
            seen = at - begin
            right = (ids[at - 1] + 1) % 11 == ids[at]
            total -= math.log((seen if right else 1.0) / (seen + 10))
        scored = min(begin + window, len(ids))
    return total


@pytest.mark.parametrize("length", [2, 6, 7, 8, 9, 23])
def test_windows_score_every_token_once_with_half_a_window_of_context(length):
    ids = [(3 * i) % 11 if i % 5 == 0 else (3 * i + i % 2) % 11 for i in range(length)]
    assert windowed_nats(remembering, ids, 7) == pytest.approx(by_hand(ids, 7), rel=1e-12)
    assert windowed_nats(remembering, ids, 100) == pytest.approx(by_hand(ids, 100), rel=1e-12)
    assert windowed_nats(remembering, ids[:1], 7) == 0.0


def test_bits_per_byte_are_bits_over_utf8_bytes_by_source_and_over_all():
    found = bits_per_byte(Canned(), {"python": ["abc", "é"], "prose": ["xy"]}, quiet)
    # The model needs 2 nats for a character, and é has two bytes.
    assert found["sources"]["python"]["bits_per_byte"] == pytest.approx(8 / math.log(2) / 5)
    assert found["sources"]["prose"]["bits_per_byte"] == pytest.approx(2 / math.log(2))
    assert found["all"]["bits_per_byte"] == pytest.approx(12 / math.log(2) / 7)
    assert (found["all"]["bytes"], found["all"]["tokens"], found["all"]["texts"]) == (7, 6, 3)


def test_texts_are_grouped_by_folder_by_suffix_and_by_the_source_of_documents(tmp_path):
    for name in ("books/a.txt", "books/deep/b.txt", "c.py", "d.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.rst").write_text("")
    with gzip.open(tmp_path / "books/docs.jsonl.gz", "wt") as handle:
        handle.write(json.dumps({"text": "one", "metadata": {"source": "stdlib"}}) + "\n" + '{"text": "two"}\n')
    assert read_texts([tmp_path]) == {
        "books": ["books/a.txt", "books/deep/b.txt"], "docs": ["two"], "md": ["d.md"], "py": ["c.py"],
        "stdlib": ["one"],
    }  # fmt: skip
    assert read_texts([tmp_path / "c.py"]) == {"py": ["c.py"]}
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(TextsError, match=r"bad\.txt"):
        read_texts([tmp_path])
    with pytest.raises(TextsError, match="absent"):
        read_texts([tmp_path / "absent"])


def test_python_that_parses_is_told_from_what_does_not():
    assert is_python("def f(x):\n    return x\n") and is_python("'\\d'")
    for bad in ("def f(x:\n", "def f(x):\nreturn", "x = \0", "(" * 500 + ")" * 500):
        assert not is_python(bad)
    pairs = [(Sample(f"HumanEval/{i}", ""), code) for i, code in enumerate(("x = 1", "x =", "y = 2"))]
    found = syntax_valid(pairs)
    assert found["score"]["mean"] == pytest.approx(2 / 3)
    assert [row["valid"] for row in found["per_problem"]] == [True, False, True]


SPANS = [Span("a", "x = ", "\nprint(x)", "1 + 2"), Span("b", "y\n", "z", "    while 1:\n        pass\n")]


def test_infilling_counts_exact_matches_and_of_one_line_only_that_line():
    model = Canned({"x = <HERE>\nprint(x)": " 1 + 2 \nand more", "y\n<HERE>z": "    while 1:\n        pass"})
    lines = infilling(model, SPANS, True, 9, 0, quiet)
    assert [row["exact"] for row in lines["per_problem"]] == [True, False]
    spans = infilling(model, SPANS, False, 9, 0, quiet)
    assert [row["exact"] for row in spans["per_problem"]] == [False, True] and spans["score"]["mean"] == 0.5
    assert {stop for _, stop in model.asked[:2]} == {("\n",)} and {stop for _, stop in model.asked[2:]} == {()}


def test_infilling_prompts_use_the_tokens_that_the_vocabulary_has():
    ours = {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"}
    assert infilling_prompt(ours, "a", "b") == "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    deepseek = {"<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"}
    assert (
        infilling_prompt(deepseek, "a", "b") == "<\uff5cfim▁begin\uff5c>a<\uff5cfim▁hole\uff5c>b<\uff5cfim▁end\uff5c>"
    )
    assert infilling_prompt({"▁<PRE>", "▁<SUF>", "▁<MID>"}, "a", "b") == "<PRE> a <SUF>b <MID>"
    with pytest.raises(NotOffered, match="infilling"):
        infilling_prompt({"<|fim_prefix|>", "a"}, "a", "b")


def test_every_sample_has_a_seed_of_its_own_that_other_samples_do_not_change():
    seeds = {sample_seed(s, p, n) for s in range(3) for p in range(5) for n in range(7)}
    assert len(seeds) == 105 and sample_seed(1, 2, 3) == sample_seed(1, 2, 3) and all(0 <= s < 2**64 for s in seeds)
