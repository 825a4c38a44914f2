"""Counts launches and bytes of a compiled GPU program, from its optimised HLO. Knows texts; no jax."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import NamedTuple

_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([a-z-]+)\((.*?)\)(.*)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# These start nothing.
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "while")
# They read as much of their first operand as they return, or write as much of it as another operand has.
_SLICES, _UPDATES = ("dynamic-slice", "slice", "gather"), {"dynamic-update-slice": 1, "scatter": 2}


class Traffic(NamedTuple):
    """Launches of a program, and bytes of the arrays that they read and write, each once a launch: what a cache serves
    is counted."""

    launches: int
    read_bytes: int
    written_bytes: int


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    operation: str
    num_bytes: int
    operands: tuple[str, ...]
    rest: str
    root: bool


def count_traffic(hlo: str) -> Traffic:
    """Counts a program whose loops run a number of times that is known.

    Raises:
      ValueError: of a loop, it is not.
    """
    computations, entry = _parse(hlo)
    return _count(computations, entry)


def _parse(hlo: str) -> tuple[dict[str, list[_Instruction]], str]:
    found: dict[str, list[_Instruction]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            name = header.group(2)
            found[name], entry = [], name if header.group(1) else entry
        elif match := _LINE.match(line):
            root, of, shape, operation, operands, rest = match.groups()
            names = tuple(re.findall(r"%([\w.-]+)", operands))
            if operation == "parameter":
                names = (operands,)
            found[name].append(_Instruction(of, operation, _num_bytes(shape), names, rest, bool(root)))
    return found, entry


def _num_bytes(shape: str) -> int:
    arrays = _ARRAY.findall(shape)
    return sum(
        math.prod(int(n) for n in dims.split(",") if n) * max(int(bits or 8), 8) // 8 for _, bits, dims in arrays
    )


def _count(computations: dict[str, list[_Instruction]], name: str) -> Traffic:
    sizes = {i.name: i.num_bytes for i in computations[name]}
    launches = read = written = 0
    for i in computations[name]:
        if i.operation == "while":
            trips, body = _TRIPS.search(i.rest), re.search(r"body=%?([\w.-]+)", i.rest)
            if trips is None or body is None:
                raise ValueError(f"{i.name} runs an unknown number of times")
            inner = _count(computations, body.group(1))
            launches, read, written = (
                x + int(trips.group(1)) * y for x, y in zip((launches, read, written), inner, strict=True)
            )
        elif i.operation not in _FREE:
            given = [sizes[name] for name in i.operands]
            called = re.search(r"calls=%?([\w.-]+)", i.rest)
            inside = computations[called.group(1)] if called else []
            launches, read, written = launches + 1, read + _read(inside, given), written + _written(inside, i.num_bytes)
    return Traffic(launches, read, written)


def _read(inside: list[_Instruction], given: list[int]) -> int:
    """Returns the bytes that a kernel reads of its operands; inside: of a fusion, see `_SLICES`."""
    total = 0
    views = {i.name: i.operands[0] for i in inside if i.operation == "bitcast"}
    parameters = {i.name: int(i.operands[0]) for i in inside if i.operation == "parameter"}
    parts: dict[int, int] = dict.fromkeys(parameters.values(), 0)
    for i in inside:
        for nth, name in enumerate(i.operands if i.operation not in ("parameter", "bitcast") else ()):
            while name in views:
                name = views[name]
            if name in parameters:
                at = parameters[name]
                if nth == 0 and i.operation in _SLICES:
                    parts[at] += i.num_bytes
                elif not (nth == 0 and i.operation in _UPDATES):
                    parts[at] = given[at]
    for at, size in enumerate(given):
        total += min(size, parts.get(at, size))
    return total


def _written(inside: list[_Instruction], size: int) -> int:
    """Returns the bytes that a kernel writes: of an array that a fusion updates in place, the update's."""
    sizes = {i.name: i.num_bytes for i in inside}
    named = {i.name: i for i in inside}
    root = next((i for i in inside if i.root), None)
    while root is not None and root.operation == "bitcast":
        root = named[root.operands[0]]
    return sizes[root.operands[_UPDATES[root.operation]]] if root is not None and root.operation in _UPDATES else size
