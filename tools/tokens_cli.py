"""The commands of `laneformer data` that turn text into tokens, and the one that shows what came out."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from laneformer.terminal import friendly_errors, say, table_console

SHARD_TOKENS = 2**26
Out = Annotated[Path, typer.Argument(help="Folder to write.")]
Tokenizer = Annotated[Path, typer.Option(help="tokenizer.json, or a folder that holds one.")]
ValidFraction = Annotated[float, typer.Option(help="Share of each source that is held out, by a hash of the content.")]
ShardTokens = Annotated[int, typer.Option(min=1, help="Most tokens in a shard, unless one document has more.")]


def register(app: typer.Typer) -> None:
    """Adds the commands to an app."""
    for command in (train_tokenizer, adopt_tokenizer, tokenize, tokenize_chat, inspect):
        app.command(command.__name__.replace("_", "-"))(command)


def train_tokenizer(
    corpus: Annotated[Path, typer.Argument(help="Folder of documents (*.jsonl.gz) or of text files, or one file.")],
    out: Out,
    vocab_size: Annotated[int, typer.Option(help="Entries, the 7 special tokens and 256 bytes included.")] = 4096,
    megabytes: Annotated[float, typer.Option(min=0.001, help="Text to train on at most, spread over all.")] = 200,
    valid_fraction: ValidFraction = 0.05,
) -> None:
    """Train a byte-level BPE tokenizer with the special tokens for infilling and chat."""
    with friendly_errors():
        from laneformer.data import tokenizer
        from laneformer.data.sample import spread_texts

        texts = spread_texts(corpus, int(megabytes * 1e6), valid_fraction)
        trained = tokenizer.train_tokenizer(texts, vocab_size)
        tokenizer.save_tokenizer(out, trained)
        ids = sum(map(len, tokenizer.encode_texts(tokenizer.document_encoder(trained), texts)))
        size = sum(len(text.encode()) for text in texts)
        say(
            f"{out}: {tokenizer.vocab_size(trained):,} entries from {size / 1e6:.1f} MB, {size / ids:.2f} bytes a token"
        )


def adopt_tokenizer(
    path: Annotated[Path, typer.Argument(help="tokenizer.json, or a folder that holds one.")],
    out: Out,
    special: Annotated[
        list[str] | None,
        typer.Option(
            help="ROLE=TOKEN: a token it has, for end, pad, fim_prefix, fim_suffix, fim_middle, im_start, im_end"
        ),
    ] = None,
) -> None:
    """Take an existing tokenizer and add the special tokens that it lacks."""
    with friendly_errors():
        from laneformer.data import tokenizer
        from laneformer.data.specials import Specials

        before = tokenizer.vocab_size(tokenizer.load(tokenizer.tokenizer_file(path)))
        adopted, names = tokenizer.adopt_tokenizer(path, parse_special(special or []))
        tokenizer.save_tokenizer(out, adopted, names)
        after = tokenizer.vocab_size(adopted)
        say(f"{out}: {after:,} entries, {after - before} of them new; {Specials.of(adopted, names)}")


def parse_special(pairs: list[str]) -> dict[str, str]:
    """ROLE=TOKEN pairs as a mapping; raises ValueError for one without a sign of equality."""
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"--special {pair!r} is not ROLE=TOKEN, such as end=</s>")
    return {role: name for role, _, name in (pair.partition("=") for pair in pairs)}


def tokenize(
    documents: Annotated[Path, typer.Argument(help="Folder of documents, or the cleaned corpus that holds it.")],
    out: Out,
    tokenizer: Tokenizer,
    valid_fraction: ValidFraction = 0.05,
    shard_tokens: ShardTokens = SHARD_TOKENS,
    tasks: Annotated[int | None, typer.Option(min=1, help="Parts of the work [one a file, at most 64].")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Tasks at once; one uses all cores to tokenise.")] = 1,
    executor: Annotated[str, typer.Option(help="local, slurm or ray.")] = "local",
    partition: Annotated[str, typer.Option(help="Slurm partition.")] = "",
    time: Annotated[str, typer.Option(help="Slurm time limit of a task.")] = "04:00:00",
) -> None:
    """Tokenise cleaned documents into shards; goes on where it was stopped."""
    with friendly_errors():
        if importlib.util.find_spec("datatrove") is None:
            raise ValueError("laneformer data needs the package datatrove: pip install 'laneformer[data]'")
        from laneformer.data.executors import Execution
        from laneformer.data.tokenize import tokenize_documents

        done = tokenize_documents(
            *(documents, out, tokenizer),
            **{"valid_fraction": valid_fraction, "shard_tokens": shard_tokens, "tasks": tasks},
            execution=Execution(executor, workers, partition, time),
        )
        if done is None:
            say(f"submitted; {out} is ready once it holds manifest.json")
        elif done.num_tokens == 0:
            say(f"{out} is made from these documents and settings already")
        else:
            say(
                f"{done.num_tokens:,} tokens in {done.seconds:.1f} s: {done.num_tokens / done.seconds:,.0f} tokens/s, "
                f"{done.num_bytes / 1e6 / done.seconds:.2f} MB/s"
            )
        if done is not None:
            show_table(out)


def tokenize_chat(
    files: Annotated[list[Path], typer.Argument(help="JSON lines with messages (.jsonl or .jsonl.gz), then OUT.")],
    tokenizer: Tokenizer,
    source: Annotated[str, typer.Option(help="Name of the source, for mixture weights.")] = "chat",
    valid_fraction: ValidFraction = 0.05,
    shard_tokens: ShardTokens = SHARD_TOKENS,
) -> None:
    """Tokenise conversations into shards of which the assistant's words are learnt: FILE... OUT."""
    with friendly_errors():
        from laneformer.data import chat

        if len(files) < 2:
            raise ValueError("give at least one file of conversations, and last the folder to write")
        *files, out = files
        options = {"source": source, "valid_fraction": valid_fraction, "shard_tokens": shard_tokens}
        made = chat.tokenize_chat(files, out, tokenizer, **options)
        same = ", unchanged since they were tokenised" if made.reused else ""
        say(f"{made.conversations:,} conversations ({made.duplicates} duplicates left out){same}")
        show_table(out)


def inspect(
    folder: Annotated[Path, typer.Argument(help="Folder of shards.")],
    sample: Annotated[int, typer.Option(min=0, help="Show the start of so many documents of each source.")] = 0,
    verify: Annotated[bool, typer.Option(help="Check every shard against its hash.")] = True,
) -> None:
    """Show what a folder of shards holds."""
    with friendly_errors():
        from laneformer.data.contents import sample_documents
        from laneformer.data.shards import open_shard, read_manifest

        manifest = read_manifest(folder)
        if verify:
            for info in manifest.shards:
                open_shard(folder, info, manifest)
        show_table(folder)
        for title, text in sample_documents(folder, manifest, sample):
            print(f"--- {title}\n{text}")


def show_table(folder: Path) -> None:
    """Prints one line for each source and split of a folder of shards."""
    from rich.table import Table

    from laneformer.data.contents import rows
    from laneformer.data.shards import read_manifest

    manifest = read_manifest(folder)
    title = (
        f"{folder}: tokenizer of {manifest.vocab_size:,} entries ({manifest.tokenizer_sha256[:12]}), "
        f"end token {manifest.end_token} = {manifest.end_id}, {manifest.dtype}"
    )
    table = Table(title=title, title_justify="left")
    for name in ("source", "split", "shards", "documents", "tokens", "learnt", "MB", "bytes a token learnt"):
        table.add_column(name, justify="left" if name in ("source", "split") else "right")
    for row in rows(folder, manifest):
        ratio = f"{row.num_bytes / row.learnt:.2f}" if row.learnt else "n/a"
        counts = (f"{number:,}" for number in (row.shards, row.documents, row.tokens, row.learnt))
        table.add_row(row.source, row.split, *counts, f"{row.num_bytes / 1e6:,.1f}", ratio)
    table_console().print(table)
