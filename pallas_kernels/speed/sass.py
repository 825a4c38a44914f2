"""Reads the machine code of a kernel as nvdisasm prints it. Knows the text and the encoding, no kernels."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

# Bits of the upper half of an instruction, since Volta. Source: Jia et al., "Dissecting the NVIDIA Volta GPU
# architecture via microbenchmarking", arXiv:1804.06826, section 2.1.
_STALL, _WRITE, _READ, _WAIT = (41, 0xF), (46, 0x7), (49, 0x7), (52, 0x3F)
_NO_BARRIER = 7


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Args:
      predicate: condition under which it runs, such as @!P0; empty for always.
      opcode: with its modifiers: HGMMA.64x64x16.F32.BF16.
      target: label that a branch goes to, or None.
      stall: cycles until the same warp may issue its next instruction.
      writes, reads: scoreboard that is released when its result is ready, or its operands are read; None without.
      waits: scoreboards that must be free before it is issued, one bit each.
      marks: one character for each register: "^" written, "v" read, "x" both. Empty if `disassemble` was
        not asked for registers.
    """

    address: int
    predicate: str
    opcode: str
    operands: str
    target: str | None
    stall: int
    writes: int | None
    reads: int | None
    waits: int
    marks: str = ""

    @functools.cached_property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]

    def registers(self, marks: str) -> frozenset[int]:
        """Returns the numbers of the registers that carry one of these marks."""
        return frozenset(number for number, mark in enumerate(self.marks) if mark in marks)

    @property
    def branches(self) -> bool:
        return self.name in ("BRA", "JMP") and not self.opcode.startswith("BRA.DIV")

    @property
    def ends(self) -> bool:
        """True if the next instruction is reached only by a jump."""
        return not self.predicate and (self.branches or self.name in ("EXIT", "RET", "BRX"))


@dataclasses.dataclass(frozen=True)
class Function:
    """Instructions of a kernel in order, and the index of the instruction after each label."""

    name: str
    code: tuple[Instruction, ...]
    labels: dict[str, int]


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(@!?U?P\w+ )?(\S+)(?: ([^;]*?))? *;? +/\* 0x([0-9a-f]{16}) \*/")
_UPPER = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"^\.(L_\w+):")
_TARGET = re.compile(r"`\(\.(L_\w+)\)")
# Uses of registers, one column each: the header numbers the columns, and so shows the first one's place.
_HEADER = re.compile(r"// \|( +# )0")
_MARKS = re.compile(r"// \|(.*?)\|")


def parse(text: str) -> dict[str, Function]:
    """Returns the functions of a text of `nvdisasm -c -hex`, by name; with `-lrm narrow` also uses of registers.

    Raises:
      ValueError: an instruction without the second half of its encoding.
    """
    found = {}
    header = _HEADER.search(text)
    first = len(header.group(1)) if header else 0
    for part in re.split(r"^\.text\.(?=\w+:(?:$| +// \|))", text, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition(":")
        code: list[Instruction] = []
        labels: dict[str, int] = {}
        lines = iter(body.splitlines())
        for line in lines:
            if match := _LABEL.match(line):
                labels[match.group(1)] = len(code)
            elif match := _INSTRUCTION.search(line):
                below = next(lines, "")
                upper, marks = _UPPER.match(below), _MARKS.search(below, 120) if first else None
                if upper is None:
                    raise ValueError(f"half of an encoding is missing after {line.strip()[:80]!r}")
                used = marks.group(1)[first:] if marks else ""
                code.append(_instruction(match, int(upper.group(1), 16), used))
        while code and code[-1].name == "NOP":  # padding
            code.pop()
        found[name] = Function(name, tuple(code), labels)
    return found


def _instruction(match: re.Match[str], upper: int, marks: str) -> Instruction:
    address, predicate, opcode, operands, _ = match.groups()
    operands = operands or ""
    target = _TARGET.search(operands)

    def field(where: tuple[int, int]) -> int:
        return upper >> where[0] & where[1]

    def barrier(where: tuple[int, int]) -> int | None:
        return None if field(where) == _NO_BARRIER else field(where)

    return Instruction(
        int(address, 16),
        (predicate or "").strip(),
        opcode,
        operands,
        target.group(1) if target else None,
        field(_STALL),
        barrier(_WRITE),
        barrier(_READ),
        field(_WAIT),
        marks,
    )


def find_nvdisasm() -> str | None:
    """Returns the path of nvdisasm: from the package nvidia-cuda-nvdisasm, or another on the PATH."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*/bin/nvdisasm")):
            return str(path)
    return shutil.which("nvdisasm")


def disassemble(cubin: Path, nvdisasm: str, *, registers: bool = False) -> dict[str, Function]:
    """Returns the functions of a cubin.

    Args:
      registers: also return each instruction's use of registers, for which nvdisasm takes twice as long.

    Raises:
      ValueError: nvdisasm cannot read it.
    """
    # Without analysis of data flow, which finds targets of indirect branches and takes half of the time.
    options = ["-lrm", "narrow"] if registers else ["-ndf"]
    done = subprocess.run([nvdisasm, "-c", "-hex", *options, str(cubin)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"nvdisasm: {' '.join(done.stderr.split())[:300]}")
    return parse(done.stdout)
