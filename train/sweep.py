"""Many runs from one command: Hydra makes the combinations and launches them, here one after another or on Slurm.

Every combination has a folder of its own in OUT, named by what was varied. One that is finished with the same settings
is skipped, one that was interrupted is resumed, and a table of all of them ends the sweep.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from laneformer.files import write_text
from laneformer.terminal import fail, say, table_console
from laneformer.train.cli import execute, overrides_from, settings_from
from laneformer.train.settings import Settings
from laneformer.train.settings_build import build_settings

QUIET = ("hydra.output_subdir=null", "hydra/job_logging=disabled", "hydra/hydra_logging=disabled")
# Settings that change nothing about what a run finds.
WHERE = ("out", "threads", "resume", "overwrite", "log", "checkpoint", "parallel")


def sweep(arguments: Sequence[str], messages: Console) -> int:
    """Runs every combination of the arguments; 0 when all are finished, 1 when one failed.

    Raises ValueError for arguments of which no run could be made.
    """
    overrides = list(overrides_from(arguments, sweeps=True))
    parsed = OverridesParser.create().parse_overrides(overrides)
    swept = [override.key_or_group for override in parsed if override.is_sweep_override()]
    if not swept:
        raise ValueError("-m varies nothing; give a key several values, as in optim.lr=1e-3,3e-3")
    out = next((a.partition("=")[2] for a in arguments if a.startswith("out=")), "")
    first = [a for a in arguments if a.partition("=")[0] not in swept and not a.startswith("hydra")]
    # What the runs share is checked before the first of them starts.
    base = Path(settings_from(first).out).expanduser()
    assert out
    extra = [f"++_swept={json.dumps(swept)}", *QUIET, f"hydra.sweep.dir='{base}'", "hydra.sweep.subdir=."]
    before, sys.argv = sys.argv, ["train", "-m", *overrides, *extra]
    try:
        hydra.main(config_path="pkg://laneformer.conf", config_name="config", version_base="1.3")(job)()
    finally:
        sys.argv = before
    rows = results(base)
    write_text(base / "sweep.json", json.dumps(rows, indent=1) + "\n")
    print_table(rows, table_console())
    (base / "multirun.yaml").unlink(missing_ok=True)
    failed = [row["name"] for row in rows if row["status"] != "finished"]
    if failed:
        fail(f"not finished: {'; '.join(failed)}", messages)
    return 1 if failed else 0


def job(composed: DictConfig) -> None:
    """One combination; what goes wrong is written down, so that the others still run."""
    values = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    swept = values.pop("_swept")
    task = HydraConfig.get().overrides.task
    folder = Path(values["out"]).expanduser() / name_of(task, swept)
    messages = Console(stderr=True)
    try:
        settings = build_settings({**values, "out": str(folder), "resume": not values.get("overwrite")}, "experiment")
        if is_finished(folder, settings):
            say(f"{folder.name}: finished before, skipped", console=messages)
            return
        say(f"{folder.name}:", console=messages)
        code = execute(settings, messages)
        problem = None if code == 0 else f"ended with exit code {code}"
    except (ValueError, OSError) as error:
        fail(error, messages)
        problem, code = str(error), 1
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "error.txt").unlink(missing_ok=True)
    if problem is not None:
        write_text(folder / "error.txt", problem + "\n")
    if code > 128:
        # Stopped by the user: so is the sweep.
        raise KeyboardInterrupt


def name_of(task: Sequence[str], swept: Sequence[str]) -> str:
    """A folder's name from a run's overrides, those that vary: `optim.lr=0.001,seed=1`."""
    parsed = OverridesParser.create().parse_overrides(list(task))
    values = {override.key_or_group: override.value() for override in parsed}
    text = ",".join(f"{key}={str(values[key]).strip(chr(39))}" for key in swept)
    return text.replace("/", "_")


def is_finished(folder: Path, settings: Settings) -> bool:
    """Whether a folder holds the result of these very settings."""
    if not (folder / "result.json").is_file() or not (folder / "config.yaml").is_file():
        return False
    before = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    now = json.loads(json.dumps(dataclasses.asdict(settings)))
    return all(before.get(key) == value for key, value in now.items() if key not in WHERE)


def results(base: Path) -> list[dict[str, Any]]:
    """What came of every run in a folder of runs, the best first."""
    rows = []
    for folder in sorted(path for path in base.iterdir() if path.is_dir() and "=" in path.name):
        row: dict[str, Any] = {"name": folder.name, "status": "unfinished", "bits_per_byte": None}
        if (folder / "error.txt").is_file():
            row["status"] = (folder / "error.txt").read_text(encoding="utf-8").strip()
        elif (folder / "result.json").is_file():
            result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
            bits = result.get("valid_bits_per_byte") or {}
            row |= {"status": "finished", "loss": result["loss"], "tokens_per_s": result["tokens_per_s"],
                    "seconds": result["seconds"], "bits_per_byte": sum(bits.values()) / max(len(bits), 1)}  # fmt: skip
        rows.append(row)
    return sorted(rows, key=lambda row: (row["bits_per_byte"] is None, row["bits_per_byte"], row["name"]))


def print_table(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """The runs, the best first."""
    table = Table("run", "bits a byte (held out)", "last loss", "tokens/s", "seconds", "status")
    for row in rows:
        numbers = [row.get(key) for key in ("bits_per_byte", "loss", "tokens_per_s", "seconds")]
        texts = ["" if x is None else f"{x:.{digits}f}" for x, digits in zip(numbers, (4, 4, 0, 0), strict=True)]
        table.add_row(row["name"], *texts, row["status"])
    console.print(table)
