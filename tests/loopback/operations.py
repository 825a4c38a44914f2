"""Lists the StableHLO operations of a program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

DYNAMIC_WHILE = "dynamic while"


def operations_of(code: bytes) -> dict[str, set[str]]:
    """Returns {operation: element types of its operands and results} of a portable artifact.

    Loops whose number of turns is no constant of the program are also listed as `DYNAMIC_WHILE`.
    """
    from jax._src.interpreters import mlir
    from jaxlib.mlir.dialects import stablehlo

    with mlir.make_ir_context() as context:
        return operations_in(stablehlo.deserialize_portable_artifact(context, code))


def operations_in(module: Any) -> dict[str, set[str]]:
    """Returns {operation: element types of its operands and results} of a module."""
    from jaxlib.mlir import ir

    found: dict[str, set[str]] = {}
    for op in _walk(module.operation):
        types = (value.type for value in (*op.results, *op.operands))
        tensors = {str(ir.RankedTensorType(t).element_type) for t in types if isinstance(t, ir.RankedTensorType)}
        found.setdefault(op.name, set()).update(tensors)
        if op.name == "stablehlo.while" and not _has_constant_turns(op):
            found.setdefault(DYNAMIC_WHILE, set())
    return found


def _walk(op: Any) -> Iterator[Any]:
    yield op
    for region in op.regions:
        for block in region:
            for child in block:
                yield from _walk(child.operation)


def _has_constant_turns(loop: Any) -> bool:
    """True if a loop compares one of its variables with a constant, as jax writes loops of static length."""
    from jaxlib.mlir import ir

    [block] = loop.regions[0]
    [condition] = list(block)[-1].operation.operands
    compare = condition.owner
    if isinstance(compare, ir.Block) or compare.name != "stablehlo.compare":
        return False
    sides = [value.owner for value in compare.operands]
    constants = [not isinstance(side, ir.Block) and side.name == "stablehlo.constant" for side in sides]
    return constants == [False, True] and isinstance(sides[0], ir.Block)
