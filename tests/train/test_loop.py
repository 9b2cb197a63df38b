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
from laneformer.train.loop import StepResult, TrainingError
from laneformer.train.loss import IGNORED, sums
from laneformer.train.parallel import Layout
from laneformer.train.prepare import prepare, with_schedule
from laneformer.train.record import Meter, device_peak, line_of


def never() -> bool:
    return False


def quiet():
    return Console(file=io.StringIO())


def job_of(settings):
    return prepare(settings, quiet(), Layout())


def trainer_of(settings):
    return job_of(settings).trainer


def finish(settings, messages=None) -> Path:
    """A whole run; the checkpoint's folder."""
    return prepare(settings, messages or quiet(), Layout()).run(never)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def logged(settings):
    return [json.loads(line) for line in (Path(settings.out) / "log.jsonl").read_text().splitlines()]


def test_loss_falls_far_on_a_text_that_repeats_itself(settings_for):
    settings = settings_for(steps=60, data={"batch": 8}, optim={"lr": 2e-2}, log={"every": 1})
    job = job_of(settings)
    before = job.trainer.bits_per_byte(job.valid, never)["corpus"]
    job.run(never)
    losses = [line["loss"] for line in logged(settings)]
    assert losses[0] == pytest.approx(math.log(264), abs=0.3)
    assert sum(losses[-5:]) / 5 < 0.25 * losses[0]
    after = job.trainer.bits_per_byte(job.valid, never)["corpus"]
    assert after < 0.25 * before and after == logged(settings)[-1]["valid_bits_per_byte"]["corpus"]


def test_zero_outputs_leave_the_streams_as_the_embedding_and_still_learn(settings_for):
    plain, silent = (trainer_of(settings_for(zero_outputs=zero)) for zero in (False, True))
    batch = silent.loader.batch(0, 2)
    module = silent.model
    stream_BSD = module.model.norm(module.model.tok_embeddings.weight[batch.inputs_BS])
    torch.testing.assert_close(module(batch.inputs_BS), stream_BSD @ module.lm_head.weight.T)
    before = weights(module)
    zeros = {name for name, weight in before.items() if not weight.any()}
    assert zeros == {name for name in before if name.endswith((".wo.weight", ".w2.weight"))} and len(zeros) == 4
    same = {name for name, weight in weights(plain.model).items() if torch.equal(weight, before[name])}
    assert same == before.keys() - zeros, "the other weights are drawn as ever"
    for _ in range(2):
        silent.step()
    moved = {name for name, weight in weights(module).items() if not torch.equal(weight, before[name])}
    assert moved == before.keys()


def by_hand(model, batch, z_loss):
    """The cross-entropy and the loss of a batch, document by document, from log-probabilities of single rows."""
    nats = squares = 0.0
    for inputs, targets, documents in zip(batch.inputs_BS, batch.targets_BS, batch.documents_BS, strict=True):
        for document in documents.unique():
            mine = documents == document
            logits = model(inputs[mine][None])[0]
            for row, target in zip(logits, targets[mine], strict=True):
                if target != IGNORED:
                    normaliser = row.logsumexp(0)
                    nats = nats + normaliser - row[target]
                    squares = squares + normaliser**2
    return nats, nats + z_loss * squares


def test_a_step_is_the_clipped_gradient_of_the_token_mean_and_one_adamw_update(settings_for):
    optim = {"lr": 0.01, "warmup": 0.0, "clip": 0.05, "weight_decay": 0.2, "eps": 1e-3, "z_loss": 0.02}
    trainer = trainer_of(settings_for(optim=optim, data={"batch": 4, "micro_batch": 2}))
    twin = Laneformer(trainer.model.config, trainer.model.schedule).double()
    twin.load_state_dict(trainer.model.state_dict())
    batch = trainer.loader.batch(0, 4)
    count = int((batch.targets_BS != IGNORED).sum())
    nats, loss = by_hand(twin, batch, 0.02)
    (loss / count).backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in twin.parameters()))
    result = trainer.step()
    assert norm > 0.05, "the clip has nothing to do"
    assert result.targets == count and result.loss == pytest.approx(nats.item() / count, rel=1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-4)
    for (name, got), p in zip(trainer.model.named_parameters(), twin.parameters(), strict=True):
        gradient = p.grad * 0.05 / (norm + 1e-6)
        decay = 0.0 if "norm" in name or "tok_embeddings" in name else 0.2
        # At the first step the corrected mean is the gradient and the corrected square its square.
        expected = p * (1 - result.lr * decay) - result.lr * gradient / (gradient.abs() + 1e-3)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-6, msg=name)


def test_the_loss_leaves_out_what_is_not_learnt():
    logits, targets = torch.randn(2, 5, 7), torch.tensor([[1, IGNORED, 3, 0, IGNORED], [6, 2, IGNORED, 5, 5]])
    loss, nats = sums(logits, targets, 0.5)
    learnt = targets != IGNORED
    rows = logits[learnt]
    expected = -rows.log_softmax(-1).gather(1, targets[learnt][:, None]).sum()
    torch.testing.assert_close(nats, expected)
    torch.testing.assert_close(loss, expected + 0.5 * rows.logsumexp(-1).square().sum())


def test_bits_per_byte_are_the_bits_of_the_held_out_rows_over_their_bytes(settings_for):
    job = job_of(settings_for(data={"valid_bytes": 1500, "batch": 4, "micro_batch": 2}))
    rows = job.valid["corpus"]
    bits = 0.0
    for inputs, targets, documents in zip(rows.inputs_NS, rows.targets_NS, rows.documents_NS, strict=True):
        logs = job.trainer.model(inputs[None], documents_BS=documents[None])[0].double().log_softmax(-1)
        bits -= sum(logs[s, t].item() for s, t in enumerate(targets) if t != IGNORED) / math.log(2)
    assert len(rows.inputs_NS) % 2 == 1, "the last rows are to be fewer than a batch"
    assert job.trainer.bits_per_byte(job.valid, never)["corpus"] == pytest.approx(bits / rows.num_bytes, rel=1e-6)
    assert job.trainer.model.training
    assert job.trainer.bits_per_byte(job.valid, lambda: True) is None


class Bursts(nn.Module):
    """A loss that is infinite at chosen calls."""

    def __init__(self, module, bad):
        super().__init__()
        self.module, self.bad, self.calls = module, bad, 0

    def forward(self, *inputs):
        self.calls += 1
        loss, nats = self.module(*inputs)
        factor = math.inf if self.calls in self.bad else 1.0
        return loss * factor, nats * factor


def with_bursts(settings, bad):
    job = job_of(settings)
    job.trainer.module = Bursts(job.trainer.module, bad)
    return job


def test_a_step_that_is_not_finite_changes_no_weight_and_is_counted(settings_for):
    trainer = with_bursts(settings_for(), {2}).trainer
    trainer.step()
    before, moments = weights(trainer.model), trainer.optimizers[0].state_dict()["state"][0]["exp_avg"].clone()
    result = trainer.step()
    after = weights(trainer.model)
    assert result.skipped and not math.isfinite(result.loss) and trainer.skipped == 1
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(moments, trainer.optimizers[0].state_dict()["state"][0]["exp_avg"])
    assert not trainer.step().skipped and trainer.finished == 3
    assert any(not torch.equal(before[name], p) for name, p in weights(trainer.model).items())


def test_too_many_such_steps_in_a_row_end_the_run_and_name_the_last_checkpoint(settings_for):
    settings = settings_for(steps=30, checkpoint={"every": 4}, log={"every": 1}, optim={"most_skipped": 5})
    job = with_bursts(settings, {*range(2, 6), *range(12, 17)})
    with pytest.raises(
        TrainingError, match=r"5 steps in a row, up to step 16; lower optim.lr \(now 0.003\).*step-000000"
    ):
        job.run(never)
    assert [line["step"] for line in logged(settings)] == list(range(1, 16)) and job.trainer.skipped == 9


def test_a_log_line_is_valid_json_even_when_the_loss_is_not_finite():
    result = StepResult(7, math.nan, 1e-3, math.inf, 99, True, False)
    line = line_of(result, 2, {"tokens_per_s": 1234.6}, None)
    assert json.loads(json.dumps(line, allow_nan=False)) == {
        "step": 7, "loss": None, "lr": 1e-3, "grad_norm": None, "targets": 99, "skipped": 2, "tokens_per_s": 1234.6,
    }  # fmt: skip


def test_mfu_is_the_models_arithmetic_over_the_peak(settings_for, monkeypatch):
    settings = settings_for(steps=10, log={"peak_flops": 1e9})
    config = LaneConfig(**settings.model)
    meter = Meter(settings, config, ranks=2)
    clock = iter([0.0, 2.0])
    monkeypatch.setattr("laneformer.train.record.time.perf_counter", lambda: next(clock))
    meter.start()
    meter.stop()
    line = meter.take(finished=4)
    tokens = settings.data.batch * 19
    assert line["tokens_per_s"] == tokens / 2 and line["eta_s"] == 6 * 2.0
    assert line["mfu"] == pytest.approx(tokens / 2 * meter.flops / 2e9, abs=1e-4) and line["memory_bytes"] > 1e7
    assert device_peak("cpu") is None


def test_lines_are_written_at_their_steps_and_validation_at_its_own(settings_for):
    settings = settings_for(steps=7, log={"every": 2, "valid_every": 3})
    finish(settings)
    lines = logged(settings)
    assert [line["step"] for line in lines] == [2, 3, 4, 6, 7]
    assert [line["step"] for line in lines if "valid_bits_per_byte" in line] == [3, 6, 7]


def test_a_request_to_stop_ends_after_the_current_step_without_validation(settings_for):
    settings = settings_for(steps=50)
    job = job_of(settings)
    job.run(lambda: job.trainer.finished >= 3)
    (line,) = logged(settings)
    assert line["step"] == 4 and "valid_bits_per_byte" not in line
    assert not (Path(settings.out) / "result.json").exists()


def test_bfloat16_computes_narrow_and_keeps_wide_weights(settings_for, tmp_path):
    wide = trainer_of(settings_for())
    narrow = trainer_of(settings_for(precision="bfloat16", out=str(tmp_path / "narrow")))
    with narrow.autocast():
        assert narrow.model(torch.tensor([[3, 4, 5]])).dtype == torch.bfloat16
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
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(one) and one == two
    assert one["model.safetensors"] != three["model.safetensors"] and one["tokenizer.json"] == three["tokenizer.json"]


def test_a_run_leaves_the_callers_random_state_alone(settings_for):
    before = torch.random.get_rng_state()
    finish(settings_for())
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("form", ["tensor-parallel", "delayed:2", "delayed:4", "delayed:2:early", "silent"])
def test_a_checkpoint_loads_with_the_schedule_it_was_trained_with(settings_for, form):
    said = io.StringIO()
    folder = finish(settings_for(schedule=form, steps=1), Console(file=said))
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
    assert (config.vocab_size, config.eos_ids, config.pad_token_id) == (264, (0,), 1)
    small = settings_for(out=str(tmp_path / "c"), tokenizer=adopted.tokenizer, model={"vocab_size": 261})
    with pytest.raises(ValueError, match=r"model.vocab_size is 261, but the data's tokenizer has 264 tokens"):
        trainer_of(small)


def test_a_run_starts_from_anothers_weights_and_tokenizer(settings_for, tmp_path):
    first = finish(settings_for(out=str(tmp_path / "a"), steps=3))
    second = trainer_of(settings_for(out=str(tmp_path / "b"), init_from=str(first)))
    model = Laneformer.from_pretrained(first)
    assert all(torch.equal(p, dict(model.named_parameters())[name]) for name, p in second.model.named_parameters())
    assert second.finished == 0 and not second.optimizers[0].state
    with pytest.raises(ValueError, match=r"has another .*w1.* than model"):
        trainer_of(settings_for(out=str(tmp_path / "c"), init_from=str(first), model={"intermediate_size": 24}))


def test_compiling_changes_the_loss_by_rounding_only(settings_for, tmp_path):
    plain = [trainer_of(settings_for()).step().loss]
    fused = trainer_of(settings_for(compile=True, out=str(tmp_path / "fused")))
    assert [fused.step().loss] == pytest.approx(plain, rel=1e-5)
    assert not any("_orig_mod" in name for name, _ in fused.model.named_parameters())
