"""Turns instructions into functions of a warp: operands, predicates, branches, arithmetic. The rest is in other files.

A register is an array of 32 unsigned numbers (or booleans), one for each thread of the warp, that is never changed in
place. A step is a function of a `Warp`; a step that may have to wait is a generator function, marked by `Step.waits`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tests.emulator import arithmetic
from tests.emulator.arithmetic import LANES, TYPES, UNSIGNED
from tests.emulator.memory import SHARED_BASE, Trap
from tests.emulator.parser import Instruction, Program

SPECIAL = (
    "%tid.",
    "%ntid.",
    "%ctaid.",
    "%nctaid.",
    "%laneid",
    "%warpid",
    "%cluster_",
    "%clusterid.",
    "%nclusterid.",
    "%is_explicit_cluster",
)
_NOTHING = (
    "fence.acq_rel",
    "fence.sc",
    "membar",
    "prefetch",
    "griddepcontrol",
    "nanosleep",
    "pragma",
    "cp.async.bulk.prefetch",
    "fence.proxy.tensormap",
)

_PRODUCT = "wgmma.mma_async"
_REGISTER = re.compile(r"%[\w$.]+")

Registers = list[np.ndarray]


class Step(NamedTuple):
    """One instruction, compiled.

    kind: "plain" for run(registers), "memory" for run(warp), after which others may come first, "waits" for a
    generator function of a warp, "branch" for run(registers) that says whether to go to `target`, "exit".
    touched: registers of products that it reads or writes, as bits; none for a wgmma, which tracks its own.
    """

    kind: str
    run: Callable[..., Any]
    target: int = 0
    touched: int = 0


class Compiler:
    """Compiles a program; registers and special registers have places in a list.

    Args:
      families: functions of (compiler, instruction) by the prefix of the instruction's name, from other files.
    """

    def __init__(self, program: Program, families: Mapping[str, Callable[[Compiler, Instruction], Step]]):
        self.program, self._families = program, families
        self.places = {name: i for i, name in enumerate(program.widths)}
        self._of_products: dict[str, int] = {}  # a bit of each register that wgmmas have
        for instruction in program.instructions:
            if instruction.op.startswith(_PRODUCT):
                for name in _REGISTER.findall("".join(x for x in instruction.operands if x.startswith("{"))):
                    self._of_products.setdefault(name, 1 << len(self._of_products))
        self.steps = []
        for instruction in program.instructions:
            try:
                self.steps.append(self._step(instruction)._replace(touched=self._touched(instruction)))
            except (KeyError, IndexError, ValueError, NotImplementedError) as error:
                raise NotImplementedError(
                    f"{program.name}, line {instruction.line}: {instruction}: not modelled ({error})"
                ) from error

    def _step(self, i: Instruction) -> Step:
        if i.op.startswith(_NOTHING):
            return Step("plain", lambda registers: None)
        for beginning, compile_it in self._families.items():
            if i.op.startswith(beginning):
                return compile_it(self, i)
        if i.parts[0] == "bra":
            return Step("branch", self._branch(i), self.program.labels[i.operands[0]])
        if i.parts[0] in ("ret", "exit"):
            return Step("exit", self._branch(i))
        if i.parts[0] == "elect":
            return Step("plain", self._elect(i))
        if i.parts[0] == "shfl":
            return Step("plain", self._shuffle(i))
        if i.parts[0] == "mov" and "{" in "".join(i.operands):
            return Step("plain", self._pack(i))
        found = arithmetic.operation(i.parts)
        if found is None:
            raise NotImplementedError("no such instruction")
        kinds, function = found
        sources = [self.read(x, kind) for x, kind in zip(i.operands[1:], kinds, strict=True)]
        write = self.write(i.operands[0], i)
        if len(sources) == 1:
            (first,) = sources
            return Step("plain", lambda registers: write(registers, function(first(registers))))
        if len(sources) == 2:
            first, second = sources
            return Step("plain", lambda registers: write(registers, function(first(registers), second(registers))))
        return Step("plain", lambda registers: write(registers, function(*(read(registers) for read in sources))))

    def _touched(self, i: Instruction) -> int:
        if not self._of_products or i.op.startswith(_PRODUCT):
            return 0
        return self.products_mask(_REGISTER.findall(" ".join((*i.operands, i.predicate or ""))))

    def products_mask(self, names: Iterable[str]) -> int:
        """Registers that wgmmas have among these, as bits."""
        bits = 0
        for name in names:
            bits |= self._of_products.get(name, 0)
        return bits

    def products_names(self, bits: int) -> list[str]:
        return [name for name, bit in self._of_products.items() if bit & bits]

    # Operands

    def place(self, name: str) -> int:
        if name.startswith(SPECIAL) and name not in self.places:
            self.places[name] = len(self.places)
        return self.places[name]

    def width(self, name: str) -> int:
        return self.program.widths.get(name, 32)

    def read(self, operand: str, kind: str) -> Callable[[Registers], np.ndarray]:
        """An operand's numbers in a type; [32], or [32, 2] for a packed one."""
        packed = kind.endswith("x2")
        dtype = np.dtype(TYPES[kind.removesuffix("x2")])
        size = dtype.itemsize * (2 if packed else 1)
        if operand.startswith("%"):
            place, width = self.place(operand), self.width(operand)
            if kind == "pred":
                return lambda registers: registers[place]
            unsigned = UNSIGNED[size]
            if packed:
                return lambda registers: registers[place].view(dtype).reshape(LANES, 2)
            if width == 8 * size:
                return lambda registers: registers[place].view(dtype)
            return lambda registers: registers[place].astype(unsigned).view(dtype)
        number = self.constant(operand)
        if kind == "pred":
            array = np.full(LANES, bool(number))
        else:
            bits = np.full(LANES, number & ((1 << 8 * size) - 1), UNSIGNED[size])
            array = bits.view(dtype).reshape(LANES, 2) if packed else bits.view(dtype)
        return lambda registers: array

    def constant(self, operand: str) -> int:
        if match := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", operand):
            return int(match.group(1), 16)
        if operand.startswith("__dynamic_shmem"):
            return SHARED_BASE
        if operand in self.program.params:
            return self.program.param_address(operand)
        if operand.startswith("("):
            return _evaluate(ast.parse(operand, mode="eval").body)
        return int(operand.rstrip("U"), 0)

    def mask(self, i: Instruction) -> Callable[[Registers], np.ndarray] | None:
        """Threads that run the instruction; None for all."""
        if i.predicate is None:
            return None
        place = self.place(i.predicate)
        if i.negated:
            return lambda registers: ~registers[place]
        return lambda registers: registers[place]

    def write(self, operand: str, i: Instruction) -> Callable[[Registers, np.ndarray], None]:
        """Puts numbers into a register, extended to its width, of threads that run the instruction."""
        if operand == "_":
            return lambda registers, x: None
        place, width, mask = self.place(operand), self.width(operand), self.mask(i)
        unsigned = np.bool_ if width == 1 else UNSIGNED[width // 8]
        size = width // 8

        def raw(x: np.ndarray) -> np.ndarray:
            if width == 1:
                return x
            if x.ndim == 2:  # packed
                x = np.ascontiguousarray(x).view(unsigned).reshape(LANES)
            if x.dtype.itemsize == size:
                return x.view(unsigned)
            if x.dtype.kind == "i":
                return x.astype(f"i{size}").view(unsigned)
            return x.view(UNSIGNED[x.dtype.itemsize]).astype(unsigned)

        if mask is None:

            def put(registers, x):
                registers[place] = raw(x)
        else:

            def put(registers, x):
                registers[place] = np.where(mask(registers), raw(x), registers[place])

        return put

    def address(self, operand: str) -> Callable[[Registers], np.ndarray]:
        """Addresses of "[%rd1+16]", int64."""
        match = re.fullmatch(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        if match is None:
            raise ValueError(f"address {operand}")
        base, offset = match.group(1), int(match.group(2) or 0)
        if not base.startswith("%"):
            fixed = np.full(LANES, self.constant(base) + offset, np.int64)
            return lambda registers: fixed
        place = self.place(base)
        return lambda registers: registers[place].astype(np.int64) + offset

    def uniform(self, operand: str, what: str, kind: str = "u32") -> Callable[[Registers], int]:
        read = self.address(operand) if operand.startswith("[") else self.read(operand, kind)

        def one(registers):
            x = read(registers)
            if (x != x[0]).any():
                raise Trap(f"{what} differs between the threads of a warp")
            return int(x[0])

        return one

    # Instructions that are neither arithmetic nor wait

    def _branch(self, i: Instruction) -> Callable[[Registers], bool]:
        mask = self.mask(i)
        if mask is None:
            return lambda registers: True

        def taken(registers):
            wanted = mask(registers)
            if wanted[0]:
                if wanted.all():
                    return True
            elif not wanted.any():
                return False
            where = i.operands[0] if i.operands else "the end"
            raise Trap(f"threads of a warp part at a branch: {int(wanted.sum())} of {LANES} go to {where}")

        return taken

    def _elect(self, i: Instruction) -> Callable[[Registers], None]:
        names = i.operands[0].split("|")
        lane, elected = self.write(names[0], i), self.write(names[1], i)
        zero, first = np.zeros(LANES, np.uint32), np.arange(LANES) == 0

        def elect(registers):
            lane(registers, zero)
            elected(registers, first)

        return elect

    def _shuffle(self, i: Instruction) -> Callable[[Registers], None]:
        how = i.parts[2]
        write = self.write(i.operands[0].split("|")[0], i)
        value, other = self.read(i.operands[1], "b32"), self.read(i.operands[2], "u32")
        if i.operands[3] != "31" and not (how == "up" and i.operands[3] == "0"):
            raise NotImplementedError("shuffles of parts of a warp")
        lanes = np.arange(LANES)

        def shuffle(registers):
            by = other(registers).astype(np.int64)
            source = {"bfly": lanes ^ by, "idx": by % LANES, "up": lanes - by, "down": lanes + by}[how]
            source = np.where((source < 0) | (source >= LANES), lanes, source)
            write(registers, value(registers)[source])

        return shuffle

    def _pack(self, i: Instruction) -> Callable[[Registers], None]:
        """mov between one register and the parts of it."""
        to, source = i.operands
        bits = int(re.sub(r"\D", "", i.parts[1]))
        parts = [x.strip() for x in (to if "{" in to else source).strip("{} ").split(",")]
        kind = f"b{bits // len(parts)}"
        if "{" in to:
            value, writes = self.read(source, f"b{bits}"), [self.write(x, i) for x in parts]
            dtype = TYPES[kind]

            def unpack(registers):
                columns = np.ascontiguousarray(value(registers)).view(dtype).reshape(LANES, -1)
                for j, write in enumerate(writes):
                    write(registers, np.ascontiguousarray(columns[:, j]))

            return unpack
        reads, write = [self.read(x, kind) for x in parts], self.write(to, i)

        def pack(registers):
            columns = np.stack([read(registers) for read in reads], axis=1)
            write(registers, columns.view(TYPES[f"b{bits}"]).reshape(LANES))

        return pack


def _evaluate(node: ast.expr) -> int:
    """The truth table of a lop3, written as "(0xf0 & 0xcc) ^ 0xaa"."""
    operations = {ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor}
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_evaluate(node.operand) & 0xFF
    if isinstance(node, ast.BinOp):
        return operations[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("not a truth table")
