"""Fine-tunes a small model on made-up conversations and measures its answers to held-out prompts, before and after.

`python experiments/004_instruction_tuning/run.py --base runs/demo/checkpoint --out runs/instruct`; without --base the
demo experiment is trained first, on the standard library. A few minutes on one core; writes results.json beside this
file, or results_with_code.json with --code.
"""

from __future__ import annotations

import json
import os
import platform
import sysconfig
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from tasks import ASKED, TRAINED, Pool, conversations, pools

from laneformer import Laneformer
from laneformer.data.chat import Conversation, encode_chat, tokenize_chat
from laneformer.data.shards import read_manifest
from laneformer.data.specials import Specials
from laneformer.data.tokenizer import document_encoder, read_tokenizer
from laneformer.files import write_text
from laneformer.infer.ranks import RankSettings
from laneformer.infer.report import commit
from laneformer.infer.request import Request
from laneformer.infer.session import Session
from laneformer.train.cli import main as train

HERE = Path(__file__).parent
SEED, HELD_OUT, LEARNT, PROMPTS, LIMIT, CAPACITY, CODE_ROW, CODE_SHARE = 0, 0.2, 3000, 50, 24, 128, 256, 0.3


@dataclass(frozen=True)
class Case:
    """One held-out prompt: the ids of the chat template's generation prompt, and those of the answer with its end."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def case_of(folder: Path, conversation: Conversation) -> Case:
    """The ids of one question and its answer, as a checkpoint's tokenizer has them."""
    tokenizer, names = read_tokenizer(folder)
    ids, learn = encode_chat(document_encoder(tokenizer), Specials.of(tokenizer, names), conversation)
    start, end = learn.index(1), len(learn) - learn[::-1].index(1)
    return Case(tuple(ids[:start]), tuple(ids[start:end]))


def answers(folder: Path, cases: Sequence[Case], threads: int) -> list[tuple[int, ...]]:
    """What the model says to each prompt, greedily, up to the end of its turn or `LIMIT` tokens."""
    with Session(RankSettings(str(folder), capacity=CAPACITY, threads=threads)) as session:
        requests = [Request(prompt=case.prompt, max_tokens=LIMIT, stop_ids=(case.answer[-1],)) for case in cases]
        return [tuple(token.id for token in session.generate(request)) for request in requests]


@torch.no_grad()
def nats(model: Laneformer, case: Case) -> float:
    """The cross-entropy of the answer and its end, summed, in nats."""
    ids = torch.tensor([*case.prompt, *case.answer])
    logits_SV = model(ids[None, :-1])[0, len(case.prompt) - 1 :]
    return F.cross_entropy(logits_SV.double(), ids[len(case.prompt) :], reduction="sum").item()


@torch.no_grad()
def code_nats(folder: Path) -> float:
    """Mean nats a token of one file of code, in rows of `CODE_ROW` tokens: what tuning costs the base's own trade."""
    tokenizer, _ = read_tokenizer(folder)
    text = Path(textwrap.__file__).read_text(encoding="utf-8")
    ids = torch.tensor(document_encoder(tokenizer).encode(text, add_special_tokens=False).ids)
    rows_NS = ids[: len(ids) // CODE_ROW * CODE_ROW].view(-1, CODE_ROW)
    logits_NSV = Laneformer.from_pretrained(folder)(rows_NS[:, :-1])
    return F.cross_entropy(logits_NSV.flatten(0, 1), rows_NS[:, 1:].flatten()).item()


def measure(folder: Path, asked: dict[str, list[Conversation]], threads: int) -> dict[str, Any]:
    """By task: the share of answers that end, that are exactly right, the nats a token, and some answers as text."""
    tokenizer, _ = read_tokenizer(folder)
    model = Laneformer.from_pretrained(folder).eval()
    found = {}
    for name, talks in asked.items():
        cases = [case_of(folder, talk) for talk in talks]
        said = answers(folder, cases, threads)
        pairs = list(zip(said, cases, strict=True))
        found[name] = {
            "prompts": len(cases),
            "ended": share(got[-1] == case.answer[-1] for got, case in pairs),
            "exact": share(got == case.answer for got, case in pairs),
            "nats_a_token": sum(nats(model, case) for case in cases) / sum(len(case.answer) for case in cases),
            "examples": [
                [talk[0].content, tokenizer.decode(list(got))] for talk, got in zip(talks[:3], said[:3], strict=True)
            ],
        }
    return found


def share(truths: Iterable[bool]) -> float:
    """The share that holds."""
    counted = list(truths)
    return sum(counted) / len(counted)


def run_train(*arguments: str) -> None:
    """One training run; ends this program where it fails."""
    if code := train([*arguments, "overwrite=true", "checkpoint.every=0"]):
        raise SystemExit(code)


def base_of(base: Path | None, out: Path, threads: int) -> Path:
    """The checkpoint to start from: the one given, or one of the demo experiment."""
    if base is not None:
        return base
    corpus = sysconfig.get_paths()["stdlib"]
    run_train("experiment=demo", f"corpus={corpus}", f"out={out / 'base'}", f"threads={threads}")
    return out / "base" / "checkpoint"


def shards_of(start: Path, out: Path, pool: Pool) -> Path:
    """The training conversations as a file of messages, and that as shards with a mask."""
    talks = [talk for of_task in conversations(TRAINED, pool, LEARNT, SEED).values() for talk in of_task]
    lines = [json.dumps({"messages": [vars(message) for message in talk]}) for talk in talks]
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "chats.jsonl", "\n".join(lines) + "\n")
    tokenize_chat([out / "chats.jsonl"], out / "chats", start, valid_fraction=0.02)
    return out / "chats"


def mixture(shards: Path, code: Path | None) -> list[str]:
    """Arguments of train for the conversations alone, or with code at `CODE_SHARE` of the rows."""
    if code is None:
        return [f"data.folders=[{shards}]"]
    sources = sorted({shard.source for shard in read_manifest(code).shards})
    weights = {"chat": 1 - CODE_SHARE, **{source: CODE_SHARE / len(sources) for source in sources}}
    spelt = ", ".join(f"{source}: {weight}" for source, weight in weights.items())
    return [f"data.folders=[{shards},{code}]", f"data.phases=[{{until: 1.0, weights: {{{spelt}}}}}]"]


def main(
    out: Annotated[Path, typer.Option(help="Folder for the conversations and the runs.")],
    base: Annotated[Path | None, typer.Option(help="Checkpoint to start from.")] = None,
    code: Annotated[Path | None, typer.Option(help="Shards of code to mix in, as the base learnt from.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    change: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for train; several times.")] = None,
) -> None:
    """Fine-tunes, measures before and after, and records both."""
    torch.set_num_threads(threads)
    start = base_of(base, out, threads)
    learnt, held = pools(read_tokenizer(start)[0], SEED, HELD_OUT)
    asked = conversations(ASKED, held, PROMPTS, SEED)
    before, code_before = measure(start, asked, threads), code_nats(start)
    shards, run = shards_of(start, out, learnt), out / "run"
    run_train("experiment=demo-instruct", f"init_from={start}", f"out={run}", f"threads={threads}",
              *mixture(shards, code), *(change or []))  # fmt: skip
    after, code_after = measure(run / "checkpoint", asked, threads), code_nats(run / "checkpoint")
    kept = json.loads((run / "result.json").read_text(encoding="utf-8"))
    results = {
        "commit": commit(),
        "learnt": {"words": len(learnt.words), "numbers": len(learnt.numbers)},
        "held_out": {"words": len(held.words), "numbers": len(held.numbers)},
        "training": {key: kept[key] for key in ("step", "loss", "seconds", "tokens_per_s", "valid_bits_per_byte")},
        "optim": kept["identity"]["optim"], "schedule": kept["identity"]["schedule"], "before": before, "after": after,
        "code_nats_a_token": {"before": code_before, "after": code_after},
        "machine": {"cpus": os.cpu_count(), "threads": threads, "python": platform.python_version(),
                    "torch": torch.__version__},
    }  # fmt: skip
    write_text(
        HERE / ("results.json" if code is None else "results_with_code.json"), json.dumps(results, indent=1) + "\n"
    )
    for name in asked:
        for when, found in (("before", before[name]), ("after", after[name])):
            print(f"{name:<9} {when:<7}", *(f"{key} {found[key]:.3f}" for key in ("ended", "exact", "nats_a_token")))
    print(f"code      nats a token {code_before:.3f} before, {code_after:.3f} after")


if __name__ == "__main__":
    typer.run(main)
