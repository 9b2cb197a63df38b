"""Does a document contain a problem that models are evaluated on?

datatrove's n-gram filter does the looking; its indexer needs the lighteval package, so the index is made here, in the
same format and by the same method.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.io import get_datafolder
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter
from datatrove.utils.hashing import create_hash_func
from datatrove.utils.text import ngrams, simplify_text

from laneformer.data.words import HASHES, NORMALISED, Words
from laneformer.data.writer import AtomicJsonlWriter

# The fields of HumanEval, MBPP and MBPP+ that a model must not have seen.
QUESTIONS = ("prompt", "text")
ANSWERS = ("canonical_solution", "code", "test_setup_code", "test", "test_list", "challenge_test_list")
PROBLEM_SUFFIXES = (".jsonl", ".jsonl.gz")


class ProblemError(ValueError):
    """A file of problems that cannot be read."""


def bundled_problems() -> tuple[Path, ...]:
    """The problem files that come with this package; found without running the code beside them."""
    spec = importlib.util.find_spec("laneformer.evaluation")
    folders = [Path(place) / "problems" for place in (spec.submodule_search_locations or [])] if spec else []
    return tuple(path for folder in folders if folder.is_dir() for path in problem_files(folder))


def problem_files(folder: Path) -> tuple[Path, ...]:
    """The problem files of a folder; those for infilling are the same problems in pieces."""
    paths = (path for path in folder.iterdir() if path.name.endswith(PROBLEM_SUFFIXES))
    return tuple(sorted(path for path in paths if "Infilling" not in path.name))


def read_problems(path: Path) -> list[dict[str, Any]]:
    """The problems of a JSON lines file, compressed or not; raises ProblemError."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        problems = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise ProblemError(f"{path} holds no problems that can be read ({error}); expected JSON lines") from None
    if not problems or not all(isinstance(problem, dict) and _fields(problem) for problem in problems):
        raise ProblemError(f"{path}: expected one object a line with some of {', '.join(QUESTIONS + ANSWERS)}")
    return problems


def _fields(problem: dict[str, Any]) -> list[str]:
    """The question and the answers, and question and solution as one text, as they stand together in a program."""
    question = "\n".join(_text(problem[key]) for key in QUESTIONS if key in problem)
    answers = [_text(problem[key]) for key in ANSWERS if key in problem]
    joined = [f"{question}\n{answers[0]}"] if question and answers else [question]
    return [text for text in (*joined, *answers) if text.strip()]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def decontamination_config(n_grams: int) -> NGramsDecontConfig:
    """n-grams of words over questions, answers, and across the two."""
    return NGramsDecontConfig(n_grams, find_query_ngrams=True, norm_config=NORMALISED, hash_config=HASHES)


def telling(words: Iterable[str]) -> bool:
    """Whether an n-gram says something: it has 0.4 n different words of three letters or more.

    Rows of numbers, alphabets and `for i in range n for j in range n` do not: they are in many a program.
    """
    words = tuple(words)
    return len({word for word in words if sum(map(str.isalpha, word)) >= 3}) >= 0.4 * len(words)


class ProblemIndexer(PipelineStep):
    """Writes the hashes of all telling n-grams of each problem file, for datatrove's n-gram filter."""

    type = "DECONT"
    name = "index of problems"

    def __init__(self, folder: str, problems: tuple[str, ...], config: NGramsDecontConfig) -> None:
        super().__init__()
        self.folder, self.problems, self.config = get_datafolder(folder), problems, config
        self.hash = create_hash_func(config.hash_config)

    def grams(self, problem: dict[str, Any]) -> set[str]:
        """The n-grams of one problem; none where it is shorter than n words."""
        texts = (Words().word_tokenize(simplify_text(text, self.config.norm_config)) for text in _fields(problem))
        return {" ".join(gram) for words in texts for gram in ngrams(words, self.config.n_grams) if telling(gram)}

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """One task does it all: problems are few."""
        for path in map(Path, self.problems):
            found: set[int] = set()
            for problem in read_problems(path):
                grams = self.grams(problem)
                found.update(self.hash(gram) for gram in grams)  # pyright: ignore
                self.stat_update(f"problems {task_name(path)}")
                if not grams:
                    self.stat_update(f"too short {task_name(path)}")
            with self.folder.open(f"{task_name(path)}.index.hashes", "wb") as file:
                file.write(np.array(sorted(found), self.config.hash_config.np_descr).tobytes())


def task_name(path: Path) -> str:
    """The name of a problem set: its file's name without suffixes."""
    return path.name.split(".")[0]


class ProblemFilter(NGramsDecontFilter):
    """Removes documents that share an n-gram with a problem, and writes them where they can be looked at."""

    name = "evaluation problems"

    def __init__(self, index: str, config: NGramsDecontConfig, removed: str) -> None:
        super().__init__(index, config, AtomicJsonlWriter(removed), language=Words())

    def filter(self, doc: Any) -> bool | tuple[bool, str]:
        """See BaseFilter; the reason for a removal is the problem set."""
        kept = super().filter(doc)
        return (False, doc.metadata["contaminated_task"]) if kept is not True else True
