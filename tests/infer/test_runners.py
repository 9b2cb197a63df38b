"""The compiled runner agrees with the reference on every feature, compiles nothing while decoding, has a fallback.

Compiling costs seconds a shape: kernels are kept for the whole file, by the key that the runner itself uses.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from test_forward import DTYPES, FLOAT32, expected, reference, share_of_largest, some_tokens

from laneformer import Schedule
from laneformer.infer import compiled
from laneformer.infer.compiled import CompiledRunner
from laneformer.infer.engine import all_logits, generate
from laneformer.infer.exchange import LocalExchange
from laneformer.infer.reference import TOLERANCE
from laneformer.infer.request import Request
from laneformer.infer.runners import EagerRunner, make_runner
from laneformer.infer.weights import RankWeights

CAPACITY = 39
# All with the same sizes of a lane, so that they share kernels: a window on every layer, and head norms.
WINDOWED = {"sliding_window": 5, "swa_layers": (0, 1, 2), "head_norms": True}
SCALED = (("factor", 4.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0))
FEATURES = {
    "lane head": {"lm_head_type": "lane"},
    "vocabulary shared by lanes, uneven norms": {
        "lm_head_type": "vocab_parallel", "vocab_size": 104, "replicated_rmsn_scale": False
    },
    "sum before the norm, tied, vocabulary no multiple of the lanes": {
        "pre_norm_lane_agg": True, "tie_word_embeddings": True
    },
    "scaled rope": {"rope_theta": 500.0},
    "one lane's share of two": {"num_lanes": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                                "intermediate_size": 26},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def kernels_kept():
    """Compiles each function for the same shapes once in this file."""
    kept, compile_function = {}, compiled.compile_function

    def once(function, args):
        key = (function, *((a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in args))
        if key not in kept:
            kept[key] = compile_function(function, args)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "compile_function", once)
        yield


def runner_of(folder, capacity=CAPACITY, dtype="float32"):
    runner = make_runner("compiled", RankWeights.load(folder, dtype=DTYPES[dtype]), LocalExchange(), capacity)
    assert type(runner) is CompiledRunner
    return runner


def rope_scaled(folder, tmp_path):
    """The same weights under a config with Llama-3.1-style rope scaling."""
    keys = json.loads((folder / "config.json").read_text())
    keys["rope_scaling"] = {"rope_type": "llama3", "original_max_position_embeddings": 16, **dict(SCALED)}
    shutil.copytree(folder, tmp_path / "scaled")
    (tmp_path / "scaled" / "config.json").write_text(json.dumps(keys))
    return tmp_path / "scaled"


@pytest.mark.parametrize("feature", FEATURES)
def test_decoding_far_beyond_the_window_gives_the_reference_logits_with_every_feature(feature, checkpoint, tmp_path):
    folder = checkpoint(**WINDOWED, **FEATURES[feature])
    if feature == "scaled rope":
        plain = reference(folder, some_tokens(folder, 37))
        folder = rope_scaled(folder, tmp_path)
        assert share_of_largest(plain.float(), reference(folder, some_tokens(folder, 37))) > 1e-2
    tokens = some_tokens(folder, 37)
    runner = runner_of(folder)
    for schedule, prefill in (("delayed:3", 1), ("tensor-parallel", 12)):
        got = all_logits(runner, tokens, Schedule.parse(schedule, runner.config), prefill)
        assert share_of_largest(got, reference(folder, tokens, schedule)) < FLOAT32


@pytest.mark.parametrize("name", ["dtp-delay2-swa/checkpoint"])
def test_golden_logits_come_out_with_windows_on_some_layers_and_none_on_others(name):
    folder, schedule, tokens, logits = expected(name)
    runner = runner_of(folder, 48)
    plan = Schedule.parse(schedule, runner.config)
    for prefill in (1, 13, 47):
        assert share_of_largest(all_logits(runner, tokens, plan, prefill), logits) < FLOAT32


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "dtp-delay1/ladder", "dtp-delay1/silent", "dtp-delay1/delayed3", "lane-head/checkpoint", "standard-tp/checkpoint",
    "lane-norms-vocab-parallel/checkpoint", "dtp-delay2-early-comm/checkpoint", "attention-comm-off/checkpoint",
])  # fmt: skip
def test_every_golden_checkpoint_gives_its_logits_compiled(name):
    folder, schedule, tokens, logits = expected(name)
    runner = runner_of(folder, 48)
    got = all_logits(runner, tokens, Schedule.parse(schedule, runner.config), 5)
    assert share_of_largest(got, logits) < FLOAT32


@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def test_half_precision_stays_within_its_gate_and_near_the_eager_runner(dtype, checkpoint):
    folder = checkpoint(**WINDOWED, lm_head_type="lane")
    tokens = some_tokens(folder, 37)
    runner = runner_of(folder, dtype=dtype)
    plan = Schedule.parse("checkpoint", runner.config)
    got = all_logits(runner, tokens, plan, 4)
    assert FLOAT32 < share_of_largest(got, reference(folder, tokens)) < TOLERANCE[dtype]
    eager = EagerRunner(runner.forward.weights, LocalExchange(), CAPACITY)
    assert share_of_largest(got, all_logits(eager, tokens, plan, 4).double()) < TOLERANCE[dtype]


def test_nothing_is_compiled_once_a_runner_is_built(checkpoint, monkeypatch):
    from torch._dynamo.utils import counters

    folder = checkpoint(**WINDOWED, lm_head_type="lane")
    runner = runner_of(folder)
    before = {name: dict(counts) for name, counts in counters.items()}
    monkeypatch.setattr(compiled, "compile_function", lambda *args: pytest.fail("compiled while decoding"))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for schedule in ("delayed:3", "ladder", "tensor-parallel", "silent"):
            tokens = [t.id for t in generate(runner, Request((3, 1, 4), 30, schedule=schedule))]
            assert len(tokens) == 30
    assert {name: dict(counts) for name, counts in counters.items()} == before


def test_both_runners_decode_the_same_tokens(checkpoint):
    folder = checkpoint(**WINDOWED, lm_head_type="lane")
    runner = runner_of(folder)
    eager = EagerRunner(runner.forward.weights, LocalExchange(), CAPACITY)
    request = Request((3, 1, 4, 15), 35)
    assert [t.id for t in generate(runner, request)] == [t.id for t in generate(eager, request)]


def test_a_full_cache_is_refused_by_the_compiled_step_too(checkpoint):
    runner = runner_of(checkpoint(**WINDOWED, lm_head_type="lane"))
    runner.forward.cache.advance(CAPACITY)
    with pytest.raises(ValueError, match="the cache holds 39 positions; 39 are used and 1 more came"):
        runner.step(1, Schedule.parse("ladder", runner.config))


def test_a_runner_that_does_not_exist_is_refused_with_those_that_do(checkpoint):
    with pytest.raises(ValueError, match="no runner 'fast'; there are eager, compiled"):
        make_runner("fast", RankWeights.load(checkpoint()), LocalExchange(), 9)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 13])
def test_sums_over_row_blocks_are_the_matrix_vector_product_for_any_number_of_rows(rows):
    random = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(rows, 9, generator=random), torch.randn(9, generator=random)
    torch.testing.assert_close(compiled.matvec(x, weight), weight @ x)


WITHOUT_COMPILER = """
import sys, warnings, torch
from laneformer.infer.exchange import LocalExchange
from laneformer.infer.runners import make_runner
from laneformer.infer.weights import RankWeights
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", UserWarning)
    runner = make_runner("compiled", RankWeights.load(sys.argv[1]), LocalExchange(), 9)
ours = [str(w.message) for w in caught if "eager runner" in str(w.message)]
print(runner.name, len(ours), ours[0].count(chr(10)), ours[0])
"""


def test_without_a_compiler_the_eager_runner_decodes_and_says_so_once(checkpoint, tmp_path):
    environment = os.environ | {"CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT_COMPILER, str(checkpoint())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("eager 1 0 decoding with the eager runner, because nothing can be compiled here: ")
