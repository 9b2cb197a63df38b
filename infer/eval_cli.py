"""The command `infer eval`: its options, and how they become settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from laneformer.infer.cli_support import (
    check_dtype,
    friendly_errors,
    progress_bar,
    table_console,
    write_json,
)
from laneformer.terminal import say


def evaluate(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Checkpoint folder of this project, or any transformers folder.", show_default=False),
    ] = None,
    suite: Annotated[
        str, typer.Option(help="With commas: bits-per-byte, syntax-valid, infilling, humaneval, mbpp.")
    ] = "humaneval",
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run generated code, in the sandbox; humaneval, mbpp.")
    ] = False,
    canonical: Annotated[
        bool, typer.Option("--canonical", help="Judge the problems' own solutions; needs no model.")
    ] = False,
    samples: Annotated[int, typer.Option(help="Samples for each problem.", min=1)] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    k: Annotated[str, typer.Option("--k", help="The k of pass@k, with commas.")] = "1",
    max_tokens: Annotated[int, typer.Option(help="Tokens of a completion at most.", min=1)] = 512,
    seed: Annotated[int, typer.Option(help="Same seed, same samples.", min=0)] = 0,
    limit: Annotated[int | None, typer.Option(help="Only the first problems of each suite.", min=1)] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="bits-per-byte: files or folders of texts; several times.")
    ] = None,
    mbpp_prompt: Annotated[str, typer.Option(help="few-shot (MBPP's paper) or docstring (evalplus).")] = "few-shot",
    chat: Annotated[bool, typer.Option("--chat", help="Ask as a user, through the chat template.")] = False,
    humaneval: Annotated[Path | None, typer.Option(help="Other problems, also HumanEval+ of evalplus.")] = None,
    mbpp: Annotated[Path | None, typer.Option(help="Other problems, also MBPP+ of evalplus.")] = None,
    samples_in: Annotated[Path | None, typer.Option(help="Judge the samples of this file; needs no model.")] = None,
    samples_out: Annotated[
        Path | None, typer.Option(help="Write samples here as they come; goes on where it was stopped.")
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="An OpenAI-compatible server, as http://host:8000.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name on the server.")] = None,
    key_variable: Annotated[
        str, typer.Option(help="Environment variable that holds the server's key.")
    ] = "OPENAI_API_KEY",
    timeout: Annotated[float, typer.Option(help="Seconds that a sample may run.", min=0.1)] = 10.0,
    workers: Annotated[int | None, typer.Option(help="Samples run at once; the cores by default.", min=1)] = None,
    weak_sandbox: Annotated[
        bool, typer.Option("--weak-sandbox", help="Do without namespaces: only in a container to throw away.")
    ] = False,
    ranks: Annotated[int, typer.Option(help="Rank processes.", min=1)] = 1,
    runner: Annotated[str, typer.Option(help="eager or compiled.")] = "eager",
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; its own by default.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads a rank.", min=1)] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write settings, scores and every status here; - for the last line.")
    ] = None,
) -> None:
    """Measure what a model can do: bits per byte, Python that parses, infilling, HumanEval and MBPP.

    Generated code runs in a sandbox, and only with --allow-code-execution.

    Examples:

    `infer eval --suite humaneval --canonical --allow-code-execution`

    `infer eval checkpoint --suite bits-per-byte,infilling --text documents/ --json eval.json`

    `infer eval checkpoint --suite humaneval --samples 20 --temperature 0.8 --k 1,10 --allow-code-execution`

    `infer eval --suite mbpp --endpoint http://localhost:8000 --model NAME --chat --allow-code-execution`
    """
    from laneformer.evaluation.code_suites import Drawing
    from laneformer.evaluation.prompts import STYLES
    from laneformer.infer.bench import parse_list
    from laneformer.infer.eval_report import print_results
    from laneformer.infer.eval_run import EvalSettings, run_eval

    with friendly_errors(), progress_bar() as bar:
        check_dtype(dtype)
        if mbpp_prompt not in STYLES:
            raise ValueError(f"no --mbpp-prompt {mbpp_prompt!r}; there are {', '.join(STYLES)}")
        settings = EvalSettings(
            suites=parse_list(suite, str, "--suite"),
            folder=folder,
            endpoint=endpoint,
            model=model,
            key_variable=key_variable,
            canonical=canonical,
            allow_code_execution=allow_code_execution,
            weak_sandbox=weak_sandbox,
            drawing=Drawing(samples, temperature, max_tokens, seed, mbpp_prompt, chat),
            ks=parse_list(k, int, "--k"),
            limit=limit,
            timeout_s=timeout,
            workers=workers,
            texts=tuple(text or ()),
            humaneval=humaneval,
            mbpp=mbpp,
            samples_in=samples_in,
            samples_out=samples_out,
            ranks=ranks,
            runner=runner,
            dtype=dtype,
            threads=threads,
        )
        task = bar.add_task("starting", total=None)
        document = run_eval(
            settings,
            lambda note: say(f"note: {note}", "yellow"),
            lambda name, done, total: bar.update(task, description=name, completed=done, total=total),
        )
        bar.stop()
        print_results(document, table_console())
        if json_file is not None:
            write_json(document, json_file)
