"""Reads the launches of an optimised program on a GPU, in order, and the bytes that each reads and writes.

Knows the texts of XLA, its scheduled program and its sequence of thunks; no times.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from pallas_kernels.aot.report import HOLDERS

# Instructions of an entry computation that start nothing on the device.
_NOTHING = frozenset("parameter get-tuple-element bitcast constant tuple after-all partition-id".split())
# Instructions that read only as much of their first operand as they return.
_PARTIAL = frozenset("gather dynamic-slice slice".split())
_RESHAPES = frozenset("bitcast reshape".split())
# Instructions that return their first operand with an update, and the index of the update's operand.
_UPDATES = {"scatter": 2, "dynamic-update-slice": 1}
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_THUNK = re.compile(r"^ *\d+: (k\w+) +\[[^\]]*\] (\w*)(?: grid: \[([\d, ]+)\] threads: \[([\d, ]+)\])?", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a program. type: of its result, with all arrays of a tuple. rest: the text after operands."""

    name: str
    type: str
    operation: str
    operands: tuple[str, ...]
    rest: str

    def called(self) -> str | None:
        """The computation of a fusion."""
        found = re.search(r"\bcalls=%?([\w.-]+)", self.rest)
        return found.group(1) if found else None


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch by a thunk.

    Args:
      name: of the instruction. scope: its place in the model: layer0/attention/hopper_merge/...
      kernel: name of XLA's own machine code in its PTX; "" for a copy, and for kernels of Pallas.
      pallas: the hash of a kernel of Pallas in Mosaic GPU, else "".
      grid, threads: blocks of threads, and threads of each; 0 if the thunk does not say.
      argument_bytes: read from the program's arguments, such as weights. passed_bytes: read from earlier launches'
        results, and written. For Pallas' kernels they are not the bytes that these read.
      flops: of products of matrices, with rows in tiles of 64 as the tensor cores take them.
      type: of the result.
    """

    name: str
    scope: str
    kernel: str
    pallas: str
    grid: int
    threads: int
    argument_bytes: int
    passed_bytes: int
    flops: int
    type: str

    @property
    def product(self) -> bool:
        return self.flops > 0

    @property
    def alike(self) -> tuple[str, str]:
        """Key that launches of the same kind in different layers share."""
        return unnumbered(self.name), self.type


def unnumbered(name: str) -> str:
    """Returns a name without the numbers by which XLA distinguishes its namesakes."""
    return re.sub(r"([._]\d+)+$", "", name)


def read_launches(hlo: str, thunks: str) -> list[Launch]:
    """Returns the launches of a program in order; both texts as XLA dumps them.

    Raises:
      ValueError: the thunks belong to another program.
    """
    computations, entry = _read(hlo)
    values = {i.name: i for i in computations[entry]}
    started = [i for i in computations[entry] if i.operation not in _NOTHING]
    ran = [found.groups() for found in _THUNK.finditer(thunks) if found.group(1) not in HOLDERS]
    if len(started) != len(ran):
        raise ValueError(f"{len(started)} instructions are started by {len(ran)} thunks")
    found = []
    for i, (kind, name, grid, threads) in zip(started, ran):
        own = name if kind == "kCustomKernel" else ""
        if own and unnumbered(own) != unnumbered(i.name):
            raise ValueError(f"{i.name} is started by the thunk of {own}")
        given, passed, flops = _traffic(i, values, computations)
        calls = [x for x in computations.get(i.called() or "", ()) if x.operation == "custom-call"]
        about = calls[0].rest if calls else i.rest  # a fusion may be a call and slices for it
        scope = re.search(r'op_name="(?:jit\([^"/]*\)/)?([^"]*)"', about)
        pallas = re.search(r'kernel_hash = "((?:[^"\\]|\\.)*)"', about)
        blocks, of_block = (math.prod(map(int, text.split(","))) if text else 0 for text in (grid, threads))
        found.append(
            Launch(
                i.name,
                scope.group(1) if scope else "",
                own,
                pallas.group(1) if pallas else "",
                blocks,
                of_block,
                given,
                passed,
                flops,
                i.type,
            )
        )
    return found


def _read(hlo: str) -> tuple[dict[str, list[Instruction]], str]:
    """Instructions of each computation, and the name of the entry computation."""
    found: dict[str, list[Instruction]] = {}
    entry, inside = "", []
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            found[header.group(2)] = inside = []
            entry = header.group(2) if header.group(1) else entry
        elif match := _LINE.match(line):
            name, kind, operation, rest = match.groups()
            operands, _, after = rest.partition(")")
            if operation == "parameter":
                named: tuple[str, ...] = (operands,)
            else:
                named = tuple(re.findall(r"%([\w.-]+)", operands))
            inside.append(Instruction(name, kind, operation, named, after))
    return found, entry


def num_bytes(kind: str) -> int:
    """Returns the bytes of a type: of an array, or of all arrays of a tuple."""
    return sum(
        math.prod(int(n) for n in dims.split(",") if n) * max(int(bits or 8), 8) // 8
        for _, bits, dims in _ARRAY.findall(kind)
    )


def _traffic(
    i: Instruction, values: Mapping[str, Instruction], computations: Mapping[str, Sequence[Instruction]]
) -> tuple[int, int, int]:
    """Bytes read of the program's arguments, bytes read of other values and written, operations."""
    body = computations.get(i.called() or "", ())
    number, update = _updated(body)
    read = [_bytes_read(body, n) if body else num_bytes(values[name].type) for n, name in enumerate(i.operands)]
    written = num_bytes(i.type)
    if number is not None:  # in place: the updated part is read and written, the rest is not touched
        read[number], written = update, update
    given = [_is_argument(values, name) for name in i.operands]
    from_arguments = sum(size for size, is_given in zip(read, given) if is_given)
    return from_arguments, sum(read) - from_arguments + written, sum(map(_flops_in(body), body))


def _updated(body: Sequence[Instruction]) -> tuple[int | None, int]:
    """The parameter that a fusion returns updated, None without, and the bytes of the update."""
    inside = {i.name: i for i in body}
    i = body[-1] if body else None
    while i is not None and i.operation in _RESHAPES:
        i = inside.get(i.operands[0])
    if i is None or i.operation not in _UPDATES:
        return None, 0
    update = num_bytes(inside[i.operands[_UPDATES[i.operation]]].type)
    i = inside[i.operands[0]]
    while i.operation in _RESHAPES:
        i = inside[i.operands[0]]
    return (int(i.operands[0]), update) if i.operation == "parameter" else (None, 0)


def _is_argument(values: Mapping[str, Instruction], name: str) -> bool:
    while values[name].operation in _RESHAPES:
        [name] = values[name].operands
    return values[name].operation == "parameter"


def _bytes_read(body: Sequence[Instruction], number: int) -> int:
    """Bytes that a fusion reads of one of its parameters: all of it, unless it only takes pieces."""
    [parameter] = [i for i in body if i.operation == "parameter" and i.operands == (str(number),)]
    waiting, pieces = [parameter.name], 0
    while waiting:
        name = waiting.pop()
        for user in (i for i in body if i.operation != "parameter" and name in i.operands):
            if user.operation in _RESHAPES:
                waiting.append(user.name)
            elif user.operation in _PARTIAL and user.operands[0] == name:
                pieces += num_bytes(user.type)
            else:
                return num_bytes(parameter.type)
    return min(pieces, num_bytes(parameter.type))


def _flops_in(body: Sequence[Instruction]):
    """Returns a function that counts the operations of an instruction of a fusion."""
    types = {i.name: i.type for i in body}

    def count(i: Instruction) -> int:
        if i.operation != "dot":
            return 0
        left, right = (_dims(types[name]) for name in i.operands)
        batch = [left[n] for n in _numbers("lhs_batch_dims", i.rest)]
        inner = [left[n] for n in _numbers("lhs_contracting_dims", i.rest)]
        rows, columns = (math.prod(x) // math.prod([*batch, *inner]) for x in (left, right))
        # Either side may be the one with few rows.
        few, many = sorted((rows, columns))
        return 2 * math.prod(batch) * math.prod(inner) * many * -(-few // 64) * 64

    return count


def _dims(kind: str) -> list[int]:
    found = _ARRAY.search(kind)
    assert found is not None, kind
    return [int(n) for n in found.group(3).split(",") if n]


def _numbers(name: str, text: str) -> list[int]:
    found = re.search(rf"\b{name}=\{{([\d,]*)\}}", text)
    return [int(n) for n in found.group(1).split(",") if n] if found else []
