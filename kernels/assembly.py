"""What does compiled code do about vector loads, memory order and waits? Read off PTX, SASS and GCN text.

Nothing here runs or needs a GPU or triton. Three languages are read: "ptx" and "gcn" as triton prints them, "sass" as
`nvdisasm -c -g` does. Checks follow the order of the text; a backward branch makes the text between its target and
itself a loop. That is what these compilers emit for `for` and `while`; hand-written control flow could deceive it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LANGUAGES = ("ptx", "sass", "gcn")
LABEL = {"ptx": r"(\$L__BB\w+):", "sass": r"\s*(\.L_x_\d+):", "gcn": r"(\.LBB\d+_\d+):"}
BRANCH = {"ptx": r"bra\S*\s+(\$L__BB\w+)", "sass": r"BRA\b.*?(\.L_x_\d+)", "gcn": r"s_c?branch\w*\s+(\.LBB\d+_\d+)"}
GUARD = {"ptx": r"@!?%p\d+\s+", "sass": r"@!?U?P\w+\s+", "gcn": r"(?!)"}
LOAD = {
    "ptx": r"ld\.(?!param|shared|const|local)",
    "sass": r"LDG?\.|LDG?\s",
    "gcn": r"(global|buffer|flat)_load_",
}
WIDE = {"ptx": r"\.v(4\.[bfu]32|2\.[bfu]64|8\.[bfu]32|4\.[bfu]64)", "sass": r"\.(128|256)", "gcn": r"_dwordx4\b"}
STORE = {
    "ptx": r"st\.(?!param|shared|local|async)",
    "sass": r"STG?\.|STG?\s",
    "gcn": r"(global|buffer|flat)_store_",
}
ATOMIC = {
    "ptx": r"(atom|red)\.(?!shared)",
    "sass": r"(ATOMG?|RED)\b(?!S)",
    "gcn": r"(global|buffer|flat)_atomic_",
}
# A load that reads memory each time, of what other programs (gpu) or other devices (sys) may write.
POLL = {
    "ptx": r"ld\.volatile\.global|ld\.\S*(acquire|relaxed)|atom\.global(?!\S*release)",
    "sass": r"LDG?\.\S*STRONG\.(SYS|GPU)|ATOMG",
    "gcn": r"((global|buffer|flat)_load_.*\bsc1\b)|((global|buffer|flat)_atomic_.*\bsc0\b)",
}
BARRIER = {"ptx": r"bar(rier)?\.sync", "sass": r"BAR\.SYNC", "gcn": r"s_barrier\b"}
RELEASE = {
    "ptx": r"(atom|red)\.\S*\.(release|acq_rel)|fence\.(release|acq_rel)",
    "sass": r"MEMBAR\.",
    "gcn": r"buffer_wbl2\b",
}
# What makes a write one that other devices see.
SYSTEM = {"ptx": r"\.sys\b|st\.\S*\.wt\b", "sass": r"STRONG\.SYS", "gcn": r"\bsc1\b"}
DRAINED = r"s_waitcnt\b.*vmcnt\(0\)"


@dataclass(frozen=True)
class Listing:
    """Instructions of a kernel and its functions as the text has them, where labels point, (file name, line) of each.

    sources: the innermost place in the kernels' source that an instruction comes from; ("", 0) where none is known.
    """

    language: str
    lines: tuple[str, ...]
    labels: dict[str, int]
    sources: tuple[tuple[str, int], ...]

    def find(self, patterns: dict[str, str]) -> tuple[int, ...]:
        """Indices of the instructions that begin with the pattern of this language."""
        expression = re.compile(patterns[self.language])
        return tuple(i for i, line in enumerate(self.lines) if expression.match(self.bare(line)))

    def bare(self, line: str) -> str:
        """An instruction without the predicate in front of it."""
        return re.sub("^" + GUARD[self.language], "", line)

    def loops(self) -> tuple[tuple[int, int], ...]:
        """(first, last) instruction of each loop: a branch and the earlier label it goes back to."""
        found = []
        for i, line in enumerate(self.lines):
            match = re.match(BRANCH[self.language], self.bare(line))
            start = self.labels.get(match.group(1)) if match else None
            # A branch to itself is the padding after the end of a kernel.
            if start is not None and start < i:
                found.append((start, i))
        return tuple(found)


def read(text: str, language: str) -> Listing:
    """The listing of compiled text; comments and directives are left out. Unknown languages raise ValueError."""
    if language not in LANGUAGES:
        raise ValueError(f"no such assembly language: {language!r}; expected one of {', '.join(LANGUAGES)}")
    lines: list[str] = []
    labels: dict[str, int] = {}
    sources: list[tuple[str, int]] = []
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"', text, re.MULTILINE))
    place, before = ("", 0), ""
    inside = True
    for raw in text.splitlines():
        # What lies between the functions of GCN text is data and debug information.
        inside = inside or bool(re.search(r"\.type\s.*,@function", raw))
        if not inside:
            continue
        label = re.match(LABEL[language], raw)
        if label:
            labels[label.group(1)] = len(lines)
        else:
            place = place_of(raw, files, before) or place
            instruction = one_instruction(raw, language)
            lines += [instruction] if instruction else []
            sources += [place] if instruction else []
        if language == "gcn" and raw.startswith(".Lfunc_end"):
            inside = False
        before = raw
    return Listing(language, tuple(lines), labels, tuple(sources))


def place_of(raw: str, files: dict[str, str], before: str) -> tuple[str, int] | None:
    """The (file name, line) that a debug line of the text names, or None."""
    match = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", raw)
    if match:
        return Path(files.get(match.group(1), "")).name, int(match.group(2))
    # Where calls were inlined, the innermost place comes first of several such lines.
    match = re.match(r'\s*//## File "([^"]*)", line (\d+)', raw)
    return (Path(match.group(1)).name, int(match.group(2))) if match and "//## File" not in before else None


def one_instruction(raw: str, language: str) -> str:
    """The instruction of a line of text, or nothing."""
    if language == "sass":
        match = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", raw)
        return match.group(1).strip() if match else ""
    text = raw.split("//")[0].split(";")[0].strip()
    if language == "gcn" and not raw.startswith(("\t", " ")):
        return ""
    return "" if text.startswith((".", "{", "}", "$")) or text.endswith(":") else text


def wide_share(listing: Listing) -> float:
    """The share of 16-byte (or wider) loads among the loads from global memory; 1 when there are none."""
    loads = listing.find(LOAD)
    wide = [i for i in loads if re.search(WIDE[listing.language], listing.lines[i])]
    return len(wide) / len(loads) if loads else 1.0


def wide_loads(listing: Listing) -> tuple[int, ...]:
    """Indices of the 16-byte loads that are not polls."""
    polls = set(listing.find(POLL))
    return tuple(
        i for i in listing.find(LOAD) if i not in polls and re.search(WIDE[listing.language], listing.lines[i])
    )


def system_writes(listing: Listing) -> tuple[str, ...]:
    """Stores and atomics that other devices see: system scope, or written through all caches."""
    writes = (*listing.find(STORE), *listing.find(ATOMIC))
    return tuple(listing.lines[i] for i in sorted(writes) if re.search(SYSTEM[listing.language], listing.lines[i]))


def narrow_atomics(listing: Listing) -> tuple[str, ...]:
    """Atomics that stop short of system scope; none may be left in code that signals to peers by atomics."""
    atomics = listing.find(ATOMIC)
    return tuple(listing.lines[i] for i in atomics if not re.search(SYSTEM[listing.language], listing.lines[i]))


def way_back(listing: Listing, index: int) -> Iterable[Iterable[int]]:
    """The ways by which an instruction is reached: from the start of the text, and round each loop it is in."""
    yield range(index - 1, -1, -1)
    for first, last in listing.loops():
        if first <= index <= last:
            yield (*range(index - 1, first - 1, -1), *range(last, index, -1))


def bare_releases(listing: Listing) -> tuple[str, ...]:
    """Releases that some store reaches with no block barrier between: other threads' stores are not covered.

    A release is one thread's; only a barrier orders the stores of the block's other threads before it.
    """
    stores, barriers = set(listing.find(STORE)), set(listing.find(BARRIER))
    found = []
    for release in listing.find(RELEASE):
        for way in way_back(listing, release):
            met = next((i for i in way if i in stores or i in barriers), None)
            if met in stores:
                found.append(f"{listing.lines[release]}  after  {listing.lines[met]}")
    return tuple(found)


def undrained_releases(listing: Listing) -> tuple[str, ...]:
    """GCN only: releases whose block barrier is reached by stores that no `s_waitcnt vmcnt(0)` waited for.

    `buffer_wbl2; s_waitcnt vmcnt(0)` before a release waits for the stores of the wave that releases. Stores of the
    other waves may be under way when they pass the barrier; see llvm/llvm-project pull requests 160501 and 161638.
    """
    if listing.language != "gcn":
        return ()
    stores, barriers = set(listing.find(STORE)), set(listing.find(BARRIER))
    drained = {i for i, line in enumerate(listing.lines) if re.match(DRAINED, line)}
    found = []
    for release in listing.find(RELEASE):
        for way in way_back(listing, release):
            steps = list(way)
            barrier = next((n for n, i in enumerate(steps) if i in barriers), None)
            if barrier is None:
                continue
            met = next((i for i in steps[barrier:] if i in stores or i in drained), None)
            if met in stores:
                found.append(f"{listing.lines[release]}  after  {listing.lines[met]}")
    return tuple(found)


def spins(listing: Listing) -> tuple[tuple[int, int], ...]:
    """(first, last) instruction of each loop that waits: it reads memory afresh each time round, and loads no weights.

    Empty, or fewer than the source has, when the compiler hoisted or deleted a wait. A loop over layers or tokens is
    not taken for one, as it holds 16-byte loads that are not polls.
    """
    polls, work = listing.find(POLL), set(wide_loads(listing))
    found: list[tuple[int, int]] = []
    for first, last in sorted(listing.loops(), key=lambda loop: (loop[0], -loop[1])):
        inside = range(first, last + 1)
        if any(i in inside for i in polls) and not any(i in inside for i in work):
            if found and first <= found[-1][1]:
                found[-1] = (found[-1][0], max(last, found[-1][1]))
            else:
                found.append((first, last))
    return tuple(found)


def polls_in_loops(listing: Listing) -> tuple[str, ...]:
    """The instructions by which the loops that wait read memory."""
    waits = spins(listing)
    return tuple(listing.lines[i] for i in listing.find(POLL) if any(first <= i <= last for first, last in waits))


def poll_sites(source: Path) -> tuple[int, ...]:
    """The lines of a source file that load with a literal volatile=True.

    Atomics are not among them: no compiler makes them cacheable, and AMD's lose their line when branches are merged.
    """
    found = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            values = {keyword.arg: keyword.value for keyword in node.keywords}
            volatile = values.get("volatile")
            if node.func.attr == "load" and isinstance(volatile, ast.Constant) and volatile.value is True:
                found.add(node.lineno)
    return tuple(sorted(found))


def stale_polls(listing: Listing, source: Path) -> tuple[str, ...]:
    """Volatile loads of a source file that became cacheable loads, or nothing at all, a line each.

    Unlike `spins` this also sees a poll that was lost from a loop in which something else polls. Files of which the
    listing has no instruction are left alone.
    """
    if not any(name == source.name for name, _ in listing.sources):
        return ()
    polls, found = set(listing.find(POLL)), []
    loads = {*listing.find(LOAD), *(i for i, line in enumerate(listing.lines) if line.startswith("s_load"))}
    for line in poll_sites(source):
        here = {i for i, place in enumerate(listing.sources) if place == (source.name, line)}
        weak = sorted(here & (loads - polls))
        if weak:
            found.append(f"{source.name}:{line}: {listing.lines[weak[0]]}")
        elif not here & polls:
            found.append(f"{source.name}:{line}: no load at all")
    return tuple(found)


def registers_of(text: str, language: str) -> set[str]:
    """Registers named in operands of SASS or GCN; ranges are spelt out, and `.64` names two."""
    if language == "sass":
        names: set[str] = set()
        for number, pair in re.findall(r"\bR(\d+)\b(\.64)?", text):
            names |= {f"R{int(number) + k}" for k in range(2 if pair else 1)}
        return names
    names = {f"v{number}" for number in re.findall(r"\bv(\d+)\b", text)}
    for first, last in re.findall(r"\bv\[(\d+):(\d+)\]", text):
        names |= {f"v{k}" for k in range(int(first), int(last) + 1)}
    return names


def loaded_registers(line: str, language: str) -> set[str]:
    """The registers that a 16-byte load fills."""
    target = line.split(None, 1)[1].split(",")[0] if language == "gcn" else re.sub(r"^(@\S+\s+)?\S+\s+", "", line)
    if language == "gcn":
        return registers_of(target, language)
    match = re.match(r"R(\d+)", target)
    return {f"R{int(match.group(1)) + k}" for k in range(4)} if match else set()


@dataclass(frozen=True)
class Overlap:
    """Where the 16-byte loads next to a spin are, in instructions.

    ahead: issued before the spin and first used after it; late: issued after the spin; hurried: issued before the
    spin but used before its end, so that the loads are waited for first. Before and after reach to the next spin.
    """

    ahead: int
    late: int
    hurried: int


def overlaps(listing: Listing) -> tuple[Overlap, ...]:
    """How the 16-byte loads of SASS or GCN lie around each spin, in the order of the text.

    On AMD a poll waits for all older loads of its wave too (`s_waitcnt` counts in order): issued ahead is all that
    can be had.
    """
    waits, wide = spins(listing), wide_loads(listing)
    found = []
    for n, (first, last) in enumerate(waits):
        start = waits[n - 1][1] if n else -1
        end = waits[n + 1][0] if n + 1 < len(waits) else len(listing.lines)
        before = [i for i in wide if start < i < first]
        hurried = sum(used_before(listing, i, last) for i in before)
        found.append(Overlap(len(before) - hurried, sum(last < i < end for i in wide), hurried))
    return tuple(found)


def used_before(listing: Listing, load: int, end: int) -> bool:
    """Whether what a load fills is read at or before instruction `end`."""
    filled = loaded_registers(listing.lines[load], listing.language)
    for line in listing.lines[load + 1 : end + 1]:
        operands = listing.bare(line).split(None, 1)
        rest = operands[1] if len(operands) > 1 else ""
        stored = re.match(STORE[listing.language], listing.bare(line))
        # The first operand is what an instruction writes, save for stores.
        reads = rest if stored else rest.partition(",")[2]
        if filled & registers_of(reads, listing.language):
            return True
    return False
