"""Finds the loops of a kernel, and the instructions that one turn of a loop takes. Knows jumps, no kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from pallas_kernels.speed.sass import Function, Instruction


@dataclasses.dataclass(frozen=True)
class Block:
    """Instructions that run one after the other. next: indices of the blocks that may follow."""

    code: tuple[Instruction, ...]
    next: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Loop:
    """Blocks of a natural loop: head is where it is entered, tails are those that jump back to it."""

    head: int
    blocks: frozenset[int]
    tails: frozenset[int]


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


def loops(graph: list[Block]) -> list[Loop]:
    """Returns the natural loops of a graph; those with one head are one loop. Inner ones come before outer ones."""
    order = _depth_first(graph)
    before = {n: [] for n in order}
    for n in order:
        for m in graph[n].next:
            before[m].append(n)
    dominators = _dominators(graph, order, before)
    tails: dict[int, set[int]] = {}
    for n in order:
        for m in graph[n].next:
            if m in dominators[n]:
                tails.setdefault(m, set()).add(n)
    found = []
    for head, ends in tails.items():
        inside, waiting = {head}, list(ends)
        while waiting:
            n = waiting.pop()
            if n not in inside:
                inside.add(n)
                waiting += before[n]
        found.append(Loop(head, frozenset(inside), frozenset(ends)))
    return sorted(found, key=lambda loop: len(loop.blocks))


def _depth_first(graph: list[Block]) -> list[int]:
    """Blocks that can be reached, each before those that follow it unless they jump back."""
    seen, done, stack = {0}, [], [(0, iter(graph[0].next))]
    while stack:
        n, following = stack[-1]
        for m in following:
            if m not in seen:
                seen.add(m)
                stack.append((m, iter(graph[m].next)))
                break
        else:
            done.append(n)
            stack.pop()
    return done[::-1]


def _dominators(graph: list[Block], order: list[int], before: dict[int, list[int]]) -> dict[int, set[int]]:
    found = {n: set(order) for n in order} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for n in order[1:]:
            new = {n} | set.intersection(*(found[m] for m in before[n]))
            if new != found[n]:
                found[n], changed = new, True
    return found


Rank = tuple[float, ...]


def turn(
    graph: list[Block], loop: Loop, all_loops: Iterable[Loop], cost: Callable[[Block], Rank]
) -> tuple[Instruction, ...]:
    """Returns the instructions of one turn of a loop, on its cheapest path; inner loops are left at once.

    Args:
      cost: of a block; costs of a path are added, the smallest tuple is the cheapest.
    """
    return path(graph, loop.head, loop.tails, loop.blocks, all_loops, cost)


def path(
    graph: list[Block],
    begin: int,
    ends: Iterable[int],
    inside: Iterable[int],
    all_loops: Iterable[Loop],
    cost: Callable[[Block], Rank],
) -> tuple[Instruction, ...]:
    """Returns the instructions of the cheapest path between blocks that takes no jump backwards; none without a path.

    Args:
      inside: blocks that the path may use.
    """
    inside, back = set(inside), {(tail, loop.head) for loop in all_loops for tail in loop.tails}
    best: dict[int, tuple[Rank, tuple[int, ...]]] = {begin: (cost(graph[begin]), (begin,))}
    for n in _depth_first(graph):
        if n not in best or n not in inside:
            continue
        so_far, through = best[n]
        for m in graph[n].next:
            if m in inside and (n, m) not in back:
                rank = tuple(map(sum, zip(so_far, cost(graph[m]))))
                if m not in best or rank < best[m][0]:
                    best[m] = rank, (*through, m)
    _, through = min((best[n] for n in ends if n in best), default=((), ()))
    return tuple(i for n in through for i in graph[n].code)
