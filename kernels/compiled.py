"""What does a kernel compile to for a GPU that is not here? Text, registers, spills, shared memory, code size.

    compiled = compile_kernel(kernel, {"p_x": "*fp16", "n": "i32"}, {"BLOCK": 128}, "sm_90")
    compiled.registers, compiled.spills, compiled.listing("sass")

Needs triton and the assembler tools in its wheel, but no driver. Works with triton 3.6 to 3.9.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from laneformer.kernels.assembly import Listing, read

# Name -> (backend, architecture, threads of a warp).
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx90a": ("hip", "gfx90a", 64),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
# What may grow from one commit to the next before a test says so: a share of the number, and a floor.
TOLERANCE = {"registers": (0.05, 4), "spills": (0.0, 0), "shared": (0.0, 0), "stack": (0.0, 0), "code": (0.10, 512)}


class CompileError(ValueError):
    """A kernel cannot be compiled as asked; the text says why and what to do."""


@dataclass(frozen=True)
class Resources:
    """What one program takes: registers a thread, spills and stack in bytes a thread, shared memory and code in bytes.

    spills: bytes of spill stores and loads in the code, those at the calls of functions included.
    """

    registers: int
    spills: int
    shared: int
    stack: int
    code: int


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for one target: its texts by language ("ttgir", "llir", "ptx", "sass", "gcn") and resources."""

    name: str
    target: str
    texts: Mapping[str, str]
    resources: Resources

    def listing(self, language: str = "") -> Listing:
        """The instructions; by default of the final code, SASS or GCN."""
        return read(self.texts[language or self.final], language or self.final)

    @property
    def final(self) -> str:
        """The language nearest to what the GPU runs."""
        return "gcn" if "gcn" in self.texts else "sass"

    @property
    def counts(self) -> dict[str, int]:
        """How many instructions of each kind the final code holds, by the first word of their names."""
        found: dict[str, int] = {}
        listing = self.listing()
        for line in listing.lines:
            word = re.split(r"[.\s]", listing.bare(line))[0]
            found[word] = found.get(word, 0) + 1
        return found


@dataclass(frozen=True)
class Entry:
    """A kernel and how to compile it: types of its arguments, constexprs, and the compiler's options.

    aligned: names of the arguments known to be multiples of 16 (bytes for pointers); by default every pointer.
    buffer_ops: whether AMD's buffer instructions may be used; they lose `volatile`, so kernels that poll set False.
    """

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    aligned: tuple[str, ...] | None = None
    warps: int = 4
    stages: int = 1
    buffer_ops: bool = True

    def compile(self, target: str, cache: Path | None = None) -> Compiled:
        """Compiles for a target named in TARGETS."""
        return compile_kernel(
            self.kernel, self.signature, self.constexprs, target, num_warps=self.warps, num_stages=self.stages,
            aligned=self.aligned, buffer_ops=self.buffer_ops, cache=cache,
        )  # fmt: skip


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    target: str,
    *,
    num_warps: int = 4,
    num_stages: int = 1,
    aligned: tuple[str, ...] | None = None,
    buffer_ops: bool = True,
    cache: Path | None = None,
    **options: Any,
) -> Compiled:
    """Compiles a jit function for a target without a GPU, in 0.2 to 3 s.

    signature: argument name -> triton's type ("*fp16", "i32"); constexprs: name -> value; together they must name
    every argument. cache: a folder of compiled code to use (a temporary one otherwise). Raises CompileError.
    """
    names = checked_names(kernel, signature, constexprs, target)
    backend = TARGETS[target][0]
    settings: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True, **options}
    if backend == "cuda":
        settings.setdefault("launch_cooperative_grid", True)
    with tempfile.TemporaryDirectory() as folder, knobs_set(cache or Path(folder), buffer_ops):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        types = {name: "constexpr" if name in constexprs else signature[name] for name in names}
        multiples = [name for name in names if types[name].startswith("*")] if aligned is None else aligned
        attributes: Any = {(names.index(name),): [["tt.divisibility", 16]] for name in multiples}
        source = ASTSource(fn=kernel, signature=types, constexprs=dict(constexprs), attrs=attributes)
        built: Any = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=settings)
        name = str(kernel.__name__)
        if backend == "hip":
            return amd_code(name, target, built)
        return nvidia_code(name, target, built, Path(folder))


def checked_names(kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], target: str) -> list[str]:
    """The argument names of a jit function, after saying clearly what is wrong with the request."""
    if target not in TARGETS:
        raise CompileError(f"no target named {target!r}; known: {', '.join(TARGETS)}")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise CompileError(
            "TRITON_INTERPRET is set, so kernels are interpreted functions that cannot be compiled: "
            "unset it before the kernels are imported, best in a process of its own"
        )
    if not hasattr(kernel, "arg_names") or "Interpreted" in type(kernel).__name__:
        raise CompileError(f"{kernel!r} is not a function that triton.jit can compile (or was decorated to interpret)")
    names = list(kernel.arg_names)
    given = {*signature, *constexprs}
    if given != set(names):
        missing, unknown = sorted(set(names) - given), sorted(given - set(names))
        raise CompileError(f"arguments of {kernel.__name__}: missing {missing or 'none'}, unknown {unknown or 'none'}")
    return names


@contextmanager
def knobs_set(cache: Path, buffer_ops: bool) -> Iterator[None]:
    """Triton's settings for one compilation, put back afterwards."""
    import importlib

    # As Any: the typed attributes differ between 3.6 and 3.9.
    knobs: Any = importlib.import_module("triton.knobs")
    with knobs.cache.scope(), knobs.amd.scope():
        knobs.cache.dir = str(cache)
        knobs.amd.use_buffer_ops = buffer_ops
        yield


def tools() -> Path:
    """The folder of ptxas, cuobjdump and nvdisasm in triton's wheel."""
    import triton

    folder = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
    if not (folder / "nvdisasm").exists():
        raise CompileError(f"triton's own assembler tools are missing from {folder}: install triton from its wheel")
    return folder


def output_of(*command: str) -> str:
    """Standard output, then standard error, of a tool that must succeed."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.returncode != 0:
        raise CompileError(f"{Path(command[0]).name} failed: {result.stderr.strip()[:500]}")
    return result.stdout + result.stderr


def assembler_report(ptx: str, folder: Path) -> str:
    """What ptxas -v says of a PTX text; the newer ptxas of the wheel is tried where the plain one is too old."""
    file = folder / "kernel.ptx"
    file.write_text(ptx, encoding="utf-8")
    architecture = re.search(r"\.target\s+(\w+)", ptx)
    if architecture is None:
        raise CompileError("PTX without a .target line")
    failure: CompileError | None = None
    for tool in ("ptxas", "ptxas-blackwell"):
        if not (tools() / tool).exists():
            continue
        try:
            return output_of(
                str(tools() / tool), "-v", "--gpu-name", architecture.group(1), str(file), "-o", os.devnull
            )
        except CompileError as error:
            failure = error
    raise failure or CompileError("no ptxas in triton's wheel")


def nvidia_code(name: str, target: str, built: Any, folder: Path) -> Compiled:
    """Texts and resources of what was compiled for an NVIDIA target."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(built.asm["cubin"])
    sass = output_of(str(tools() / "nvdisasm"), "-c", "-g", str(cubin))
    usage = output_of(str(tools() / "cuobjdump"), "-res-usage", str(cubin))
    numbers = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:\d+", usage)
    if numbers is None:
        raise CompileError(f"cuobjdump's answer is not understood: {usage[:300]}")
    # A line for the kernel and one for each of its functions.
    spills = re.findall(
        r"(\d+) bytes spill stores, (\d+) bytes spill loads", assembler_report(built.asm["ptx"], folder)
    )
    offsets = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/", sass, re.MULTILINE)
    resources = Resources(
        registers=int(numbers.group(1)),
        spills=sum(int(stores) + int(loads) for stores, loads in spills),
        shared=int(built.metadata.shared),
        stack=int(numbers.group(2)),
        # SASS instructions are 16 bytes long.
        code=max(int(offset, 16) for offset in offsets) + 16,
    )
    texts = {key: str(built.asm[key]) for key in ("ttgir", "llir", "ptx")}
    return Compiled(name, target, {**texts, "sass": sass}, resources)


def amd_code(name: str, target: str, built: Any) -> Compiled:
    """Texts and resources of what was compiled for an AMD target."""
    gcn = str(built.asm["amdgcn"])

    def number(pattern: str) -> int:
        match = re.search(pattern, gcn)
        if match is None:
            raise CompileError(f"AMD's assembly names no {pattern!r}")
        return int(match.group(1))

    resources = Resources(
        registers=number(r"\.vgpr_count:\s+(\d+)"),
        spills=4 * len(re.findall(r"4-byte Folded (?:Spill|Reload)", gcn)),
        shared=int(built.metadata.shared),
        stack=number(r"\.private_segment_fixed_size:\s+(\d+)"),
        code=sum(int(size) for size in re.findall(r"codeLenInByte = (\d+)", gcn)),
    )
    texts = {key: str(built.asm[key]) for key in ("ttgir", "llir")}
    return Compiled(name, target, {**texts, "gcn": gcn}, resources)


def table_of(compiled: Mapping[str, Mapping[str, Resources]]) -> str:
    """{kernel: {target: resources}} as the JSON that is kept in the repository."""
    plain = {name: {target: asdict(found) for target, found in of.items()} for name, of in compiled.items()}
    return json.dumps(plain, indent=1, sort_keys=True) + "\n"


def grown(now: Mapping[str, Mapping[str, Resources]], kept: str) -> list[str]:
    """What takes more than the kept table allows, a line each; kernels or targets that are missing are named too."""
    table = json.loads(kept)
    found = []
    for name, of in now.items():
        for target, resources in of.items():
            before = table.get(name, {}).get(target)
            if before is None:
                found.append(f"{name} on {target}: not in the table")
                continue
            for key, value in asdict(resources).items():
                share, floor = TOLERANCE[key]
                if value > before[key] + max(share * before[key], floor):
                    found.append(f"{name} on {target}: {key} {before[key]} -> {value}")
    return found
