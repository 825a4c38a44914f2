"""Functions compiled during a trace: their texts in a folder, costs, and reasons of compilation."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from pathlib import Path
from typing import Any

from ksana_jax.lab.trace.collectives import find_collectives
from ksana_jax.lab.trace.parts import parts_of_operations
from ksana_jax.runner import compiling
from ksana_jax.runner.decode_loop import LoopKey
from ksana_jax.runner.step_runs import compiled_programs
from ksana_jax.scheduler.step.types import StepShape

# Fields of XLA's memory analysis, in bytes, by the names that a trace gives them.
MEMORY = {
    "argument_bytes": "argument_size_in_bytes",
    "output_bytes": "output_size_in_bytes",
    "alias_bytes": "alias_size_in_bytes",
    "temp_bytes": "temp_size_in_bytes",
    "code_bytes": "generated_code_size_in_bytes",
}


@dataclasses.dataclass
class Program:
    """One XLA program of a compiled function.

    calls: how often one call of the function runs it. flops, bytes_accessed: of one run by XLA's count, which is
    0 for a custom call and has the body of a loop once; None where XLA has none.
    parts: {HLO operation: part of the model}, see `parts`.
    collectives: exchanges of devices in one run: kind, bytes of each on a device, number.
    """

    module: str
    calls: int
    flops: float | None
    bytes_accessed: float | None
    memory: dict[str, int]
    num_custom_calls: int
    files: dict[str, str]
    parts: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)
    collectives: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class CompiledFunction:
    """A compiled function: a step of one shape, which on a CPU is several programs, or sampling, or a move of blocks.

    step: number of the step that had to wait for it; None outside of steps. reason: of its compilation there.
    """

    number: int
    key: Any
    name: str
    traced_s: float
    compiled_s: float
    programs: list[Program]
    engine: int | None = None
    step: int | None = None
    reason: str | None = None

    @property
    def flops(self) -> float | None:
        """Floating-point operations of one call; None where XLA does not count them."""
        return _total(self.programs, "flops")

    @property
    def bytes_accessed(self) -> float | None:
        """Bytes that one call's operations read and write; None where XLA does not count them."""
        return _total(self.programs, "bytes_accessed")

    def plain(self) -> dict[str, Any]:
        """Returns the function as plain values for JSON."""
        programs = [{k: v for k, v in vars(p).items() if k != "parts"} for p in self.programs]
        totals = {"flops": self.flops, "bytes_accessed": self.bytes_accessed}
        return {k: v for k, v in vars(self).items() if k not in ("key", "programs")} | totals | {"programs": programs}


def _total(programs: list[Program], name: str) -> float | None:
    found = [getattr(p, name) for p in programs]
    return None if None in found else sum(n * p.calls for n, p in zip(found, programs, strict=True))


class CompilationLog:
    """Observes `runner.compiling` as a context: writes the texts of each function to a folder and keeps the rest.

    Attributes:
      functions: in order of compilation.
      writing_s: seconds spent here so far, which are not the engine's.
    """

    def __init__(self, folder: Path):
        self.functions: list[CompiledFunction] = []
        self.writing_s = 0.0
        self._folder, self._jaxprs, self._lock = folder, {}, threading.Lock()

    def __enter__(self) -> CompilationLog:
        compiling.observers.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        compiling.observers.remove(self)

    def lowered(self, lowered: Any, jaxpr: Any) -> None:
        """See `compiling.CompilationObserver`."""
        with self._lock:
            self._jaxprs[id(lowered)] = jaxpr

    def compiled(self, key: Any, lowered: Any, function: Any, traced_s: float, compiled_s: float) -> None:
        """See `compiling.CompilationObserver`."""
        began = time.perf_counter()
        sources = getattr(lowered, "programs", (lowered,))
        calls = getattr(lowered, "calls", (1,) * len(sources))
        with self._lock:
            made = CompiledFunction(len(self.functions) + 1, key, name_of(key), traced_s, compiled_s, [])
            self.functions.append(made)
            jaxprs = [self._jaxprs.pop(id(source), None) for source in sources]
        folder = self._folder / f"{made.number:03d}-{slug(made.name)}"
        for program in zip(sources, jaxprs, compiled_programs(function), calls, strict=True):
            made.programs.append(_write(folder, *program, base=self._folder.parent))
        with self._lock:
            self.writing_s += time.perf_counter() - began


def _write(folder: Path, lowered: Any, jaxpr: Any, compiled: Any, calls: int, *, base: Path) -> Program:
    """Writes the texts of a program, named after its module; returns its costs."""
    hlo = compiled.as_text() or ""
    found = re.match(r"HloModule (\S+?)[,\s]", hlo)
    module = found[1] if found else "program"
    texts = {"jaxpr": (".jaxpr.txt", str(jaxpr)), "stablehlo": (".stablehlo.mlir", lowered.as_text())}
    texts["hlo"] = (".hlo.txt", hlo)
    folder.mkdir(parents=True, exist_ok=True)
    # Two kinds of layers of one step have the same name.
    stem = module if not (folder / f"{module}.hlo.txt").exists() else f"{module}-{len(list(folder.iterdir()))}"
    files = {}
    for kind, (suffix, text) in texts.items():
        path = folder / f"{stem}{suffix}"
        path.write_text(text, encoding="utf-8")
        files[kind] = path.relative_to(base).as_posix()
    crossing = [collective._asdict() | {"number": number} for collective, number in find_collectives(hlo).items()]
    called = hlo.count("custom-call(")
    return Program(module, calls, *costs_of(compiled), called, files, parts_of_operations(hlo), crossing)


def costs_of(compiled: Any) -> tuple[float | None, float | None, dict[str, int]]:
    """Returns the operations, the bytes accessed and the memory analysis of a `jax.stages.Compiled`."""
    costs, memory = compiled.cost_analysis(), compiled.memory_analysis()
    costs = (costs[0] if isinstance(costs, list) else costs) or {}
    found = {} if memory is None else {name: int(getattr(memory, field, 0)) for name, field in MEMORY.items()}
    return costs.get("flops"), costs.get("bytes accessed"), found


def name_of(key: Any) -> str:
    """Names a compiled function: "step 32x1 + 4x64, tables of 16", "sample 8, ..."."""
    if isinstance(key, StepShape):
        parts = " + ".join(f"{count}x{width}" for count, width in key.parts)
        shared = f", groups of {key.shared_rows}" if key.shared_rows else ""
        return f"step {parts}, tables of {key.table_width}{shared}"
    if isinstance(key, LoopKey):
        asked = ["by temperature"] * key.samples + [f"{key.num_top} log-probabilities"] * (key.num_top is not None)
        times = f"{key.num_steps} times " if key.num_steps > 1 else ""
        return ", ".join([f"{times}{name_of(key.shape)}", *(asked or ["greedy"])])
    if isinstance(key, tuple) and key[:1] == ("sample",) and len(key) == 7:
        _, _, count, settings, dense, masks, top = key
        asked = ["by temperature"] * bool(settings) + ["penalties and biases"] * bool(dense) + ["masks"] * bool(masks)
        asked += [] if top is None else [f"{top} log-probabilities"]
        return ", ".join([f"sample {count}", *(asked or ["greedy"])])
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def slug(name: str) -> str:
    """Returns a name as a part of a path."""
    return re.sub(r"[^a-zA-Z0-9]+", "-", name).strip("-").lower()


def reason_of(key: Any, before: list[Any]) -> str:
    """Explains why a step compiled a function although others were compiled before.

    Args:
      before: keys of the functions compiled so far.
    """
    steps = [k for k in before if isinstance(k, StepShape)]
    if not isinstance(key, StepShape):
        same = [k for k in before if type(k) is type(key) and k[:1] == key[:1]]
        return f"the first call of {name_of(key)!r}" + (f"; compiled were {', '.join(map(name_of, same))}" * bool(same))
    if not steps:
        return "no step was compiled before"

    def differing(other: StepShape) -> list[str]:
        return [field for field in key._fields if getattr(key, field) != getattr(other, field)]

    nearest = min(steps, key=lambda other: len(differing(other)))
    changes = [
        f"{field} {_shown(getattr(nearest, field))} -> {_shown(getattr(key, field))}" for field in differing(nearest)
    ]
    return f"no step of this shape was compiled; from the nearest one: {', '.join(changes)}"


def _shown(value: Any) -> str:
    return " + ".join(f"{count}x{width}" for count, width in value) if isinstance(value, tuple) else str(value)
