"""The `train` command: KEY=VALUE arguments to one training run."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
import textwrap
import typing
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from laneformer.config import LaneConfig
from laneformer.presets import PRESETS
from laneformer.terminal import fail, say
from laneformer.train.settings import NOT_FOR_MODEL, Settings
from laneformer.train.settings_build import build_settings, check_key, key_types

USAGE = """\
Usage: train [experiment=NAME] corpus=FOLDER_OR_FILE out=FOLDER [KEY=VALUE ...]
       train [experiment=NAME] data.folders=[SHARDS,...] out=FOLDER [KEY=VALUE ...]
       train -m ... KEY=A,B,C

Trains a lane model on text files, or on shards of laneformer data tokenize, and writes OUT/checkpoint, which
`infer generate` continues prompts with.

Examples: train experiment=demo corpus=src out=runs/demo schedule=delayed:4 optim.lr=1e-3
          train experiment=demo corpus=src out=runs/demo resume=true
          train -m experiment=demo corpus=src out=runs/rates optim.lr=1e-3,3e-3 seed=0,1
          torchrun --nproc-per-node 2 -m laneformer.train.cli experiment=demo corpus=src out=runs/two parallel.lanes=2

The same command with resume=true goes on after a kill, on the same or another number of ranks. Ctrl-C or a plain kill
(SIGTERM) finishes the step, saves and exits with 130 or 143. -m runs every combination, skips what is finished, and
ends with a table; hydra/launcher=submitit_slurm sends each to a Slurm queue.

OUT holds log.jsonl (one line every log.every steps), checkpoints/, checkpoint/ (the last weights), config.yaml (all
settings), versions.json, and result.json once all steps are done.
"""
MULTIRUN = ("-m", "--multirun")


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script: 0 when done, 2 for a user's mistake, 1 for a failed run, 130 or 143 when stopped."""
    arguments = sys.argv[1:] if arguments is None else arguments
    messages = Console(stderr=True)
    if not arguments or {"-h", "--help"} & set(arguments):
        print("\n".join([USAGE, *help_lines()]))
        return 0 if arguments else 2
    try:
        if set(MULTIRUN) & set(arguments):
            from laneformer.train.sweep import sweep

            return sweep([argument for argument in arguments if argument not in MULTIRUN], messages)
        return execute(settings_from(arguments), messages)
    except ValueError as error:
        return failed(messages, error, 2)
    except OSError as error:
        return failed(messages, error, 1)
    except KeyboardInterrupt:
        messages.print("stopped")
        return 130


def execute(settings: Settings, messages: Console) -> int:
    """Runs the training; torch is imported only here, so that --help and a mistyped key answer at once."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Threads that spin while they wait make every operation several times slower where others use the cores too.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from laneformer.train.loop import TrainingError
    from laneformer.train.parallel import layout
    from laneformer.train.prepare import prepare
    from laneformer.train.stop import StopRequest

    with layout(settings) as place:
        job = prepare(settings, messages, place)
        try:
            with StopRequest() as stopped:
                folder = job.run(stopped)
        except TrainingError as error:
            return failed(messages, error, 1)
        if stopped.signal is not None:
            text = f"stopped; the weights so far are in {folder}, resume=true goes on"
        else:
            text = f"done: {folder}"
        if place.first:
            say(text, console=messages)
    return 0 if stopped.signal is None else 128 + stopped.signal


def failed(messages: Console, error: Exception, code: int) -> int:
    """One line on standard error; the exit code."""
    fail(error, messages)
    return code


def settings_from(arguments: Sequence[str]) -> Settings:
    """Settings from KEY=VALUE arguments over the chosen experiment; raises ValueError in one line."""
    overrides = list(overrides_from(arguments))
    try:
        with initialize_config_module("laneformer.conf", version_base="1.3"):
            composed = compose("config", overrides)
        values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(str(error).splitlines()[0]) from None
    assert isinstance(values, dict)
    return build_settings(typing.cast(dict[str, Any], values), "experiment")


def overrides_from(arguments: Sequence[str], sweeps: bool = False) -> Iterator[str]:
    """Hydra overrides of arguments whose keys are known; text is quoted, so that any path can be given as it is.

    With `sweeps` a value may be several with commas between them, or range(...), and hydra's own keys are let through.
    """
    kinds = key_types()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ValueError(f"{argument!r} is not KEY=VALUE; train --help shows an example")
        if sweeps and key.startswith("hydra"):
            yield argument
            continue
        if key == "experiment":
            for name in value.split(",") if sweeps else [value]:
                check_experiment(name)
            yield argument
            continue
        check_key(key, "command line")
        literal = kinds[key] is str or (kinds[key] == (str | None) and value != "null")
        if literal and not value.startswith(("'", '"')):
            value = ",".join(quoted(part) for part in (value.split(",") if sweeps else [value]))
        check_value(argument, f"{key}={value}", sweeps)
        # A known key that no yaml file names is added, one that has a value there is replaced.
        yield f"++{key}={value}"


def quoted(value: str) -> str:
    """Text as Hydra reads it back unchanged."""
    return "'" + value.replace("'", r"\'") + "'"


def check_value(argument: str, override: str, sweeps: bool = False) -> None:
    """Raises ValueError for a value that Hydra cannot read, or that stands for several runs where one is meant."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise ValueError(f"{argument!r} cannot be read: {str(error).splitlines()[0]}") from None
    if parsed.is_sweep_override() and not sweeps:
        raise ValueError(f"{argument!r} gives several values, but this is one run; write a list as [a,b], or add -m")


def experiments() -> list[str]:
    """The names of the packaged experiments."""
    names = (entry.name for entry in files("laneformer.conf").joinpath("experiment").iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def check_experiment(name: str) -> None:
    """Raises ValueError for an experiment that is not packaged, naming those that are."""
    if name not in experiments():
        near = difflib.get_close_matches(name, experiments(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"no experiment {name!r}; there are {', '.join(experiments())}{hint}")


def help_lines() -> Iterator[str]:
    """The experiments, then every key with its default and meaning."""
    yield f"experiment=NAME  {', '.join(experiments())}"
    yield ""
    hints = typing.get_type_hints(Settings)
    for field in dataclasses.fields(Settings):
        if dataclasses.is_dataclass(hints[field.name]):
            for inner in dataclasses.fields(hints[field.name]):
                yield help_line(f"{field.name}.{inner.name}", inner.default, inner.metadata["meaning"])
        elif field.name != "model":
            yield help_line(field.name, field.default, field.metadata["meaning"])
    yield help_line("model.preset", "demo", f"sizes to start from: {', '.join(PRESETS)}")
    names = [field.name for field in dataclasses.fields(LaneConfig) if field.name not in NOT_FOR_MODEL]
    yield help_line("model.KEY=VALUE", "", "changes of the preset; KEY is one of")
    yield textwrap.fill(", ".join(names), 120, initial_indent=" " * 32, subsequent_indent=" " * 32)


def help_line(key: str, default: Any, meaning: str) -> str:
    """A key with its default as one would type it, and its meaning."""
    text = f"[{','.join(default)}]" if isinstance(default, tuple) else default
    text = text if isinstance(text, str) else json.dumps(text)
    left = f"{key}={text}" if "=" not in key else key
    return f"{left:<30}  {meaning}" if len(left) <= 30 else f"{left}\n{'':<30}  {meaning}"


if __name__ == "__main__":
    sys.exit(main())
