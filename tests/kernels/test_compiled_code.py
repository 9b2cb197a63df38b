"""The inspectors of compiled code find what they look for, and its absence, in code for GPUs that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from laneformer.kernels import assembly
from laneformer.kernels.assembly import Listing, Overlap, read
from laneformer.kernels.compiled import Resources, grown, table_of

EXAMPLES = Path(__file__).with_name("compile_examples.py")
TARGETS = ("sm_90", "gfx942")


def outside(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs Python without TRITON_INTERPRET, or with what `extra` sets."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | extra
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, env=environment, check=False
    )


@pytest.fixture(scope="session")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """{target: {example: {texts, resources, counts}}}, compiled once by a process that does not interpret."""
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("code") / "examples.json"
    result = outside(str(EXAMPLES), str(out), *TARGETS)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(out.read_text(encoding="utf-8"))["compiled"]


def listing(code: dict[str, Any], target: str, name: str, language: str = "") -> Listing:
    """An example's final code, or the language asked for."""
    texts = code[target][name]["texts"]
    language = language or ("gcn" if "gcn" in texts else "sass")
    return read(texts[language], language)


def every(code: dict[str, Any], name: str) -> list[Listing]:
    """An example in PTX, SASS and GCN."""
    return [listing(code, "sm_90", name, "ptx"), listing(code, "sm_90", name), listing(code, "gfx942", name)]


def test_aligned_pointers_are_loaded_sixteen_bytes_at_a_time_and_others_are_not(code: dict[str, Any]) -> None:
    for good, bad in zip(every(code, "copy"), every(code, "copy, alignment unknown"), strict=True):
        assert assembly.wide_share(good) == 1.0
        assert assembly.wide_share(bad) == 0.0


def test_stores_and_signals_to_peers_have_system_scope(code: dict[str, Any]) -> None:
    for language, target in (("ptx", "sm_90"), ("gcn", "gfx942")):
        assert len(assembly.system_writes(listing(code, target, "post", language))) == 2
        assert assembly.narrow_atomics(listing(code, target, "post", language)) == ()
        narrow = listing(code, target, "post, gpu scope", language)
        assert assembly.system_writes(narrow) == ()
        assert len(assembly.narrow_atomics(narrow)) == 1


def test_a_release_without_a_block_barrier_is_found(code: dict[str, Any]) -> None:
    import triton

    planted = ("release, no barrier", "release, in a loop")
    for name in ("release", "post"):
        for good in every(code, name):
            assert good.find(assembly.RELEASE)
            assert assembly.bare_releases(good) == ()
    # From 3.9 on triton puts the barrier there itself.
    emits_none = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9)
    for name in planted:
        for bad in every(code, name):
            assert bool(assembly.bare_releases(bad)) == emits_none, name


def test_a_store_at_the_tail_of_a_loop_reaches_a_release_at_its_head() -> None:
    store, barrier, release = "st.global.b32 [ %rd1 ], 1;", "bar.sync 0;", "red.global.sys.release.add.u32 [ %rd2 ], 1;"

    def found(*lines: str) -> int:
        return len(assembly.bare_releases(read("\n".join(lines), "ptx")))

    loop, back = "$L__BB0_1:", "@%p1 bra $L__BB0_1;"
    assert found(loop, store, barrier, release, back) == 0
    assert found(loop, store, release, back) == 2
    assert found(barrier, loop, release, store, back) == 1
    assert found(barrier, loop, release, store, barrier, back) == 0
    assert found(store, barrier, loop, release, back) == 0


def test_stores_of_other_waves_that_nobody_waits_for_are_found_on_amd(code: dict[str, Any]) -> None:
    assert len(assembly.undrained_releases(listing(code, "gfx942", "release"))) == 1
    assert assembly.undrained_releases(listing(code, "gfx942", "release, drained")) == ()
    assert assembly.bare_releases(listing(code, "gfx942", "release, drained")) == ()
    assert assembly.undrained_releases(listing(code, "sm_90", "release")) == ()


@pytest.mark.parametrize(
    "name", ["block poll", "block poll, one warp", "block poll by adds", "word poll", "counter poll"]
)
def test_a_right_poll_survives_in_a_loop_of_the_final_code(code: dict[str, Any], name: str) -> None:
    for kept in every(code, name):
        assert len(assembly.spins(kept)) == 1
        assert len(assembly.polls_in_loops(kept)) >= 1


def test_a_poll_by_plain_loads_is_lost(code: dict[str, Any]) -> None:
    for lost in every(code, "word poll, plain"):
        assert assembly.spins(lost) == ()
        assert assembly.polls_in_loops(lost) == ()


def test_volatile_alone_is_enough_on_nvidia_only(code: dict[str, Any]) -> None:
    for name in ("block poll, volatile only", "word poll, volatile only"):
        assert len(assembly.spins(listing(code, "sm_90", name))) == 1
    # Buffer loads read through caches that nothing empties.
    cached = listing(code, "gfx942", "block poll, volatile only")
    assert assembly.spins(cached) == ()
    found = [line for line in assembly.stale_polls(cached, EXAMPLES) if "buffer_load_dword" in line]
    assert len(found) == 2
    # Without a block barrier in the loop nothing keeps the load there.
    assert assembly.spins(listing(code, "gfx942", "block poll, one warp, buffer ops")) == ()


def test_a_good_poll_is_not_called_stale(code: dict[str, Any]) -> None:
    sites = assembly.poll_sites(EXAMPLES)
    for good in every(code, "block poll"):
        own = {line for _, line in good.sources} & set(sites)
        assert len(own) == 2
        named = {int(line.split(":")[1]) for line in assembly.stale_polls(good, EXAMPLES)}
        # The other kernels of the file have no instruction here.
        assert named == set(sites) - own


def test_polls_that_a_wait_needs_are_counted_loop_by_loop(code: dict[str, Any]) -> None:
    for good, bad in zip(
        every(code, "two waits in a loop"), every(code, "two waits in a loop, one plain"), strict=True
    ):
        assert len(assembly.spins(good)) == 2
        # The loop over layers goes round too, but a load in it is not a wait.
        assert len(assembly.spins(bad)) == 1


def test_weights_asked_for_before_a_wait_stay_before_it(code: dict[str, Any]) -> None:
    for name in ("weights, wait", "weights, mailbox"):
        assert assembly.overlaps(listing(code, "sm_90", name)) == (Overlap(ahead=2, late=0, hurried=0),)
        assert assembly.overlaps(listing(code, "gfx942", name))[0].ahead == 1
        assert assembly.overlaps(listing(code, "gfx942", name))[0].hurried == 0


def test_weights_asked_for_late_or_used_early_are_found(code: dict[str, Any]) -> None:
    assert assembly.overlaps(listing(code, "sm_90", "weights late")) == (Overlap(ahead=0, late=2, hurried=0),)
    assert assembly.overlaps(listing(code, "sm_90", "weights used before")) == (Overlap(ahead=0, late=0, hurried=2),)
    assert assembly.overlaps(listing(code, "gfx942", "weights late"))[0].ahead == 0
    early = assembly.overlaps(listing(code, "gfx942", "weights used before"))[0]
    assert (early.ahead, early.hurried) == (0, 1)


def test_spills_and_registers_are_read_off(code: dict[str, Any]) -> None:
    for target in TARGETS:
        small = Resources(**code[target]["counter poll"]["resources"])
        hungry = Resources(**code[target]["hungry"]["resources"])
        assert small.spills == small.stack == 0
        assert 1 <= small.registers < 32
        # Triton 3.9 counts fewer of the spills on AMD.
        assert hungry.spills > 0 and hungry.stack > 64, target
        assert hungry.code > 10 * small.code
    assert code["sm_90"]["weights, wait"]["resources"]["shared"] == 1024


def test_instructions_are_counted_by_name(code: dict[str, Any]) -> None:
    assert code["sm_90"]["weights, wait"]["counts"]["LDG"] == 4
    assert code["gfx942"]["release"]["counts"]["s_barrier"] >= 1


def test_growth_is_named_and_small_changes_are_not() -> None:
    before = Resources(registers=100, spills=0, shared=1024, stack=0, code=10_000)
    kept = table_of({"decode": {"sm_90": before}})
    same = Resources(registers=104, spills=0, shared=1024, stack=0, code=10_900)
    assert grown({"decode": {"sm_90": same}}, kept) == []
    worse = Resources(registers=106, spills=4, shared=1024, stack=0, code=12_000)
    assert grown({"decode": {"sm_90": worse}}, kept) == [
        "decode on sm_90: registers 100 -> 106",
        "decode on sm_90: spills 0 -> 4",
        "decode on sm_90: code 10000 -> 12000",
    ]
    assert grown({"decode": {"gfx942": same}}, kept) == ["decode on gfx942: not in the table"]


def test_an_unknown_language_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'x86'; expected one of ptx, sass, gcn"):
        read("nop", "x86")


BAD_REQUESTS = """
import triton
from laneformer.kernels.compiled import CompileError, compile_kernel
@triton.jit
def nothing(p_in, N: triton.language.constexpr):
    return
for signature, target in (({"p_in": "*fp32"}, "sm_1"), ({"p_im": "*fp32"}, "sm_90"), ({"p_in": "*fp32"}, "sm_90")):
    try:
        compile_kernel(nothing, signature, {"N": 1}, target)
    except CompileError as error:
        print(error)
"""


def test_requests_that_cannot_be_met_are_explained(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "requests.py"
    file.write_text(BAD_REQUESTS, encoding="utf-8")
    said = outside(str(file), TRITON_INTERPRET="1").stdout.splitlines()
    assert "no target named 'sm_1'; known: sm_80, sm_90" in said[0]
    assert "TRITON_INTERPRET is set" in said[1]
    said = outside(str(file)).stdout.splitlines()
    assert said[1] == "arguments of nothing: missing ['p_in'], unknown ['p_im']"
    assert len(said) == 2


@pytest.mark.slow
def test_no_kernel_takes_more_than_the_table_says(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run = Path(__file__).parents[2] / "experiments" / "005_compiled_code" / "run.py"
    result = outside(str(run), "--check")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.6.0", "3.9.0"])
def test_the_examples_compile_alike_with_other_versions_of_triton(version: str, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "experiments" / "005_compiled_code" / "other_versions.py"
    result = outside(str(script), str(tmp_path), version)
    if result.returncode == 3:
        pytest.skip(f"triton {version} cannot be installed here")
    assert result.returncode == 0, result.stdout + result.stderr
