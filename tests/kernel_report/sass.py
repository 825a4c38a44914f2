"""Reads the machine code of a kernel as nvdisasm prints it. Knows the text and the encoding, no kernels."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Args:
      predicate: condition under which it runs, such as @!P0; empty for always.
      opcode: with its modifiers: HGMMA.64x64x16.F32.BF16.
      target: label that a branch goes to, or None.
      marks: one character for each register: "^" written, "v" read, "x" both.
    """

    address: int
    predicate: str
    opcode: str
    operands: str
    target: str | None
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


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(@!?U?P\w+ )?(\S+)(?: ([^;]*?))? *;? +/\* 0x[0-9a-f]{16} \*/")
_UPPER = re.compile(r"^\s+/\* 0x[0-9a-f]{16} \*/")
_LABEL = re.compile(r"^\.(L_\w+):")
_TARGET = re.compile(r"`\(\.(L_\w+)\)")
# Uses of registers, one column each: the header numbers the columns, and so shows the first one's place.
_HEADER = re.compile(r"// \|( +# )0")
_MARKS = re.compile(r"// \|(.*?)\|")


def parse(text: str) -> dict[str, Function]:
    """Returns the functions of a text of `nvdisasm -c -hex -lrm narrow`, by name.

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
                code.append(_instruction(match, used))
        while code and code[-1].name == "NOP":  # padding
            code.pop()
        found[name] = Function(name, tuple(code), labels)
    return found


def _instruction(match: re.Match[str], marks: str) -> Instruction:
    address, predicate, opcode, operands = match.groups()
    operands = operands or ""
    target = _TARGET.search(operands)
    label = target.group(1) if target else None
    return Instruction(int(address, 16), (predicate or "").strip(), opcode, operands, label, marks)


def find_nvdisasm() -> str | None:
    """Returns the path of nvdisasm: from the package nvidia-cuda-nvdisasm, or another on the PATH."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*/bin/nvdisasm")):
            return str(path)
    return shutil.which("nvdisasm")


def disassemble(cubin: Path, nvdisasm: str) -> dict[str, Function]:
    """Returns the functions of a cubin, with each instruction's use of registers.

    Raises:
      ValueError: nvdisasm cannot read it.
    """
    command = [nvdisasm, "-c", "-hex", "-lrm", "narrow", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"nvdisasm: {' '.join(done.stderr.split())[:300]}")
    return parse(done.stdout)
