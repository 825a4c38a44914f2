"""Parts of the model, and each one's share of the device's time in a profile.

The network opens a `jax.named_scope` around each part. XLA keeps the scopes with every operation of a compiled program,
and the profiler records when each operation ran.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

# Named scopes of models/, ops/ and sampling/. An operation belongs to the innermost of its scopes. Where weights are
# packed, one call has the output projection, the norms of a layer and its MLP: "mlp".
PARTS = ("embed", "norm", "qkv", "rope", "kv_write", "attention", "output", "mlp", "logits", "sampling")
OTHER = "other"
# Name of the mark in a profile where a call of steps begins.
CALL = "engine step"

_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?\bmetadata=\{[^}]*?op_name=\"([^\"]*)\"", re.M)


def part_of(op_name: str) -> str:
    """Returns the part of an operation from its scopes, such as "jit(step_layers)/mlp/norm/mul"; or "other"."""
    return next((scope for scope in reversed(op_name.split("/")) if scope in PARTS), OTHER)


def parts_of_operations(hlo: str) -> dict[str, str]:
    """Returns the part of each operation in the text of an HLO module that has one."""
    return {name: part for name, scopes in _OPERATION.findall(hlo) if (part := part_of(scopes)) != OTHER}


class Operation(NamedTuple):
    """One run of an operation in a profile: on a line of events, from start to end in nanoseconds."""

    line: Any
    module: str
    program: Any
    name: str
    start_ns: float
    end_ns: float


class HasParts(Protocol):
    """Fields read from a `functions.Program`."""

    module: str
    parts: dict[str, str]


def operations(folder: Path) -> list[Operation]:
    """Reads the operations of the newest profile in a folder that `jax.profiler` wrote."""
    found = []
    for line, event, stats in _events(folder):
        if "hlo_op" in stats and "hlo_module" in stats:
            start, end = event.start_ns, event.start_ns + event.duration_ns
            module, program = str(stats["hlo_module"]), stats.get("program_id")
            found.append(Operation(line, module, program, str(stats["hlo_op"]), start, end))
    return found


def _events(folder: Path) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Yields the events of the newest profile in a folder, each with its line and its statistics."""
    import jax

    for file in sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)[-1:]:
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for number, line in enumerate(plane.lines):
                for event in line.events:
                    yield (plane.name, number), event, dict(event.stats)


def call_starts(folder: Path) -> dict[int, float]:
    """Returns the nanosecond at which each call of `Profiler.calls` began, by its number."""
    return {int(stats["call"]): event.start_ns for _, event, stats in _events(folder) if event.name == CALL}


def parted(ran: Iterable[Operation], programs: Sequence[HasParts]) -> list[tuple[Operation, str, float]]:
    """Returns operations with their parts and the seconds that they ran, without those that ran inside them.

    A profile names a program's module, which programs for several shapes share: of these, the programs with every
    observed operation decide, by majority.
    """
    by_program: dict[Any, list[tuple[Operation, float]]] = collections.defaultdict(list)
    for operation, own_ns in _own_times(ran):
        by_program[operation.module, operation.program].append((operation, own_ns))
    found = []
    for (module, _), runs in by_program.items():
        part = _voted({operation.name for operation, _ in runs}, [p.parts for p in programs if p.module == module])
        found += [(operation, part.get(operation.name, OTHER), own_ns / 1e9) for operation, own_ns in runs]
    return found


def seconds_by_part(ran: Iterable[tuple[Operation, str, float]]) -> dict[str, float]:
    """Returns the sum of the seconds of each part in the result of `parted`."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for _, part, own_s in ran:
        seconds[part] += own_s
    return {part: seconds[part] for part in (*PARTS, OTHER) if part in seconds}


@dataclasses.dataclass
class _Run:
    operation: Operation
    own_ns: float


def _own_times(ran: Iterable[Operation]) -> list[tuple[Operation, float]]:
    """Returns each operation with its time minus the time of the operations that it contains."""
    found: list[_Run] = []
    for line in _by_line(ran).values():
        around: list[_Run] = []
        for operation in sorted(line, key=lambda o: (o.start_ns, -o.end_ns)):
            while around and around[-1].operation.end_ns <= operation.start_ns:
                around.pop()
            run = _Run(operation, operation.end_ns - operation.start_ns)
            if around:
                around[-1].own_ns -= run.own_ns
            around.append(run)
            found.append(run)
    return [(run.operation, max(run.own_ns, 0.0)) for run in found]


def _by_line(ran: Iterable[Operation]) -> dict[Any, list[Operation]]:
    lines: dict[Any, list[Operation]] = collections.defaultdict(list)
    for operation in ran:
        lines[operation.line].append(operation)
    return lines


def _voted(names: set[str], candidates: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Returns the part of each operation by the majority of the programs that may have run."""
    known = [len(names & candidate.keys()) for candidate in candidates]
    best = [c for c, count in zip(candidates, known, strict=True) if count == max(known)]
    votes = {name: collections.Counter(c[name] for c in best if name in c) for name in names}
    return {name: count.most_common(1)[0][0] for name, count in votes.items() if count}
