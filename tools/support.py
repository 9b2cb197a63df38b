"""Errors as people want them: one line and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from laneformer.terminal import fail, say


@contextmanager
def friendly_errors() -> Iterator[None]:
    """A user's mistake is one line and exit code 2; a failed run is one line and exit code 1."""
    try:
        yield
    except ValueError as error:
        fail(error)
        raise typer.Exit(2) from None
    except OSError as error:
        fail(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        say("stopped")
        raise typer.Exit(130) from None
