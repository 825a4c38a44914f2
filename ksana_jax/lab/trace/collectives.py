"""Collectives of a compiled program, read from its optimised HLO."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import NamedTuple


class Collective(NamedTuple):
    """An operation that exchanges arrays between devices. bytes: of its result on each device."""

    kind: str
    bytes: int


_KINDS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")
_COLLECTIVE = re.compile(rf"= (.*?) ((?:ragged-)?(?:{'|'.join(_KINDS)}))(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


def find_collectives(hlo: str) -> Counter[Collective]:
    """Counts the collectives of an optimised program, each occurrence once, however often it runs."""
    found: Counter[Collective] = Counter()
    # The pattern tries each place of a line: only those that have a chance, of a text of many megabytes.
    lines = "\n".join(line for line in hlo.splitlines() if any(kind in line for kind in _KINDS))
    for shapes, kind, started in _COLLECTIVE.findall(lines):
        # Starts have their arguments next to their result; only sums have their results alone, or from jax 0.11 on
        # with their arguments as a tuple before them.
        results = shapes.partition("), ")[2] if shapes.startswith("((") else shapes
        sizes = [_num_bytes(*array) for array in _ARRAY.findall(results if kind == "all-reduce" else shapes)]
        found[Collective(kind, max(sizes) if started and kind != "all-reduce" else sum(sizes))] += 1
    return found


def _num_bytes(dtype: str, bits: str, dims: str) -> int:
    """Bytes of an array in a program: f32[8,16], f8e4m3fn[4], pred[]."""
    return math.prod(int(n) for n in dims.split(",") if n) * max(int(bits or 8), 8) // 8
