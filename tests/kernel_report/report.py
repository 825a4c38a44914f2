"""Reads and judges the output of compilers. Knows texts and numbers; no jax."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ksana_jax.lab.trace.collectives import Collective
from tests.kernel_report import sass
from tests.kernel_report.running import find_touches

# Instructions by their prefix in PTX; each occurrence counts once, however often it runs.
_INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "tma_loads": r"cp\.async\.bulk\S*\.shared::(?:cluster|cta)\.global",
    "tma_stores": r"cp\.async\.bulk\S*\.global\.shared::cta",
    "mma_sync": r"\bmma\.sync",
    "cp_async": r"cp\.async\.c[ag]\.",
}
# Fusions that end with one of these write their input once more; other instructions of a fusion are not written.
_COPIES = ("copy", "copy-start", "transpose", "convert", "slice", "dynamic-slice", "concatenate", "pad")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a program, as compiled. Bytes are per thread (spill, stack) or per block of threads (shared).

    Args:
      spill_bytes: stores and loads together.
      shared_bytes: static and dynamic.
      grid, threads: blocks, and threads of each.
      serialised: of a kernel in Mosaic GPU: ptxas runs its wgmmas one after the other, because other code touches
        their registers meanwhile. Triton's own wgmmas are left to Triton.
      split_atoms: of `find_split_atoms`.
      touches: of `running.find_touches`, in words; none without nvdisasm.
    """

    kernel: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    grid: tuple[int, ...]
    threads: int
    wgmma: int
    tma_loads: int
    tma_stores: int
    mma_sync: int
    cp_async: int
    serialised: bool = False
    split_atoms: tuple[str, ...] = ()
    touches: tuple[str, ...] = ()


def read_ptxas(text: str) -> dict[str, dict[str, int]]:
    """Registers, spilled bytes, stack, static shared memory, serialised wgmmas of each kernel, from `ptxas -v`."""
    found = {}
    for part in re.split(r"Compiling entry function ", text)[1:]:
        name = re.match(r"'(\w+)'", part)
        assert name, part

        def number(pattern: str, part: str = part) -> int:
            match = re.search(pattern, part)
            return int(match.group(1)) if match else 0

        found[name.group(1)] = {
            "registers": number(r"Used (\d+) registers"),
            "spill_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            "stack_bytes": number(r"(\d+) bytes stack frame"),
            "shared_bytes": number(r"(\d+) bytes smem"),
            "serialised": bool(re.search(rf"wgmma.mma_async instructions are serialized .*'{name.group(1)}'", text)),
        }
    return found


def count_instructions(ptx: str) -> dict[str, int]:
    return {name: len(re.findall(pattern, ptx)) for name, pattern in _INSTRUCTIONS.items()}


def read_thunks(text: str) -> dict[str, dict]:
    """Grid, threads and dynamic shared memory of each kernel that XLA starts: its own and Triton's."""
    found = {}
    for name, grid, threads, shared in re.findall(
        r"(\S+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\]\s+shared_memory: (\d+) bytes", text
    ):
        found[name] = _launch(grid.split(","), threads.split(","), shared)
    return found


# Thunks that start only the thunks they hold. Since jax 0.11, a call that reads slices of arrays is in one.
HOLDERS = ("kCommandBuffer", "kDynamicSliceFusion")


def count_thunks(text: str) -> tuple[Counter, Counter]:
    """Counts a sequence of thunks by kind: inside of command buffers (CUDA graphs), outside of them."""
    counts = inside, outside = Counter(), Counter()
    depth = None  # indentation of the command buffer that we are in
    for spaces, kind in re.findall(r"^( *)\d+: (k\w+)", text, re.MULTILINE):
        if depth is not None and len(spaces) <= depth:
            depth = None
        if kind == "kCommandBuffer" and depth is None:
            depth = len(spaces)
        elif kind not in HOLDERS:
            (outside if depth is None else inside)[kind] += 1
    return counts


def read_mosaic_launch(lines: Iterable[str]) -> dict | None:
    """The same of a Mosaic GPU kernel, from the log of its passes: of the first launch with numbers in it."""
    number = r"%\w+ = %c(\d+)\w*"
    three = rf"\({number}, {number}, {number}\)"
    launch = re.compile(
        rf"gpu\.launch.* blocks\(.*?\) in {three} threads\(.*?\) in {three} dynamic_shared_memory_size %c(\d+)"
    )
    for line in lines:
        if "gpu.launch" in line and (match := launch.search(line)):
            *sizes, shared = match.groups()
            return _launch(sizes[:3], sizes[3:], shared)
    return None


def find_split_atoms(lines: Iterable[str]) -> list[str]:
    """Arrays in shared memory that Mosaic GPU swizzles in tiles of fewer than 8 rows, more than one tile wide.

    A swizzle repeats every 8 rows. Mosaic GPU's stores take it from where a tile of columns starts, the TMA engine from
    the absolute address: the second tile starts within the 8 rows of the first, and its columns are swapped.

    Args:
      lines: of the log of its passes.
    """
    array = re.compile(
        r"to memref<((?:\d+x)+)(\w+).*\{transforms = \[#mosaic_gpu\.tile<\[(\d+), (\d+)\]>, #mosaic_gpu\.swizzle<(\d+)"
    )
    found = []
    for line in lines:
        if "#mosaic_gpu.swizzle<" in line and (match := array.search(line)):
            shape, dtype, *numbers = match.groups()
            rows, columns, swizzle = map(int, numbers)
            width = int(shape.split("x")[-2])
            if rows < 8 and swizzle > 16 and width > columns:
                found.append(f"{dtype}[{shape[:-1].replace('x', ', ')}] in tiles [{rows}, {columns}]")
    return list(dict.fromkeys(found))


def _launch(grid, threads, shared) -> dict:
    return {"grid": tuple(map(int, grid)), "threads": math.prod(map(int, threads)), "shared_bytes": int(shared)}


def read_kernels(folder: Path, hlo: str, arch: str, ptxas: str, nvdisasm: str | None) -> list[Kernel]:
    """The Pallas kernels of one program, in the order of their names; XLA's own are left out.

    Args:
      folder: where XLA dumped thunks and PTX, and Mosaic GPU its files.
      hlo: the optimised program.
      nvdisasm: path; without it no machine code is read.

    Raises:
      ValueError: a kernel of the program left no report.
    """
    found = []
    for path in sorted(folder.glob("*.ptxas")):  # Mosaic GPU's own: the run of ptxas that made the code
        ptx = path.with_suffix(".ptx").read_text()
        passes = path.with_suffix(".mlir-passes.log").read_text().splitlines()
        launch = read_mosaic_launch(passes)
        if launch is None:
            raise ValueError(f"no launch in the passes of {path.stem}; another version of Mosaic GPU?")
        more: dict[str, Any] = {"split_atoms": tuple(find_split_atoms(passes))}
        if nvdisasm and "wgmma.mma_async" in ptx:
            _assemble(path.with_suffix(".ptx"), arch, ptxas)
            more["touches"] = _touches(path.with_suffix(".cubin"), nvdisasm)
        found += [_kernel(name, numbers | more, launch, ptx) for name, numbers in read_ptxas(path.read_text()).items()]
    expected = len(set(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', hlo)))
    if len(found) != expected:
        raise ValueError(f"{len(found)} reports of {expected} Mosaic GPU kernels")

    launches = {}
    for path in folder.glob("*thunk_sequence.txt"):
        launches |= read_thunks(path.read_text())
    names = set()
    for line in hlo.splitlines():
        if '"__gpu$xla.gpu.triton"' in line:
            names |= {_unnumbered(name) for name in re.findall(r'\bname = "(\w+)"', line)}
    seen = set()
    for path in sorted(folder.glob("*.ptx")):
        ptx = path.read_text()
        entry = re.search(r"\.entry (\w+)", ptx)
        if entry is None or _unnumbered(entry.group(1)) not in names:
            continue
        seen.add(_unnumbered(entry.group(1)))
        more = {"serialised": False}
        said = _assemble(path, arch, ptxas)
        if nvdisasm and "wgmma.mma_async" in ptx:
            more["touches"] = _touches(path.with_suffix(".cubin"), nvdisasm)
        for name, numbers in read_ptxas(said).items():
            if name not in launches:
                raise ValueError(f"no launch of {name}")
            found.append(_kernel(name, numbers | more, launches[name], ptx))
    if names != seen:
        raise ValueError(f"no PTX of {', '.join(sorted(names - seen))}")
    return list(dict.fromkeys(found))  # layers may have compiled the same kernel each for itself


def _assemble(ptx: Path, arch: str, ptxas: str) -> str:
    """Writes the cubin of a PTX file next to it and returns the output of `ptxas -v`."""
    command = [ptxas, "-v", f"-arch={arch}", ptx, "-o", ptx.with_suffix(".cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"ptxas: {' '.join(done.stderr.split())[:300]}")
    return done.stderr


def _touches(cubin: Path, nvdisasm: str) -> tuple[str, ...]:
    functions = sass.disassemble(cubin, nvdisasm).values()
    return tuple(str(touch) for function in functions for touch in find_touches(function))


def _unnumbered(name: str) -> str:
    """XLA numbers kernels of one name: decode, decode_1."""
    return re.sub(r"_\d+$", "", name)


def _kernel(name: str, numbers: dict[str, Any], launch: dict[str, Any], ptx: str) -> Kernel:
    values: dict[str, Any] = {**launch, **numbers, **count_instructions(ptx)}
    values["shared_bytes"] += launch["shared_bytes"]
    return Kernel(name.removesuffix("_mosaic_gpu_kernel"), **values)


def part_size(shape: tuple[int, ...]) -> int:
    """Elements of one layer's keys in a pool [M, L, 2, ...]; all elements of an array with fewer dimensions."""
    return math.prod(shape) // (shape[1] * 2 if len(shape) > 2 else 1)


def find_copies(hlo: str, shapes: Iterable[tuple[int, ...]]) -> list[str]:
    """Instructions of an optimised program that write a whole pool, one layer of it or its keys once more.

    Args:
      hlo: text of the program.
      shapes: of the pools, [M, L, 2, ...].
    """
    large = set()
    for shape in shapes:
        large |= {math.prod(shape), part_size(shape), min(2 * part_size(shape), math.prod(shape))}
    fusions = set(re.findall(r" fusion\(.*\bcalls=%?([\w.-]+)", hlo))
    found: list[str] = []
    inside: list[str] | None = None  # of a fusion: lines that would be copies if the fusion returned them
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            inside = [] if header.group(1) in fusions else None
        match = re.match(r"\s+(ROOT )?%?([\w.-]+) = \(?\w+\[([\d,]*)\].*? ([a-z-]+)\((.*)", line)
        if not match:
            continue
        root, name, size, operation, rest = match.groups()
        if operation in _COPIES and math.prod(int(n) for n in size.split(",") if n) in large:
            (found if inside is None else inside).append(name)
        if root and inside:
            returned = [name, *(re.findall(r"%?([\w.-]+)", rest) if operation == "tuple" else ())]
            found += [copied for copied in inside if copied in returned]
    return found


def judge_collectives(found: Counter[Collective], expected: Counter[Collective]) -> list[str]:
    """Returns problems of a program whose collectives differ from the expected ones."""
    if found == expected:
        return []
    return [f"collectives: {describe_collectives(found)}; expected {describe_collectives(expected)}"]


def describe_exchange(row: dict[str, Any]) -> str:
    """Describes each device's memory and exchanges in a program, from a row of a report; "" for one device."""
    found = Counter({Collective(c["kind"], c["bytes"]): c["number"] for c in row.get("collectives", ())})
    if not found:
        return ""
    return f"  each device: arguments {row['argument_bytes']:,} bytes; {describe_collectives(found)}"


def describe_collectives(found: Counter[Collective]) -> str:
    said = [f"{number:,} {kind} of {size:,} bytes" for (kind, size), number in sorted(found.items())]
    return ", ".join(said) or "none"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a program.

    Args:
      part_bytes: of one layer's keys.
      alias_bytes: of results that take the place of arguments.
      argument_bytes: of all arguments, with weights and pools.
    """

    pool_bytes: int
    part_bytes: int
    donated_bytes: int
    alias_bytes: int
    temp_bytes: int
    argument_bytes: int = 0


def judge_kernel(kernel: Kernel, shared_limit: int) -> list[str]:
    """Returns the problems of a compiled kernel, a few words each.

    Args:
      shared_limit: bytes of shared memory that the chip has for one block of threads.
    """
    wrong = []
    if kernel.spill_bytes:
        wrong.append(f"spills {kernel.spill_bytes:,} bytes")
    if kernel.shared_bytes > shared_limit:
        wrong.append(f"{kernel.shared_bytes:,} bytes of shared memory, the chip has {shared_limit:,}")
    if kernel.serialised:
        wrong.append("ptxas serialises its wgmmas: other instructions touch their registers while they run")
    if kernel.touches:
        wrong.append(f"registers of running wgmmas are touched, {len(kernel.touches):,} times: {kernel.touches[0]}")
    if kernel.split_atoms:
        wrong.append(f"columns would be swapped: shared memory swizzled by fewer than 8 rows, {kernel.split_atoms[0]}")
    return wrong


def judge_program(memory: Memory, copies: list[str], buffer_bytes: int = 0) -> list[str]:
    """Returns problems of a program. Args: copies, of `find_copies`; buffer_bytes, necessary temporaries."""
    wrong = []
    if copies:
        wrong.append(f"the pool is copied by {', '.join(copies)}")
    if memory.alias_bytes < memory.donated_bytes:
        wrong.append(f"{memory.donated_bytes:,} bytes are donated and {memory.alias_bytes:,} aliased")
    if memory.temp_bytes - buffer_bytes >= memory.part_bytes:
        wrong.append(f"{memory.temp_bytes:,} bytes of temporaries, one layer's keys are {memory.part_bytes:,}")
    return wrong
