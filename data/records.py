"""Which settings made this folder? A folder is continued with the settings that began it, and with no others."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from laneformer.differences import differences
from laneformer.files import write_text

SETTINGS = "settings.json"
# A killed run's tasks end a moment after it.
PATIENCE = 10.0


class SettingsError(ValueError):
    """A folder that was made with other settings, or that is in use."""


def claim(record: Path, settings: dict[str, Any], owned: tuple[Path, ...], redo: bool) -> bool:
    """Makes `record` say which settings the folder is made with; returns whether it did so already.

    With `redo`, what is in the `owned` folders is removed first. Raises SettingsError where the record says otherwise.
    """
    settings = json.loads(json.dumps(settings))
    path = record / SETTINGS
    if redo:
        for place in owned:
            shutil.rmtree(place, ignore_errors=True)
    if path.is_file():
        changed = differences(json.loads(path.read_text(encoding="utf-8")), settings)
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise SettingsError(
                f"{record.parent} was begun with other settings ({'; '.join(changed[:3])}{more}); "
                "use those, another folder, or --redo to start again"
            )
        return True
    record.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(settings, indent=1) + "\n")
    return False


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps a folder for one command and its tasks; forked tasks hold the lock too, until they end."""
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + PATIENCE
    with open(folder / ".lock", "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SettingsError(f"another laneformer data command is at work in {folder}") from None
                time.sleep(0.1)
        yield
