"""Where does a step run: on this machine, on Slurm, or on Ray?"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.base import PipelineStep

from laneformer.data.quiet import children_end_with_us, quiet

KINDS = ("local", "slurm", "ray")


class ExecutorError(ValueError):
    """An executor that cannot be used as asked."""


class StepFailed(OSError):
    """A step of a pipeline that did not succeed."""


@dataclass(frozen=True)
class Execution:
    """How steps are run; `time`, `partition` and `sbatch` are for Slurm, `memory_gb` is per task on a cluster."""

    kind: str = "local"
    workers: int = 2
    partition: str = ""
    time: str = "04:00:00"
    memory_gb: int = 4
    sbatch: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ExecutorError(f"executor is {self.kind!r}, expected one of {', '.join(KINDS)}")
        if self.workers < 1:
            raise ExecutorError(f"workers is {self.workers}, expected 1 or more")
        if self.kind == "slurm" and not self.partition:
            raise ExecutorError("the Slurm executor needs the name of a partition: --partition NAME")
        if self.kind == "ray" and importlib.util.find_spec("ray") is None:
            raise ExecutorError("the Ray executor needs the package ray: pip install ray")


@dataclass(frozen=True)
class Step:
    """One pipeline of blocks, run by `tasks` tasks that each take a share of the files."""

    name: str
    pipeline: Sequence[PipelineStep]
    tasks: int


class LocalExecutor(LocalPipelineExecutor):
    """datatrove's local executor without its log on the terminal, and whose tasks end when it is killed."""

    def run(self) -> Any:
        """Runs the tasks that are not complete."""
        log = Path(str(self.logging_dir.resolve_paths("step.log")))
        with quiet(log), children_end_with_us():
            try:
                return super().run()
            except Exception as error:
                # Blocks may raise anything; their trace is in the log.
                text = " ".join(str(error).split())[:300] or type(error).__name__
                raise StepFailed(f"step {log.parent.name} failed: {text}; its log is {log}") from error


def executor(step: Step, logs: Path, execution: Execution, depends: PipelineExecutor | None = None) -> PipelineExecutor:
    """The datatrove executor for a step, its log and its record of finished tasks in a folder of the step's name."""
    folder = str((logs / step.name).absolute())
    common: dict[str, Any] = {"pipeline": list(step.pipeline), "tasks": step.tasks, "logging_dir": folder}
    if execution.kind == "local":
        # A forked task needs no second import of everything: half a second a step instead of several.
        start = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
        return LocalExecutor(**common, workers=min(execution.workers, step.tasks), start_method=start)
    common |= {"workers": execution.workers, "mem_per_cpu_gb": execution.memory_gb, "depends": depends}
    if execution.kind == "slurm":
        venv = os.environ.get("VIRTUAL_ENV")
        return SlurmPipelineExecutor(
            **common,
            time=execution.time,
            partition=execution.partition,
            job_name=f"laneformer-{step.name}",
            sbatch_args=dict(execution.sbatch),
            venv_path=f"{venv}/bin/activate" if venv else None,  # pyright: ignore[reportArgumentType]
        )
    from datatrove.executor.ray import RayPipelineExecutor

    return RayPipelineExecutor(**common)


def chain(steps: Sequence[Step], logs: Path, execution: Execution) -> list[PipelineExecutor]:
    """Executors that each depend on the one before; to run the last runs all."""
    executors: list[PipelineExecutor] = []
    for step in steps:
        executors.append(executor(step, logs, execution, executors[-1] if executors else None))
    return executors


def finished(step: Step, logs: Path) -> int:
    """How many tasks of a step are complete."""
    folder = logs / step.name / "completions"
    return len(list(folder.iterdir())) if folder.is_dir() else 0
