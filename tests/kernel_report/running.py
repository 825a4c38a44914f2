"""Finds machine code that touches registers of a product while it runs.

wgmma is HGMMA in machine code, and runs on after it has been issued. Until a WARPGROUP.DEPBAR has waited for it, its
accumulators belong to the tensor cores, and operands in registers must stay as they are. The compiler must ensure that;
compilers have failed to. Machine code does not show a product's reads of shared memory: the emulator of PTX
(`tests.emulator`) checks them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tests.kernel_report.sass import Function, Instruction

_PRODUCTS = ("HGMMA", "QGMMA", "IGMMA", "BGMMA")
_WAIT = re.compile(r"gsb0, 0x([0-9a-f]+)")
_LEAVES = ("CALL", "RET", "BRX", "JMX")


@dataclasses.dataclass(frozen=True)
class Block:
    """Instructions that run one after the other. next: indices of the blocks that may follow."""

    code: tuple[Instruction, ...]
    next: tuple[int, ...]


def blocks(function: Function) -> list[Block]:
    """Cuts a function into basic blocks, in the order of their addresses."""
    code, labels = function.code, function.labels
    starts = {0, *(labels[i.target] for i in code if i.branches and i.target in labels)}
    starts |= {n + 1 for n, i in enumerate(code) if i.branches or i.ends}
    edges = sorted(n for n in starts if n < len(code))
    index = {start: n for n, start in enumerate(edges)}
    found = []
    for start, until in zip(edges, [*edges[1:], len(code)]):
        last, following = code[until - 1], []
        if last.branches and last.target in labels and labels[last.target] in index:
            following.append(index[labels[last.target]])
        if not last.ends and until in index:
            following.append(index[until])
        found.append(Block(code[start:until], tuple(dict.fromkeys(following))))
    return found


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
      function: of `sass.disassemble`.
    """
    graph = blocks(function)
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
