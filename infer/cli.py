"""The `infer` command: generate, check, bench, cost, plan, eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from laneformer.infer.cli_support import (
    check_dtype,
    checkpoint_of,
    friendly_errors,
    messages,
    progress_bar,
    table_console,
    write_json,
)
from laneformer.infer.eval_cli import evaluate
from laneformer.infer.limits import WAIT_LIMIT_S
from laneformer.infer.plan_cli import plan
from laneformer.terminal import run_command

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Decode lane models, check them, and measure their speed against standard tensor parallelism.",
)

Folder = Annotated[Path, typer.Argument(help="Checkpoint folder: config.json and safetensors.", show_default=False)]
Ranks = Annotated[int, typer.Option(help="Rank processes; must divide the lanes.", min=1)]
ScheduleText = Annotated[
    str, typer.Option(help="tensor-parallel, delayed:D, delayed:D:early, ladder, silent, or checkpoint (its own).")
]
RunnerName = Annotated[
    str,
    typer.Option(
        help="eager, compiled (CPUs), graph (a captured CUDA graph on GPUs) or persistent (one kernel for many tokens)."
    ),
]
ExchangeName = Annotated[
    str, typer.Option(help="mailbox (shared memory), gloo, nccl, or auto: nccl for a GPU a rank, else mailbox.")
]
DeviceName = Annotated[str, typer.Option(help="cpu, cuda (ROCm too), or auto: a GPU where there is one.")]
DType = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; the checkpoint's own by default.")]
Threads = Annotated[int | None, typer.Option(help="Threads a rank; cores are shared equally by default.", min=1)]
WaitLimit = Annotated[
    float, typer.Option(help="Seconds a rank may wait or stand still before the run is ended.", min=0.1)
]


@app.command()
def generate(
    folder: Folder,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File with the text to continue; - for standard input.")
    ] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids to continue, with commas between them.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to decode at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw among the k likeliest; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest that add up to p.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes tokens seen before less likely.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed, same draws, on any number of ranks.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; may be given several times.")] = None,
    stop_id: Annotated[list[int] | None, typer.Option(help="Stop at this token id; several times.")] = None,
    stream: Annotated[bool, typer.Option(help="Show text as it comes.")] = True,
    schedule: ScheduleText = "checkpoint",
    runner: RunnerName = "eager",
    ranks: Ranks = 1,
    exchange: ExchangeName = "auto",
    device: DeviceName = "auto",
    link_latency: Annotated[float, typer.Option(help="Emulated link between ranks, microseconds.")] = 0.0,
    dtype: DType = None,
    threads: Threads = None,
    wait_limit: WaitLimit = WAIT_LIMIT_S,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write tokens and times here; - for the last line.")
    ] = None,
) -> None:
    """Continue a prompt.

    Example: `infer generate checkpoint --prompt "def fib(n):" --max-tokens 64 --ranks 2 --schedule delayed:4`
    """
    from laneformer.infer.generate import Prompt, run_generate
    from laneformer.infer.request import Request
    from laneformer.infer.sampling import Sampling

    with friendly_errors():
        check_dtype(dtype)
        request = Request(
            prompt=(),
            max_tokens=max_tokens,
            sampling=Sampling(temperature, top_k, top_p, repetition_penalty, seed),
            stop_ids=tuple(stop_id or ()),
            stop_texts=tuple(stop or ()),
            schedule=schedule,
            link_latency_us=link_latency,
        )
        settings = {
            "ranks": ranks, "schedules": (schedule,), "runner": runner, "exchange": exchange, "dtype": dtype,
            "threads": threads, "wait_limit_s": wait_limit, "device": device,
        }  # fmt: skip
        result = run_generate(folder, Prompt(prompt, prompt_file, prompt_ids), request, settings, stream, messages)
        if result is not None and json_file is not None:
            write_json(result, json_file)


@app.command()
def check(
    folder: Folder,
    schedule: ScheduleText = "checkpoint",
    runner: RunnerName = "eager",
    ranks: Ranks = 1,
    exchange: ExchangeName = "auto",
    device: DeviceName = "auto",
    dtype: DType = None,
    expected: Annotated[
        Path | None, typer.Option(help="safetensors file with input_ids and logits to compare with.")
    ] = None,
    threads: Threads = None,
    wait_limit: WaitLimit = WAIT_LIMIT_S,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the verdict here; - for the last line.")
    ] = None,
) -> None:
    """Compare a runner's logits with the float64 reference, or with a file; exit code 0 if they agree, 1 if not.

    Example: `infer check checkpoint --ranks 2 --schedule delayed:4 --runner compiled`
    """
    from laneformer.infer.check import run_check

    with friendly_errors():
        check_dtype(dtype)
        settings = {
            "ranks": ranks, "schedules": (schedule,), "runner": runner, "exchange": exchange, "dtype": dtype,
            "threads": threads, "wait_limit_s": wait_limit, "device": device,
        }  # fmt: skip
        result = run_check(folder, schedule, expected, settings, Console())
        if json_file is not None:
            write_json(result, json_file)
    raise typer.Exit(0 if result["passed"] else 1)


@app.command()
def bench(
    folder: Annotated[
        Path | None, typer.Argument(help="Checkpoint folder; or give --preset.", show_default=False)
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Random weights of a named size: small, demo, 2b.")] = None,
    lanes: Annotated[int | None, typer.Option(help="Lanes of the preset, if not its own number.", min=1)] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2",
    schedules: Annotated[str, typer.Option(help="Sync schedules.")] = "tensor-parallel,delayed:4,ladder,silent",
    link_latency: Annotated[str, typer.Option(help="Emulated link latencies, microseconds.")] = "0",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens in.")] = 64,
    prompt_file: Annotated[Path | None, typer.Option(help="Text whose first tokens go in; random ids without.")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens out.")] = 64,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 5,
    dtype: DType = None,
    runner: RunnerName = "compiled",
    exchange: ExchangeName = "auto",
    device: DeviceName = "auto",
    against: Annotated[str | None, typer.Option(help="Peers in the same run: hf-generate, hf-compiled.")] = None,
    threads: Threads = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the document here; - for the last line.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw tokens/s against latency: .png, .svg or .pdf.")] = None,
) -> None:
    """Measure the decode speed of one request: schedules, ranks and link latencies against standard tensor parallelism.

    Example: `infer bench --preset small --ranks 2 --link-latency 0,50,200,500 --figure bench.png --json bench.json`
    """
    from laneformer.infer.bench import BenchSettings, parse_list, run_bench
    from laneformer.infer.figure import check_figure_path, draw
    from laneformer.infer.report import print_table

    with friendly_errors():
        check_dtype(dtype)
        figure_path = None if figure is None else check_figure_path(figure)
    with friendly_errors(), checkpoint_of(folder, preset, lanes) as path, progress_bar() as bar:
        settings = BenchSettings(
            folder=str(path),
            ranks=parse_list(ranks, int, "--ranks"),
            schedules=parse_list(schedules, str, "--schedules"),
            latencies_us=parse_list(link_latency, float, "--link-latency"),
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            rounds=rounds,
            dtype=dtype,
            runner=runner,
            exchange=exchange,
            device=device,
            against=parse_list(against, str, "--against") if against else (),
            threads=threads,
            prompt_file=None if prompt_file is None else str(prompt_file),
        )
        task = bar.add_task("starting", total=None)
        result = run_bench(
            settings,
            lambda text: bar.update(task, description=text),
            lambda done, total: bar.update(task, description="measuring", completed=done, total=total),
        )
        bar.stop()
        print_table(result, table_console())
        if figure_path is not None:
            draw(result, figure_path)
        if json_file is not None:
            write_json(result, json_file)


@app.command()
def cost(
    preset: Annotated[str | None, typer.Option(help="A named size: 2b, small, demo.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Or a checkpoint folder.")] = None,
    machine: Annotated[str, typer.Option(help="Such as 8xh200, mi300x, a100, h100, or this (measured).")] = "8xh200",
    ranks: Annotated[int | None, typer.Option(help="Ranks; one a device by default.", min=1)] = None,
    schedules: Annotated[str | None, typer.Option(help="Sync schedules to predict.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of weights and cache.")] = "float16",
    context: Annotated[int | None, typer.Option(help="Positions in the cache; 1024 by default.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers here; - for the last line.")
    ] = None,
) -> None:
    """Parameters, bytes and FLOPs a token, the bandwidth floor, and each schedule's predicted time on a machine.

    Example: `infer cost --preset 2b --machine 8xh200`
    """
    from laneformer.config import LaneConfig
    from laneformer.infer.bench import parse_list
    from laneformer.infer.cost_report import SCHEDULES, cost_report, print_cost

    with friendly_errors():
        if (preset is None) == (folder is None):
            raise ValueError("give one of --preset and --folder")
        config = LaneConfig.preset(preset) if preset else LaneConfig.from_pretrained(folder or "")
        named = parse_list(schedules, str, "--schedules") if schedules else SCHEDULES
        measured = None
        if machine == "this":
            from laneformer.infer.bandwidth import measure_bandwidth

            measured = measure_bandwidth()
        report = cost_report(config, machine, ranks, named, dtype, context, measured)
        print_cost(report, table_console())
        if json_file is not None:
            write_json(report, json_file)


app.command("plan")(plan)
app.command("eval")(evaluate)


def main() -> None:
    """The console script."""
    run_command(app)


if __name__ == "__main__":
    main()
