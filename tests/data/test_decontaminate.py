"""Which n-grams of a problem are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpus_maker import write_problems
from datatrove.data import Document

from laneformer.data.decontaminate import (
    ProblemError,
    ProblemFilter,
    ProblemIndexer,
    bundled_problems,
    decontamination_config,
    read_problems,
    telling,
)

PROMPT = "Write a function to count the islands of a binary matrix of cells"
CODE = "def islands(grid):\n    seen = set()\n    total = 0\n    for row in grid: visit(row, seen)\n    return total"


@pytest.fixture
def looked_up(tmp_path: Path) -> ProblemFilter:
    problems = write_problems(
        tmp_path / "tiny.jsonl", text=PROMPT, code=CODE, test_list="assert f([1,2,3,4,5,6,7,8,9])"
    )
    config = decontamination_config(8)
    ProblemIndexer(str(tmp_path / "index"), (str(problems),), config).run()
    return ProblemFilter(str(tmp_path / "index"), config, str(tmp_path / "removed"))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"# {PROMPT.upper()}!\n", False),
        ("seen=set() ; total = 17\nfor row in grid :\n\tvisit( row )", False),
        ("the matrix of cells\ndef islands(grid):\n    seen = set()\n", False),
        ("write a function to count the bananas of a matrix of cells def islands", True),
        ("x = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]", True),
        ("short", True),
    ],
)
def test_a_document_goes_when_it_shares_n_words_whatever_their_form(
    looked_up: ProblemFilter, text: str, kept: bool
) -> None:
    result = looked_up.filter(Document(text, "i"))
    assert result == (True if kept else (False, "tiny"))


def test_rows_of_numbers_alphabets_and_plain_loops_tell_nothing() -> None:
    assert telling(("def", "f", "x", "return", "y"))
    assert not telling(("0", "0", "one", "0", "0", "0"))
    assert not telling(tuple("abcdefghij"))
    assert not telling(("for", "i", "in", "range", "n", "for", "j", "in", "range", "n"))


def test_the_bundled_problems_are_found_without_importing_their_code() -> None:
    names = [path.name for path in bundled_problems()]
    assert names == ["HumanEval.jsonl.gz", "mbpp.jsonl.gz"]
    assert [len(read_problems(path)) for path in bundled_problems()] == [164, 974]


@pytest.mark.parametrize("text", ["", "not json\n", '{"other": 1}\n', "[1]\n"])
def test_a_file_without_problems_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ProblemError, match=r"p\.jsonl"):
        read_problems(path)
