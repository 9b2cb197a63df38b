"""The loop: what a step does to the weights, what is measured, what is skipped, and that a seed decides everything."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from laneformer import LaneConfig, Laneformer, Schedule
from laneformer.train.data import first_bytes, read_documents
from laneformer.train.loop import StepResult, Trainer, TrainingError, record, train
from laneformer.train.run import prepare, with_schedule


def never() -> bool:
    return False


def parts(settings):
    """What a run has before it starts: (trainer, validation)."""
    job = prepare(settings, quiet())
    return job.trainer, job.valid


def finish(settings, messages=None) -> Path:
    """A whole run; the checkpoint's folder."""
    messages = messages or quiet()
    return prepare(settings, messages).run(messages, never)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def quiet():
    return Console(file=io.StringIO())


def test_loss_falls_far_on_a_text_that_repeats_itself(settings_for):
    trainer, valid = parts(settings_for(steps=60, data={"batch": 8}, optim={"lr": 2e-2}))
    before = trainer.bits_per_byte(valid, never)
    losses = []
    train(trainer, valid, lambda line: None, lambda result: losses.append(result.loss), never)
    assert losses[0] == pytest.approx(math.log(263), abs=0.3)
    assert sum(losses[-5:]) / 5 < 0.25 * losses[0]
    assert trainer.bits_per_byte(valid, never) < 0.25 * before


def test_a_step_is_the_clipped_gradient_of_the_token_mean_and_one_adamw_update(settings_for):
    settings = settings_for(optim={"lr": 0.01, "warmup": 0.0, "clip": 0.05, "weight_decay": 0.2, "eps": 1e-3})
    trainer, _ = parts(settings)
    twin = Laneformer(trainer.model.config, trainer.model.schedule).double()
    twin.load_state_dict(trainer.model.state_dict())
    tokens = trainer.windows.batch(0, 3)
    logs = twin(tokens[:, :-1]).log_softmax(-1)
    loss = -sum(logs[b, s, tokens[b, s + 1]] for b in range(3) for s in range(19)) / (3 * 19)
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in twin.parameters()))
    result = trainer.step()
    assert norm > 0.05, "the clip has nothing to do"
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-4)
    for (name, got), p in zip(trainer.model.named_parameters(), twin.parameters(), strict=True):
        gradient = p.grad * 0.05 / (norm + 1e-6)
        decay = 0.0 if "norm" in name or "tok_embeddings" in name else 0.2
        # At the first step the corrected mean is the gradient and the corrected square its square.
        expected = p * (1 - result.lr * decay) - result.lr * gradient / (gradient.abs() + 1e-3)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-6, msg=name)


def test_bits_per_byte_are_the_document_bits_over_its_bytes(settings_for):
    settings = settings_for(data={"valid_bytes": 150, "batch": 2})
    job = prepare(settings, quiet())
    trainer, valid, tokenizer = job.trainer, job.valid, job.tokenizer
    texts = first_bytes(read_documents(Path(settings.corpus), settings.data).valid, 150)
    end = tokenizer.token_to_id("<|endoftext|>")
    stream = [end]
    for text in texts:
        stream += [*tokenizer.encode(text).ids, end]
    bits = 0.0
    for start in range(0, len(stream) - 1, 19):
        piece = torch.tensor(stream[start : start + 20])
        logs = trainer.model(piece[None, :-1])[0].double().log_softmax(-1)
        bits -= sum(logs[s, piece[s + 1]].item() for s in range(len(piece) - 1)) / math.log(2)
    assert sum(len(text.encode()) for text in texts) == 150
    assert trainer.bits_per_byte(valid, never) == pytest.approx(bits / 150, rel=1e-6)


class Bursts(nn.Module):
    """A model whose logits are infinite at chosen steps."""

    def __init__(self, model, bad):
        super().__init__()
        self.model, self.bad, self.calls = model, bad, 0

    def forward(self, tokens_BS):
        self.calls += 1
        return self.model(tokens_BS) * (math.inf if self.calls in self.bad else 1.0)


def with_bursts(settings, bad):
    trainer, valid = parts(settings)
    return Trainer(Bursts(trainer.model, bad), trainer.windows, settings), valid


def test_a_step_that_is_not_finite_changes_no_weight_and_is_counted(settings_for):
    trainer, _ = with_bursts(settings_for(), {2})
    trainer.step()
    before = weights(trainer.model)
    result = trainer.step()
    after = weights(trainer.model)
    assert result.skipped and not math.isfinite(result.loss) and trainer.skipped == 1
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not trainer.step().skipped and (trainer.finished, trainer.position) == (3, 9)
    assert any(not torch.equal(before[name], p) for name, p in weights(trainer.model).items())


def test_ten_such_steps_in_a_row_end_the_run_and_nine_do_not(settings_for):
    trainer, valid = with_bursts(settings_for(steps=30), {*range(2, 11), *range(12, 22)})
    steps = []
    with pytest.raises(TrainingError, match=r"10 steps in a row, up to step 21; lower optim.lr \(now 0.003\)"):
        train(trainer, valid, lambda line: None, lambda result: steps.append(result.step), never)
    assert steps == list(range(1, 21)) and trainer.skipped == 19


def test_a_log_line_is_valid_json_even_when_the_loss_is_not_finite():
    line = record(StepResult(7, math.nan, 1e-3, math.inf, True), skipped=2, speed=1234.56, bits=None)
    assert json.loads(json.dumps(line, allow_nan=False)) == {
        "step": 7, "loss": None, "lr": 1e-3, "grad_norm": None, "tokens_per_s": 1234.6, "skipped": 2,
    }  # fmt: skip


def test_lines_are_written_at_their_steps_and_validation_at_its_own(settings_for):
    trainer, valid = parts(settings_for(steps=7, log={"every": 2, "valid_every": 3}))
    lines = []
    train(trainer, valid, lines.append, lambda result: None, never)
    assert [line["step"] for line in lines] == [2, 3, 4, 6, 7]
    assert [line["step"] for line in lines if "valid_bits_per_byte" in line] == [3, 6, 7]
    assert lines[-1]["valid_bits_per_byte"] == trainer.bits_per_byte(valid, never)


def test_a_request_to_stop_ends_after_the_current_step_without_validation(settings_for):
    trainer, valid = parts(settings_for(steps=50))
    lines = []
    train(trainer, valid, lines.append, lambda result: None, lambda: trainer.finished >= 4)
    assert [line["step"] for line in lines] == [4] and "valid_bits_per_byte" not in lines[0]
    assert trainer.bits_per_byte(valid, lambda: True) is None


def test_bfloat16_computes_narrow_and_keeps_wide_weights(settings_for):
    wide, _ = parts(settings_for())
    narrow, _ = parts(settings_for(precision="bfloat16"))
    with narrow.autocast():
        assert narrow.model(narrow.windows.batch(0, 1)[:, :-1]).dtype == torch.bfloat16
    losses = wide.step().loss, narrow.step().loss
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert {p.dtype for p in narrow.model.parameters()} == {torch.float32}


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "checkpoint").iterdir())}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(settings_for, tmp_path):
    folders = {name: tmp_path / name for name in ("one", "two", "three")}
    for (name, folder), seed in zip(folders.items(), (4, 4, 5), strict=True):
        torch.manual_seed(ord(name[1]))
        finish(settings_for(out=str(folder), seed=seed))
    one, two, three = (files_of(folder) for folder in folders.values())
    assert set(one) == {"config.json", "model.safetensors", "tokenizer.json"} and one == two
    assert one["model.safetensors"] != three["model.safetensors"] and one["tokenizer.json"] == three["tokenizer.json"]


def test_initial_weights_follow_the_seed(settings_for):
    one, two, three = (weights(parts(settings_for(seed=seed))[0].model) for seed in (4, 4, 5))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], three["lm_head.weight"])


def test_a_run_leaves_the_callers_random_state_alone(settings_for):
    before = torch.random.get_rng_state()
    finish(settings_for())
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("form", ["tensor-parallel", "delayed:2", "delayed:4", "delayed:2:early", "silent"])
def test_a_checkpoint_loads_with_the_schedule_it_was_trained_with(settings_for, form):
    settings = settings_for(schedule=form, steps=1)
    said = io.StringIO()
    folder = finish(settings, Console(file=said))
    model = Laneformer.from_pretrained(folder)
    assert model.schedule == Schedule.parse(form, model.config)
    assert "cannot express" not in said.getvalue()


@pytest.mark.parametrize("form", ["ladder", "delayed:3"])
def test_a_schedule_that_config_json_cannot_express_is_said(settings_for, form):
    said = io.StringIO()
    finish(settings_for(schedule=form, steps=1), Console(file=said))
    assert f"cannot express schedule {form}" in said.getvalue()


def test_the_configs_own_schedule_leaves_the_config_as_it_is():
    config = LaneConfig.preset("demo", use_mlp_comm=False)
    assert with_schedule(config, "checkpoint") == (config, Schedule.from_config(config))


def test_an_adopted_tokenizer_decides_the_vocabulary(settings_for, tmp_path):
    first = finish(settings_for(out=str(tmp_path / "a"), steps=1))
    adopted = settings_for(out=str(tmp_path / "b"), steps=1, tokenizer=str(first / "tokenizer.json"))
    del adopted.model["vocab_size"]
    config = Laneformer.from_pretrained(finish(adopted)).config
    assert (config.vocab_size, config.eos_ids) == (263, (0,))
    with pytest.raises(ValueError, match=r"model.vocab_size is 261, but .* has 263 tokens"):
        finish(settings_for(steps=1, tokenizer=adopted.tokenizer, model={"vocab_size": 261}))
