"""The model of speed for one compiled program: from its cubins to rows of the report."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.speed import parts, predict, sass
from pallas_kernels.speed.chip import H200, Chip
from pallas_kernels.speed.predict import Machine, Model

# Targets whose chip the model knows.
CHIPS = {"h200": H200}


def read_machines(folder: Path, kernels: Sequence[Any], arch: str, ptxas: str, nvdisasm: str) -> dict[str, Machine]:
    """Returns the machine code of kernels by name.

    Args:
      folder: where `aot.report.read_kernels` has found the kernels.
      kernels: those, `aot.report.Kernel`.

    Raises:
      ValueError: a kernel's code is missing, or cannot be read.
    """
    for path in folder.glob("*.ptxas"):  # Mosaic GPU keeps no cubin
        ptx = path.with_suffix(".ptx")
        command = [ptxas, f"-arch={arch}", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"ptxas: {' '.join(done.stderr.split())[:300]}")
    functions = {}
    for path in sorted(folder.glob("*.cubin")):
        for name, function in sass.disassemble(path, nvdisasm).items():
            functions[name.removesuffix("_mosaic_gpu_kernel")] = function
    found = {}
    for kernel in kernels:
        if kernel.kernel not in functions:
            raise ValueError(f"no machine code of {kernel.kernel}")
        function = functions[kernel.kernel]
        # Where roles differ, one warpgroup copies for the others.
        copies = any(i.name == "USETMAXREG" for i in function.code)
        found[kernel.kernel] = Machine(
            parts.find_parts(function),
            resident=H200.resident(kernel.registers, kernel.threads, kernel.shared_bytes),
            warpgroups=max(kernel.threads // 128 - copies, 1),
        )
    return found


def describe(machine: Machine, chip: Chip) -> dict[str, Any]:
    """Returns the columns of a kernel's row: its inner loop, or all of it without one.

    Returns:
      "turn": instructions of a warp by kind. "cycles": of a turn of all blocks of a multiprocessor.
      "blocks": that fit one. "limit": of a turn, apart from memory. "stages": turns whose data is requested ahead.
    """
    own = machine.parts
    part = "turn" if own.turn else "before"
    timing = machine.simulated(part, chip, machine.resident, chip.l1_latency)
    return {
        "turn": parts.count(getattr(own, part)),
        "cycles": round(timing.cycles),
        "busy": {pipe: round(cycles) for pipe, cycles in timing.busy.items()},
        "blocks": machine.resident,
        "stages": own.stages,
        "limit": predict.limit_of_turn(timing),
    }


def examine(machines: Mapping[str, Machine], model: Model, chip: Chip) -> dict[str, Any]:
    """Returns a program's columns: "predictions" of each shape, and the first one's share, TFLOP/s and limit."""
    found = [prediction.plain() for prediction in model.predict(machines, chip)]
    first = found[0]
    return {
        "predicted_share": first["share"] or None,
        "predicted_tflops": first["tflops"] or None,
        "limit": first["limit"],
        "predictions": found,
    }
