"""The parts of a kernel's time: the code before its inner loop, one turn of it, the code after it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.speed import flow, pipes
from pallas_kernels.speed.flow import Block, Rank
from pallas_kernels.speed.sass import Function, Instruction

Code = tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True)
class Parts:
    """Instructions of a warp, in order, on paths that ask for as many copies as possible and take no masks.

    Args:
      before: from the beginning to the inner loop, or to the end without one. turn: of the inner loop.
      around: one turn of the loop around it, with one of the inner loop; empty without one. after: to the end.
      masked: one turn of another loop with products of matrices; empty without one.
      beside: one turn of the loop of a warpgroup that stores the factors of the inner loop; empty where copies do.
    """

    before: Code
    turn: Code
    around: Code
    after: Code
    masked: Code
    beside: Code = ()

    @property
    def stages(self) -> int:
        """Turns whose data has been asked for when the loop begins; at least 1."""
        copies = count_copies if count_copies(self.turn) else _count_async
        return max(1, copies(self.before) // max(copies(self.turn), 1))


def copying(block: Block) -> Rank:
    """The cost of a block where a path asks for as many copies as possible, and is short."""
    return -count_copies(block.code), len(block.code)


def working(block: Block) -> Rank:
    """The cost of a block where a path loads and stores as much as possible: it avoids idle branches."""
    return -sum(i.name in ("LDG", "STG") for i in block.code), len(block.code)


def find_parts(function: Function, cost: Callable[[Block], Rank] = copying) -> Parts:
    """Finds the inner loop of a kernel: with most products of matrices, else with most copies, loads and stores.

    Args:
      cost: of a block, by which paths are chosen; see `flow.path`.
    """
    graph = flow.blocks(function)
    loops = flow.loops(graph)
    turns = {loop.head: flow.turn(graph, loop, loops, cost) for loop in loops}
    ends = [n for n, block in enumerate(graph) if not block.next and block.code[-1].name == "EXIT"]
    everything = range(len(graph))
    inner = max(loops, key=lambda loop: (_work(turns[loop.head]), -len(loop.blocks)), default=None)
    if inner is None or _work(turns[inner.head]) == (0, 0, 0):
        return Parts(flow.path(graph, 0, ends, everything, loops, cost), (), (), (), ())
    outer = [loop for loop in loops if inner.blocks < loop.blocks and _work(turns[loop.head]) != (0, 0, 0)]
    apart = [loop for loop in loops if not loop.blocks & inner.blocks and _flops(turns[loop.head])]
    masked = max(apart, key=lambda loop: _flops(turns[loop.head]), default=None)
    makes = [turns[loop.head] for loop in loops if not loop.blocks & inner.blocks and _makes(turns[loop.head])]
    left = {m for n in inner.blocks for m in graph[n].next} - inner.blocks
    after = min(
        (flow.path(graph, n, ends, set(everything) - inner.blocks, loops, cost) for n in left),
        key=lambda code: (-count_copies(code), len(code)) if code else (0, len(function.code)),
        default=(),
    )
    return Parts(
        flow.path(graph, 0, [inner.head], everything, loops, cost)[: -len(graph[inner.head].code)],
        turns[inner.head],
        turns[outer[0].head] if outer else (),
        after,
        turns[masked.head] if masked else (),
        max(makes, key=len, default=()),
    )


def count_copies(code: Sequence[Instruction]) -> int:
    """Copies by TMA."""
    return sum(i.name in ("UTMALDG", "UBLKCP") for i in code)


def _count_async(code: Sequence[Instruction]) -> int:
    """Copies by cp.async, where each thread copies its part."""
    return sum(i.name == "LDGSTS" for i in code)


def _flops(code: Sequence[Instruction]) -> int:
    """Operations of products of matrices, a warpgroup's or a warp's."""
    shapes = [pipes.wgmma(i) for i in code]
    return sum(shape.flops for shape in shapes if shape) + sum(2 * 16 * 8 * 16 for i in code if i.name == "HMMA")


def _makes(code: Sequence[Instruction]) -> bool:
    """True if a turn makes operands of products that others compute: it stores them and hands them over."""
    names = Counter(i.name for i in code)
    return names["STS"] > 8 and names["FENCE"] > 1 and not _flops(code)


def _work(code: Sequence[Instruction]) -> tuple[int, int, int]:
    """By which an inner loop is chosen: products of matrices, and only without them copies, then loads and stores."""
    if flops := _flops(code):
        return flops, 0, 0
    transfers = sum(i.name in ("LDG", "LDS", "STG", "STS", "LDGSTS") for i in code)
    return 0, count_copies(code), transfers if len(code) > 16 else 0


_GROUPS = {
    "loads": ("LDG", "LD"),
    "stores": ("STG", "ST"),
    "shared_loads": ("LDS", "LDSM"),
    "shared_stores": ("STS", "STSM"),
    "shuffles": ("SHFL",),
    "barriers": ("BAR",),
    "mbarriers": ("SYNCS",),
    "fences": ("MEMBAR", "FENCE"),
    "cp_async": ("LDGSTS",),
}
_PIPES = {pipes.MUFU: "mufu", pipes.FMA: "fma", pipes.ALU: "alu", pipes.UNIFORM: "uniform"}


def count(code: Sequence[Instruction]) -> dict[str, Any]:
    """Counts the instructions of a warp by kind.

    Returns:
      numbers by kind; "wgmma" by shape; "stalls", the sum of the fixed stalls in cycles; "shared_bytes", read and
      written by a warpgroup, including operands of its products.
    """
    names = Counter(i.name for i in code)
    found: dict[str, Any] = {"instructions": len(code), "stalls": sum(i.stall for i in code)}
    shapes = Counter(f"{i.name.lower()} 64x{shape.n}x{shape.k}" for i in code if (shape := pipes.wgmma(i)))
    found["wgmma"] = dict(sorted(shapes.items()))
    found["mma"] = names["HMMA"]
    found["copies"] = count_copies(code)
    found |= {kind: sum(names[name] for name in members) for kind, members in _GROUPS.items()}
    of_pipe = Counter(pipes.pipe(i) for i in code)
    found |= {name: of_pipe[pipe] for pipe, name in _PIPES.items()}
    found["shared_bytes"] = sum(_shared_bytes(i) for i in code)
    return found


def _shared_bytes(instruction: Instruction) -> int:
    if shape := pipes.wgmma(instruction):
        return shape.shared_bytes
    if instruction.name in ("LDS", "LDSM", "STS", "STSM"):
        return 128 * pipes.width(instruction)
    return 0
