"""Every command that the documents show runs or parses, and every file they link to exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer.main

from laneformer.infer.cli import app
from laneformer.tools.cli import app as tools_app
from laneformer.train.cli import settings_from

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("experiments/*/README.md"))]


def commands() -> list[tuple[str, str]]:
    """(document, command line) of every shell block; a trailing backslash joins lines."""
    found = []
    for document in DOCUMENTS:
        for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", document.read_text(encoding="utf-8"), re.S):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip() and not line.startswith("#"):
                    found.append((document.name, line.strip().removeprefix("$ ")))
    return found


@pytest.mark.parametrize(("document", "line"), commands())
def test_a_shown_command_parses(document: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    while "=" in words[0]:
        words.pop(0)
    program = words[0].rsplit("/", 1)[-1]
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert words[1] in targets
    elif program == "infer":
        command = typer.main.get_command(app)
        assert isinstance(command, click.Group) or hasattr(command, "commands")
        sub = command.commands[words[1]]
        if "--help" not in words:
            with sub.make_context(words[1], words[2:], resilient_parsing=False):
                pass
    elif program == "laneformer":
        command = typer.main.get_command(tools_app)
        rest = words[1:]
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        with command.make_context("laneformer", rest, resilient_parsing=False):
            pass
    elif program == "train" and "-m" not in words:
        settings_from(words[1:])
    elif program == "python":
        script = next(word for word in words[1:] if not word.startswith("-"))
        assert (ROOT / script).exists()
    else:
        assert program in ("git", "cd", "pip", "train", "torchrun"), f"{document} shows {line!r}, which nothing checks"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
