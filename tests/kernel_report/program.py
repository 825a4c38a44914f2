"""Arguments and collectives of a compiled program, on each device. Knows jax, no kernels."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import jax

from ksana_jax.lab.trace.collectives import Collective, find_collectives
from tests.kernel_report import report
from tests.kernel_report.report import Memory


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program. Bytes and shapes are of one device.

    hlo: its text. memory: see `report.Memory`. pools: shapes of the pools, see `examine`.
    collectives: number of occurrences of each.
    """

    hlo: str
    memory: Memory
    pools: tuple[tuple[int, ...], ...]
    collectives: collections.Counter[Collective]

    def wrong(self, expected: collections.Counter[Collective] | None, buffer_bytes: int = 0) -> list[str]:
        """Returns problems of the program. expected: collectives; None expects none in particular. buffer_bytes: of
        necessary temporary arrays that are larger than a part of the pool."""
        found = report.judge_program(self.memory, report.find_copies(self.hlo, self.pools), buffer_bytes)
        return found if expected is None else found + report.judge_collectives(self.collectives, expected)

    def plain(self) -> dict[str, Any]:
        """Returns the numbers as plain values."""
        crossing = [collective._asdict() | {"number": number} for collective, number in self.collectives.items()]
        return dataclasses.asdict(self.memory) | {"collectives": crossing}


def examine(lowered: Any, compiled: Any) -> Program:
    """Reads a compiled program. Its pools are its donated arguments, otherwise its largest argument."""
    given = [a for a in _leaves(lowered.args_info, compiled.input_shardings) if a[0] is not None]
    pools = [a for a in given if a[0].donated] or [max(given, key=lambda a: _num_bytes(a[0], a[0].shape))]
    local = [(info, info.shape if at is None else at.shard_shape(info.shape)) for info, at in pools]
    stats, hlo = compiled.memory_analysis(), compiled.as_text()
    pool_bytes = sum(_num_bytes(a, shape) for a, shape in local)
    memory = Memory(
        pool_bytes=pool_bytes,
        part_bytes=min(report.part_size(shape) * a.dtype.itemsize for a, shape in local),
        donated_bytes=pool_bytes if pools[0][0].donated else 0,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        argument_bytes=stats.argument_size_in_bytes,
    )
    return Program(hlo, memory, tuple(shape for _, shape in local), find_collectives(hlo))


def _leaves(*trees: Any) -> Any:
    """Pairs the leaves of trees, None among them: an argument that is None, the sharding of one that is never read."""
    return zip(*(jax.tree.leaves(tree, is_leaf=lambda x: x is None) for tree in trees), strict=True)


def _num_bytes(array: Any, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * array.dtype.itemsize
