"""Instruction tuning: only the assistant's words are learnt, and a few dozen steps change the answers."""

from __future__ import annotations

import json
import random

import pytest
import torch
import torch.nn.functional as F
from conftest import SIZES
from helpers import assert_close
from rich.console import Console

from laneformer import Laneformer
from laneformer.data.chat import Message, encode_chat, tokenize_chat
from laneformer.data.specials import Specials
from laneformer.data.tokenizer import document_encoder, read_tokenizer, save_tokenizer, train_tokenizer
from laneformer.train.cli import main
from laneformer.train.parallel import Layout
from laneformer.train.prepare import prepare
from laneformer.train.settings_build import build_settings

TASKS = {"add": "Sum it up.", "cut": "Cut it off."}


def talk(draw, name):
    """Noise with a task's name in front of it, and the answer that the name alone decides."""
    noise = "".join(draw.choice("abcdefgh 0123") for _ in range(draw.randrange(5, 14)))
    return (Message("user", f"{name} {noise}"), Message("assistant", TASKS[name]))


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A folder of shards of 150 conversations, and 20 others that it does not hold."""
    folder, draw = tmp_path_factory.mktemp("instruct"), random.Random(3)
    talks = list(dict.fromkeys(talk(draw, name) for _ in range(85) for name in TASKS))
    lines = [json.dumps({"messages": [vars(message) for message in one]}) for one in talks[20:]]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    save_tokenizer(folder / "tokenizer", train_tokenizer(["user assistant\n"], 264))
    tokenize_chat([folder / "chats.jsonl"], folder / "chats", folder / "tokenizer", valid_fraction=0)
    return folder / "chats", talks[:20]


def trainer_of(folder, out, **changes):
    values = {"out": str(out), "steps": 3, "model": dict(SIZES), "precision": "float64",
              "data": {"folders": [str(folder)], "sequence_length": 61, "batch": 5}, **changes}  # fmt: skip
    return prepare(build_settings(values, "test"), Console(quiet=True), Layout()).trainer


def encoded(folder, conversation):
    tokenizer, names = read_tokenizer(folder)
    return encode_chat(document_encoder(tokenizer), Specials.of(tokenizer, names), conversation)


def spoken_by_hand(tokenizer, row):
    """Which tokens of a row lie behind an assistant's header, up to and with its im_end: read from the ids alone."""
    start, end = (tokenizer.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    header = [start, *tokenizer.encode("assistant\n").ids]
    marks, speaking = [], False
    for i, token in enumerate(row):
        marks.append(speaking)
        if speaking and token == end:
            speaking = False
        elif row[max(0, i + 1 - len(header)) : i + 1] == header:
            speaking = True
    return marks


def test_the_gradient_is_that_of_the_assistants_words_marked_by_hand(chats, tmp_path):
    folder, _ = chats
    trainer = trainer_of(folder, tmp_path)
    batch = trainer.loader.batch(0, 5)
    trainer.gradients([batch], 1)
    got = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}
    tokenizer, _ = read_tokenizer(folder)
    trainer.model.zero_grad()
    logits_BSV = trainer.model(batch.inputs_BS, documents_BS=batch.documents_BS)
    total, marked = torch.zeros((), dtype=torch.float64), 0
    for row, inputs in enumerate(batch.inputs_BS.tolist()):
        # A row that starts within an answer has lost the header by which it could be told.
        known = inputs.index(tokenizer.token_to_id("<|im_start|>"))
        marks = spoken_by_hand(tokenizer, inputs)
        for s in range(len(inputs) - 1):
            learnt = marks[s + 1] if s >= known else batch.targets_BS[row, s] >= 0
            if learnt:
                total = total - F.log_softmax(logits_BSV[row, s], -1)[inputs[s + 1]]
                marked += 1
        last = batch.targets_BS[row, -1]
        if last >= 0:
            total, marked = total - F.log_softmax(logits_BSV[row, -1], -1)[last], marked + 1
    assert 0.1 * batch.targets_BS.numel() < marked < 0.7 * batch.targets_BS.numel()
    total.backward()
    for name, parameter in trainer.model.named_parameters():
        assert_close(got[name], parameter.grad, length=marked * 264)


def test_a_few_dozen_steps_teach_answers_to_prompts_never_seen(chats, tmp_path):
    folder, held_out = chats
    base, out = tmp_path / "base", tmp_path / "tuned"
    sizes = [f"model.{key}={value}" for key, value in {**SIZES, "hidden_size": 24}.items()]
    common = [f"data.folders=[{folder}]", "data.sequence_length=96", "threads=1", "checkpoint.every=0"]
    assert main([*common, *sizes, f"out={base}", "steps=1", "optim.lr=1e-9", "data.batch=2"]) == 0
    start = base / "checkpoint"
    assert main([*common, f"out={out}", f"init_from={start}", "steps=80", "optim.lr=1e-2", "data.batch=6"]) == 0
    before, after = (answer_nats(path, held_out) for path in (start, out / "checkpoint"))
    assert before["answer"] > 4.5 and after["answer"] < 0.1 * before["answer"]
    # Nothing taught it the noise of the user, at which it can be no better than before by much.
    assert after["user"] > 0.7 * before["user"]


def answer_nats(checkpoint, talks):
    """Mean nats a token of the answers, and of what the user says."""
    model = Laneformer.from_pretrained(checkpoint)
    sums = {"answer": [0.0, 0], "user": [0.0, 0]}
    for one in talks:
        ids, learn = encoded(checkpoint, one)
        with torch.no_grad():
            scores = torch.log_softmax(model(torch.tensor([ids]))[0].double(), -1)
        for i in range(1, len(ids)):
            kept = sums["answer" if learn[i] else "user"]
            kept[0] -= scores[i - 1, ids[i]].item()
            kept[1] += 1
    return {name: total / count for name, (total, count) in sums.items()}
