"""Runs a jax function on the CPU with its Mosaic GPU kernels in the emulator; needs the CUDA plugin and ptxas.

The function is traced. Each kernel in it is compiled for the target separately, by the real compiler, and the resulting
PTX is emulated; everything else is evaluated by jax on the CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from pallas_kernels import aot
from tests.emulator.host import Launch, read_launch
from tests.emulator.kernel import Kernel
from tests.emulator.memory import Global

# Equations that are a kernel, by the versions of jax; calls are looked into.
_KERNELS = ("mpmd_map", "core_map", "pallas_call")
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_vmap_call": "call"}


@dataclasses.dataclass(frozen=True)
class _Call:
    """A compiled kernel, and the sources and destinations of its arrays.

    Args:
      operands: for each array that the call reads, the number of the equation's input.
      outputs: shapes and dtypes of the written arrays.
      aliases: outputs that are operands: {output: operand}.
      results: for each result of the equation, the number of the output.
    """

    kernel: Kernel
    launch: Launch
    operands: list[int]
    outputs: list[jax.ShapeDtypeStruct]
    aliases: dict[int, int]
    results: list[int]


def run(function: Callable, *args, target: str, seed: int):
    """As `tests.emulator.run`."""
    if line := aot.missing():
        raise RuntimeError(line)
    chip = aot.target(target)
    with aot.described(chip):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    evaluation = _Evaluation(chip, seed)
    out = evaluation.run(closed.jaxpr, closed.consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), out)


def _inner(equation):
    """The jaxpr of a call."""
    name = _CALLS.get(equation.primitive.name)
    return equation.params[name] if name else None


def _has_kernel(equation) -> bool:
    if equation.primitive.name in _KERNELS:
        return True
    for value in equation.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(one, "jaxpr", one)
            if hasattr(inner, "eqns") and any(map(_has_kernel, inner.eqns)):
                return True
    return False


class _Evaluation:
    """A jaxpr on the CPU, kernels apart."""

    def __init__(self, chip: aot.Target, seed: int):
        self.chip, self.seed = chip, seed

    def run(self, jaxpr, consts, args) -> list:
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))
        made_by: dict[Any, Any] = {}  # references by the equation that makes them; their value is in `values`
        waiting: list[Any] = []

        def read(x):
            return x.val if isinstance(x, core.Literal) else values[x]

        def flush(until: int):
            if waiting:
                later = [x for e in jaxpr.eqns[until:] for x in e.invars] + jaxpr.outvars
                needed = {x for x in later if not isinstance(x, core.Literal)}
                _compute(waiting, values, needed)
                waiting.clear()

        for i, equation in enumerate(jaxpr.eqns):
            name = equation.primitive.name
            if name in ("new_ref", "ref", "mutable_array"):
                flush(i)
                (reference,) = equation.outvars
                values[reference], made_by[reference] = read(equation.invars[0]), equation
            elif name in ("freeze", "free_ref"):
                for result in equation.outvars:
                    values[result] = values[equation.invars[0]]
            elif not _has_kernel(equation):
                waiting.append(equation)
            elif (inner := _inner(equation)) is not None:
                flush(i)
                out = self.run(inner.jaxpr, inner.consts, [read(x) for x in equation.invars])
                values |= dict(zip(equation.outvars, out))
            elif name in _KERNELS:
                flush(i)
                references = [(j, made_by[x]) for j, x in enumerate(equation.invars) if x in made_by]
                inputs = [np.asarray(read(x)) for x in equation.invars]
                out = self._kernel(equation, references, inputs)
                values |= dict(zip(equation.outvars, out))
                for (j, _), x in zip(references, out[len(equation.outvars) :]):
                    values[equation.invars[j]] = x
            else:
                raise NotImplementedError(f"a kernel inside of {name}")
        flush(len(jaxpr.eqns))
        return [read(x) for x in jaxpr.outvars]

    def _kernel(self, equation, references, inputs: list[np.ndarray]) -> list:
        """Results of a kernel, then the new arrays behind its references."""
        call = _compile(equation, references, inputs, self.chip)
        memory = Global()
        arrays = [_bytes(inputs[i]) for i in call.operands]
        addresses = [memory.add(x, f"input {i}") for x, i in zip(arrays, call.operands)]
        for i, output in enumerate(call.outputs):
            if i in call.aliases:
                arrays.append(arrays[call.aliases[i]])
                addresses.append(addresses[call.aliases[i]])
            else:
                arrays.append(np.full(_num_bytes(output), 0xFF, np.uint8))
                addresses.append(memory.add(arrays[-1], f"output {i}"))
        launch = call.launch
        params = [0 if p is None else addresses[p[0]] + p[1] for p in launch.params]
        maps = {where: tensor.at(addresses[tensor.buffer]) for where, tensor in launch.tensor_maps.items()}
        call.kernel.run(memory, params, tensor_maps=maps, seed=self.seed)
        written = arrays[len(call.operands) :]
        return [_array(written[i], call.outputs[i]) for i in call.results]


def _compute(equations: Sequence[Any], values: dict, needed: set) -> None:
    """Evaluates equations without a kernel, as one jitted function."""
    made = [x for e in equations for x in e.outvars]
    read = [x for e in equations for x in e.invars if not isinstance(x, core.Literal)]
    taken = [x for x in dict.fromkeys(read) if x not in set(made)]
    given = [x for x in made if x in needed]

    def compute(*args):
        local = dict(zip(taken, args))
        for e in equations:
            inputs = [x.val if isinstance(x, core.Literal) else local[x] for x in e.invars]
            local |= dict(zip(e.outvars, _bind(e, inputs)))
        return [local[x] for x in given]

    values |= dict(zip(given, jax.jit(compute)(*(values[x] for x in taken))))


def _bind(equation, inputs: Sequence[Any]) -> Sequence[Any]:
    """Results of an equation of other inputs."""
    params, functions = equation.primitive.get_bind_params(equation.params), ()
    if isinstance(params, tuple):  # of some versions of jax
        functions, params = params
    # Not in the equation's own context, which since jax 0.11 says that this is a GPU.
    out = equation.primitive.bind(*functions, *inputs, **params)
    return out if equation.primitive.multiple_results else [out]


_compiled: dict[str, tuple[Kernel, Launch]] = {}


def _compile(equation, references, inputs, chip: aot.Target) -> _Call:
    by_input = dict(references)

    def alone(*arrays):
        given, made = list(arrays), []
        for j, maker in by_input.items():
            given[j] = maker.primitive.bind(arrays[j], **maker.params)
            made.append(given[j])
        return (*_bind(equation, given), *(jax.freeze(x) for x in made))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    lowered = aot.lower(chip, alone, *shapes, donate_argnums=tuple(by_input))
    operation, ends = _custom_call(lowered)
    digest = str(operation.attributes["mhlo.backend_config"]["kernel_hash"])
    if digest not in _compiled:
        _compiled[digest] = _build(lowered)
    kernel, launch = _compiled[digest]
    attributes = operation.attributes
    text = str(attributes["output_operand_aliases"]) if "output_operand_aliases" in attributes else ""
    aliases = re.findall(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)", text)
    operands = []
    for x in operation.operands:
        if not hasattr(x, "arg_number") and "BlockArgument" not in type(x).__name__:
            raise NotImplementedError(f"an operand of a kernel that is computed: {x}")
        operands.append(x.arg_number)
    returned = jax.eval_shape(alone, *shapes)
    results = [x.result_number for x in ends]
    outputs = {number: shape for number, shape in zip(results, returned)}
    assert sorted(outputs) == list(range(len(operation.results))), "results of a kernel that nobody takes"
    return _Call(
        kernel,
        launch,
        operands,
        [outputs[i] for i in range(len(outputs))],
        {int(i or 0): int(j) for i, j in aliases},
        results,
    )


def _custom_call(lowered):
    """The call of Mosaic GPU in a lowered function, and the function's results."""
    module = lowered.compiler_ir("stablehlo")
    main = next(op for op in module.body.operations if str(op.attributes["sym_name"]) == '"main"')
    operations = list(main.regions[0].blocks[0].operations)
    targets = [op.attributes["call_target_name"] if "call_target_name" in op.attributes else "" for op in operations]
    found = [op for op, target in zip(operations, targets) if "mosaic_gpu" in str(target)]
    if len(found) != 1:
        raise NotImplementedError(f"{len(found)} Mosaic GPU kernels in one equation")
    return found[0].operation, list(operations[-1].operands)


@functools.cache
def _dump_folder() -> tempfile.TemporaryDirectory:
    """Creates the folder for this process's PTX; it is deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix="ptx-")


def _build(lowered) -> tuple[Kernel, Launch]:
    """Compiles a call of one kernel and reads the compiler's files."""
    if "MOSAIC_GPU_DUMP_TO" not in os.environ:
        os.environ["MOSAIC_GPU_DUMP_TO"] = _dump_folder().name
    folder = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    before = set(folder.glob("*.ptx"))
    config: Any = jax.config
    cached = config.jax_enable_compilation_cache  # a program that is taken from there leaves nothing
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        lowered.compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)
    found = set(folder.glob("*.ptx")) - before
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} new PTX files in {folder}; set MOSAIC_GPU_DUMP_TO before jax is imported")
    path = found.pop()
    launch = read_launch(path.with_suffix(".mlir-passes.log").read_text())
    kernel = Kernel(path.read_text(), grid=launch.grid, threads=launch.threads, shared_bytes=launch.shared_bytes)
    return kernel, launch


def _num_bytes(x) -> int:
    count = math.prod(x.shape)
    return count // 2 if x.dtype == jnp.int4 else count * x.dtype.itemsize


def _bytes(x: np.ndarray) -> np.ndarray:
    """A copy as bytes. XLA packs two numbers of 4 bits into a byte, the first one below."""
    if x.dtype == jnp.int4:
        low, high = x.reshape(-1, 2).astype(np.int8).view(np.uint8).T & 15
        return low | high << 4
    return np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8).copy()


def _array(x: np.ndarray, like) -> np.ndarray:
    return x.view(like.dtype).reshape(like.shape)
