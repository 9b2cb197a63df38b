"""What training costs: FLOPs against PyTorch's counter, memory against the tensors autograd really saves, traffic."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from laneformer import LaneConfig, Laneformer
from laneformer.cost import count_parameters, parse_machine, training_flops
from laneformer.schedule import Schedule
from laneformer.training_cost import Layout, rank_parameters, saved_bytes, streams_held, training_memory
from laneformer.training_traffic import (
    backward_wait,
    forward_wait,
    lane_exchange,
    module_flops,
    ring_s,
    weight_traffic,
)

SIZES = {"hidden_size": 45, "num_hidden_layers": 3, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 6,
         "intermediate_size": 39, "vocab_size": 53, "num_lanes": 3, "max_position_embeddings": 64}  # fmt: skip
BATCH, SEQUENCE = 2, 37


def config_of(**changes) -> LaneConfig:
    """A small model of odd sizes and three lanes."""
    return LaneConfig(**{**SIZES, **changes})


def layout_of(**changes) -> Layout:
    """One device, one micro-batch."""
    values = {"devices": 1, "lane_ranks": 1, "shard": "ddp", "batch": BATCH, "micro_batch": BATCH,
              "sequence": SEQUENCE, "precision": "float32", "document_mask": False}  # fmt: skip
    return Layout(**{**values, **changes})


def kept_by_autograd(config: LaneConfig, schedule: str, precision: str, recompute: bool, documents: bool) -> int:
    """Bytes of all storages that autograd saves for one micro-batch, weights and their copies left out."""
    torch.manual_seed(0)
    model = Laneformer(config, schedule=schedule).train()
    model.recompute = recompute
    if precision == "bfloat16-weights":
        model = model.bfloat16()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    heads = (config.num_attention_heads * config.head_size, config.kv_heads * config.head_size)
    side_by_side = {frozenset((1, config.hidden_size, n)) for n in (*heads, config.intermediate_size)}
    shapes = {frozenset(p.shape) for p in model.parameters()} | side_by_side
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        # Copies of weights are counted as weights: they are of their shapes, or those transposed or side by side.
        if storage.data_ptr() not in weights and frozenset(tensor.shape) not in shapes:
            saved[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(config.vocab_size, (BATCH, SEQUENCE + 1))
    numbers = (torch.arange(SEQUENCE) // 11).expand(BATCH, SEQUENCE) if documents else None
    low = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), low:
        logits = model(tokens[:, :-1], documents_BS=numbers)
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-weights"])
@pytest.mark.parametrize("schedule", ["delayed:4", "delayed:1", "tensor-parallel", "ladder"])
def test_activation_memory_is_what_autograd_saves(precision, schedule):
    config = config_of()
    measured = kept_by_autograd(config, schedule, precision, recompute=False, documents=False)
    plan = saved_bytes(config, Schedule.parse(schedule, config), layout_of(precision=precision))
    assert plan.total == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_recomputed_activation_memory_is_what_autograd_saves(precision):
    config = config_of()
    measured = kept_by_autograd(config, "delayed:2", precision, recompute=True, documents=False)
    layout = layout_of(precision=precision, recompute=True)
    plan = saved_bytes(config, Schedule.delayed(3, 2), layout)
    assert plan.total == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(("window", "documents"), [(5, False), (None, True), (5, True)])
def test_masks_are_counted_as_the_attention_takes_them(window, documents):
    config = config_of(sliding_window=window, swa_layers=(0, 2) if window else ())
    measured = kept_by_autograd(config, "delayed:2", "float32", recompute=False, documents=documents)
    plan = saved_bytes(config, Schedule.delayed(3, 2), layout_of(document_mask=documents))
    assert plan.masks > 0.01 * plan.total
    assert plan.total == pytest.approx(measured, rel=0.01)


def test_training_flops_are_what_the_flop_counter_counts_forward_and_backward():
    # No window and a causal mask: the counter takes the whole square, the formula what is seen, so they meet without.
    config = config_of()
    model = Laneformer(config, schedule="delayed:2", device="meta")
    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    whole_square = 3 * 4 * config.num_attention_heads * config.head_size * SEQUENCE * config.num_hidden_layers
    formula = training_flops(config, SEQUENCE, with_attention=False) + whole_square
    assert counter.get_total_flops() / (BATCH * SEQUENCE) == pytest.approx(formula, rel=0.03)


@pytest.mark.parametrize("changes", [{}, {"swa_layers": (1,), "sliding_window": 7}])
def test_modules_flops_add_up_to_the_training_flops(changes):
    config = config_of(**changes)
    head = 2 * config.vocab_size * config.hidden_size
    forward = config.num_hidden_layers * sum(module_flops(config, SEQUENCE)) + head
    assert 3 * forward == pytest.approx(training_flops(config, SEQUENCE))


@pytest.mark.parametrize("lane_ranks", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [{}, {"replicated_rmsn_scale": False}, {"lm_head_type": "lane"}, {"head_norms": True},
     {"tie_word_embeddings": True},
     {"lm_head_type": "vocab_parallel", "vocab_size": 51, "replicated_rmsn_scale": False},
     {"replicated_rmsn_scale": False, "pre_norm_lane_agg": True, "head_norms": True}],
)  # fmt: skip
def test_a_ranks_parameters_are_those_of_its_model(lane_ranks, changes):
    config = config_of(**changes)
    built = Laneformer(config, lanes=range(3 // lane_ranks), device="meta")
    assert rank_parameters(config, lane_ranks).total == sum(p.numel() for p in built.parameters())


def test_memory_of_weights_gradients_and_optimizer_by_precision_optimizer_and_shard():
    config, schedule = config_of(), Schedule.delayed(3, 2)
    total = count_parameters(config).total
    modules = count_parameters(config).attention + count_parameters(config).feed_forward
    plain = training_memory(config, schedule, layout_of())
    assert (plain.weights, plain.gradients, plain.optimizer, plain.compute_copy) == (4 * total, 4 * total, 8 * total, 0)
    assert training_memory(config, schedule, layout_of(precision="bfloat16")).compute_copy == 2 * total
    muon = training_memory(config, schedule, layout_of(optimizer="muon"))
    assert plain.optimizer - muon.optimizer == 4 * modules
    cut = training_memory(config, schedule, layout_of(devices=2, shard="fsdp", batch=2 * BATCH))
    assert (cut.weights, cut.gradients, cut.optimizer) == (2 * total, 2 * total, 4 * total)
    twice = training_memory(config, schedule, layout_of(devices=2, shard="fsdp", batch=4 * BATCH))
    assert twice.gradients == 6 * total, "gradients stay whole until the last micro-batch"
    assert plain.total == pytest.approx(sum(vars(plain).values()))


def test_memory_of_logits_messages_and_the_module_at_work():
    config, schedule, tokens = config_of(), Schedule.delayed(3, 2), BATCH * SEQUENCE
    plain = training_memory(config, schedule, layout_of())
    assert plain.logits == tokens * 53 * 8
    assert training_memory(config, schedule, layout_of(z_loss=True)).logits == tokens * 53 * 16
    assert training_memory(config, schedule, layout_of(z_loss=True, precision="bfloat16")).logits == tokens * 53 * 18
    # Two partials are under way when a third is sent; between ranks each is received into a float32 sum.
    assert plain.messages == 3 * tokens * 3 * 45 * 4
    apart = layout_of(devices=3, lane_ranks=3, precision="bfloat16")
    assert training_memory(config, schedule, apart).messages == 3 * tokens * 45 * (2 + 4)
    anew = training_memory(config, schedule, layout_of(recompute=True))
    assert anew.working == 2 * plain.working and anew.activations < plain.activations / 2


def test_the_real_optimizers_keep_the_state_that_is_counted():
    from laneformer.train.optim import optimizers
    from laneformer.train.settings import OptimSettings

    config, schedule = config_of(), Schedule.delayed(3, 2)
    for name in ("adamw", "muon"):
        model = Laneformer(config)
        model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
        kept = 0
        for optimizer in optimizers(model, OptimSettings(name=name)):
            optimizer.step()
            states = itertools.chain.from_iterable(state.values() for state in optimizer.state.values())
            kept += sum(t.nbytes for t in states if torch.is_tensor(t) and t.numel() > 1)
        assert training_memory(config, schedule, layout_of(optimizer=name)).optimizer == kept


def test_equal_streams_in_one_place_are_one_stream():
    config = config_of()
    assert streams_held(config, Schedule.tensor_parallel(3), 1) == 1
    assert streams_held(config, Schedule.delayed(3, 2), 1) == 3
    assert streams_held(config, Schedule.tensor_parallel(3), 3) == 1


def test_a_layout_that_does_not_come_out_even_says_what_would():
    with pytest.raises(ValueError, match=r"8 sequences does not divide.*nearest that does is 9"):
        layout_of(devices=3, batch=8, micro_batch=1)
    with pytest.raises(ValueError, match="does not divide 4 devices"):
        layout_of(devices=4, lane_ranks=3)
    with pytest.raises(ValueError, match="shard is 'zero', expected one of ddp, fsdp"):
        layout_of(shard="zero")


def test_blocking_waits_for_every_message_and_a_delay_hides_what_fits_into_its_modules():
    blocking, delayed = Schedule.tensor_parallel(5), Schedule.delayed(5, 3)
    seconds = [1.0, 2.0]
    assert forward_wait(blocking, seconds, 0.25) == pytest.approx(10 * 0.25)
    assert backward_wait(blocking, seconds, 0.25) == pytest.approx(10 * 0.25)
    # Three modules take at least 4 s, and the link carries one message every 1.5 s on average.
    assert forward_wait(delayed, seconds, 1.4) == backward_wait(delayed, seconds, 1.4) == 0
    # Seven messages of 7 s follow each other on the link; 15 s of computing go on meanwhile but for the first or last.
    assert forward_wait(delayed, seconds, 7.0) == pytest.approx(1 + 7 * 7 - 15)
    assert backward_wait(delayed, seconds, 7.0) == pytest.approx(7 * 7 + 1 - 15)
    assert forward_wait(Schedule.silent(5), seconds, 9.0) == backward_wait(Schedule.silent(5), seconds, 9.0) == 0


def test_a_ladder_has_one_module_to_hide_a_message_in():
    ladder = Schedule.ladder(4)
    # The last module's own message has nothing to hide behind.
    assert forward_wait(ladder, [1.0, 1.0], 1.0) == pytest.approx(1.0)
    assert forward_wait(ladder, [1.0, 1.0], 1.5) == pytest.approx(7 * 0.5 + 1.5)


def test_an_early_landing_waits_for_the_first_of_both_gradients():
    early = Schedule.delayed(3, 2, early=True)
    assert backward_wait(early, [1.0, 1.0], 0.5) == pytest.approx(2 * 0.5)


def test_one_device_sends_nothing_and_eight_send_what_the_schedule_says():
    config = LaneConfig.preset("2b")
    machine, schedule = parse_machine("192xh100"), Schedule.delayed(15, 4)
    alone = Layout(192, 1, "ddp", 192, 1, 4096)
    assert lane_exchange(config, schedule, alone, machine, 1e14).bytes == 0
    shared = Layout(192, 8, "ddp", 192, 8, 4096)
    exchange = lane_exchange(config, schedule, shared, machine, 4e14)
    # 26 partials each way, and two at the ends; a ring moves 7/4 of 8 x 4096 x 3072 float32 numbers.
    assert exchange.messages == 2 * 26 + 2
    assert exchange.message_bytes == pytest.approx(1.75 * 4 * 8 * 4096 * 3072)
    assert exchange.message_s == pytest.approx(exchange.message_bytes / 450e9 + 2.3e-6)
    tokens = 8 * 4096 / 8
    assert exchange.forward_compute_s == pytest.approx(tokens * 15 * sum(module_flops(config, 4096)) / 4e14)
    anew = lane_exchange(config, schedule, Layout(192, 8, "ddp", 192, 8, 4096, recompute=True), machine, 4e14)
    assert exchange.backward_compute_s == pytest.approx(2 * exchange.forward_compute_s)
    assert anew.backward_compute_s == pytest.approx(3 * exchange.forward_compute_s)
    blocking = lane_exchange(config, Schedule.tensor_parallel(15), shared, machine, 4e14)
    assert blocking.wait_s == pytest.approx(blocking.link_s) and blocking.hidden == pytest.approx(0)


def test_gradients_cross_the_network_once_a_step():
    config, machine = LaneConfig.preset("2b"), parse_machine("192xh100")
    shared = weight_traffic(config, Layout(192, 8, "ddp", 384, 8, 4096), machine, backward_s=0.0)
    nbytes = 4 * rank_parameters(config, 8).total
    # A node holds one member of the ring, which has its own 50 GB/s; without lanes over devices it holds eight.
    assert shared.gradient_s == pytest.approx(2 * 23 / 24 * nbytes / 50e9 + 10e-6)
    assert shared.exposed_s == pytest.approx(shared.gradient_s + shared.shared_s)
    alone = weight_traffic(config, Layout(192, 1, "ddp", 192, 1, 4096), machine, backward_s=60.0)
    assert alone.gradient_s == pytest.approx(2 * 191 / 192 * 4 * 2_320_069_632 / 400e9 + 10e-6)
    assert alone.exposed_s == 0
    gathered = weight_traffic(config, Layout(192, 1, "fsdp", 384, 1, 4096), machine, backward_s=60.0)
    assert gathered.gradient_bytes == pytest.approx(191 / 192 * 4 * 2_320_069_632)
    parts = count_parameters(config)
    twice = 2 * (parts.attention + parts.feed_forward) + parts.embedding + parts.head + parts.norms
    assert gathered.gather_bytes == pytest.approx(191 / 192 * 2 * 2 * twice)


def test_links_that_are_not_known_are_refused():
    machine = parse_machine("2xthis", measured_bandwidth=1e10)
    with pytest.raises(ValueError, match="links of this machine are not known"):
        machine.group_bandwidth(2, 1)
    assert parse_machine("16xh100").group_bandwidth(8, 1) == 450e9
    assert ring_s(8.0, 1, 1.0, 5.0) == 0 and ring_s(8.0, 4, 2.0, 0.0) == pytest.approx(6.0)
