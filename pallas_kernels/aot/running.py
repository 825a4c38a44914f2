"""Finds machine code that touches registers of a product while it runs.

wgmma is HGMMA in machine code, and runs on after it has been issued. Until a WARPGROUP.DEPBAR has waited for it, its
accumulators belong to the tensor cores, and operands in registers must stay as they are. The compiler must ensure that;
compilers have failed to. Machine code does not show a product's reads of shared memory: the emulator of PTX
(`pallas_kernels.ptx`) checks them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pallas_kernels.speed import flow
from pallas_kernels.speed.sass import Function, Instruction

_PRODUCTS = ("HGMMA", "QGMMA", "IGMMA", "BGMMA")
_WAIT = re.compile(r"gsb0, 0x([0-9a-f]+)")
_LEAVES = ("CALL", "RET", "BRX", "JMX")


class Touch(NamedTuple):
    """An instruction that touches registers of a running product; none of a jump that is not followed."""

    instruction: Instruction
    product: Instruction
    registers: frozenset[int]

    def __str__(self) -> str:
        does = f"touches R{min(self.registers)} of" if self.registers else "leaves, which is not followed, during"
        one, other = (f"{i.opcode} at {i.address:#x}" for i in (self.instruction, self.product))
        return f"{one} {does} {other}"


# Products that may run, and how many groups have been committed since each was issued, at least.
Running = Mapping[Instruction, int]


def find_touches(function: Function) -> list[Touch]:
    """Returns instructions that touch registers of running products, on any path through a function.

    Args:
      function: of `sass.disassemble(..., registers=True)`.
    """
    graph = flow.blocks(function)
    entered: dict[int, Running] = {0: {}}
    waiting = [0]
    while waiting:
        number = waiting.pop()
        *_, (_, running) = _run(graph[number].code, entered[number])
        for following in graph[number].next:
            known = entered.get(following)
            joined = _join(known or {}, running)
            if joined != known:
                entered[following] = joined
                waiting.append(following)
    found = [
        touch
        for number, running in sorted(entered.items())
        for instruction, before in _run(graph[number].code, running)
        if instruction is not None
        for touch in _touches(instruction, before)
    ]
    return list(dict.fromkeys(found))


def _run(code: tuple[Instruction, ...], running: Running) -> Iterator[tuple[Instruction | None, Running]]:
    """Yields each instruction with the products that run when it is issued, and those that run in the end."""
    for instruction in code:
        yield instruction, running
        if instruction.name in _PRODUCTS:
            running = {**running, instruction: 0}
            if "gsb0" in instruction.operands:
                running = {product: groups + 1 for product, groups in running.items()}
        elif instruction.opcode.startswith("WARPGROUP.DEPBAR") and (kept := _WAIT.search(instruction.operands)):
            running = {product: groups for product, groups in running.items() if groups <= int(kept.group(1), 16)}
    yield None, running


def _join(one: Running, other: Running) -> Running:
    return {**one, **{product: min(groups, one.get(product, groups)) for product, groups in other.items()}}


def _touches(instruction: Instruction, running: Running) -> Iterator[Touch]:
    touched, written = instruction.registers("^vx"), instruction.registers("^x")
    for product in running:
        if product is instruction:
            continue
        sums, operands = product.registers("^x"), product.registers("v")
        if instruction.name in _PRODUCTS and written == sums:
            shared = written & operands  # products that add to the same registers do so one after the other
        else:
            shared = touched & sums | written & operands
        if shared or instruction.name in _LEAVES:
            yield Touch(instruction, product, shared)
