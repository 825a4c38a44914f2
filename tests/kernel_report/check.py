"""Compiles every case for an absent GPU, and reports. Fails on kernels that would be slow or would not start.

Each case is compiled by a separate process: a compiler that crashes or hangs costs its case only, and Mosaic GPU,
which reports a kernel only the first time it meets it, has met none.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ksana_jax.lab.trace.collectives import Collective
from pallas_kernels import aot
from tests.kernel_report import report, sass
from tests.kernel_report.traffic import count_traffic

# Functions Target -> list[Case], as "module:function"; a module is imported when its cases are asked for.
SOURCES = tuple(f"tests.kernel_report.{name}:cases" for name in ("cases", "engine_cases", "recurrent_cases"))
TIMEOUT_S = 600.0
_COLUMNS = {
    "registers": "registers",
    "spill_bytes": "spilled",
    "stack_bytes": "stack",
    "shared_bytes": "shared",
    "grid": "grid",
    "threads": "threads",
    "wgmma": "wgmma",
    "tma_loads": "TMA loads",
    "mma_sync": "mma.sync",
    "cp_async": "cp.async",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration of one kernel, or of a program with kernels in it.

    Args:
      config: distinguishes it from others of that name.
      lower: the program lowered for a target, mostly by `aot.lower`. Its pool is the argument that it donates; without
        one, its largest argument.
      collectives: the exact collectives that the program must have; None: of one device, or not judged.
      buffer_bytes: see `Program.wrong`.
      least_bytes: that the program must read and write; its launches and bytes are reported too. None: they are not.
    """

    name: str
    config: dict[str, Any]
    lower: Callable[[aot.Target], Any]
    collectives: Counter[Collective] | None = None
    buffer_bytes: int = 0
    least_bytes: int | None = None

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.config.items())])


def find_cases(target: aot.Target, sources: Sequence[str] = SOURCES) -> list[tuple[str, int, Case]]:
    """All cases for a target; another process finds each by its source and its number there."""
    found = []
    for source in sources:
        module, function = source.split(":")
        cases = getattr(importlib.import_module(module), function)(target)
        found += [(source, index, case) for index, case in enumerate(cases)]
    return found


def compile_case(case: Case, target: aot.Target, folder: Path) -> list[dict[str, Any]]:
    """Compiles a case; for a process that began with `_environment(folder)`.

    Returns:
      a row for each of its Pallas kernels; one row without any. "reason" says why it is rejected, or None.
    """
    from tests.kernel_report.program import examine

    began = time.perf_counter()
    lowered = case.lower(target)
    compiled = lowered.compile(compiler_options={"xla_dump_to": str(folder), "xla_dump_emitter_re": "ptx"})
    seconds = round(time.perf_counter() - began, 2)
    program = examine(lowered, compiled)
    ptxas = aot.find_ptxas()
    assert ptxas is not None
    kernels = report.read_kernels(folder, program.hlo, target.arch, ptxas, sass.find_nvdisasm())
    wrong = program.wrong(case.collectives, case.buffer_bytes)
    after = next(folder.glob("*thunk_sequence_after_thunk_passes.txt"), None)
    thunks = after.read_text() if after else ""
    inside, outside = report.count_thunks(thunks)
    about = program.plain() | {"thunks": inside.total() + outside.total(), "captured": inside.total()}
    about["seconds"] = seconds
    if case.least_bytes is not None:
        about |= count_traffic(program.hlo)._asdict() | {"least_bytes": case.least_bytes}
    if not kernels:
        return [row_of(case, wrong) | dict.fromkeys(f.name for f in dataclasses.fields(report.Kernel)) | about]
    return [
        row_of(case, [*wrong, *report.judge_kernel(kernel, target.shared_bytes)]) | dataclasses.asdict(kernel) | about
        for kernel in kernels
    ]


def row_of(case: Case, wrong: Sequence[str]) -> dict[str, Any]:
    return {"name": case.name, "config": case.config, "reason": "; ".join(wrong) or None}


def _environment(folder: Path) -> dict[str, str]:
    """Environment to set before jax is imported. A program taken from the cache would leave no report."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MOSAIC_GPU_") and k != "XLA_FLAGS"}
    roots = [str(Path(__file__).parents[2]), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "MOSAIC_GPU_DUMP_TO": str(folder),
        "PYTHONPATH": os.pathsep.join(roots),
    }


def _check_in_process(source: str, index: int, case: Case, target: aot.Target, timeout_s: float) -> list[dict]:
    """Rows of a case, from a separate process."""
    folder = Path(tempfile.mkdtemp(prefix="pallas_kernels-"))
    try:
        said = folder / "said"
        command = [sys.executable, "-m", "tests.kernel_report", "--target", target.name]
        command += ["--case", source, str(index), str(folder)]
        with said.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=_environment(folder), start_new_session=True
            )
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return [row_of(case, [f"not compiled after {timeout_s:g} s"])]
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # and the ptxas that it has started
                    process.wait()
        rows = folder / "rows.json"
        if code == 0 and rows.exists():
            return json.loads(rows.read_text())
        words = said.read_text(errors="replace").strip().splitlines() or ["nothing"]
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return [row_of(case, [f"the compiler ended with {how}; its last words: {words[-1][:300]}"])]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check(
    name: str,
    *,
    only: str = "",
    chosen: Callable[[Case], bool] = lambda case: True,
    sources: Sequence[str] = SOURCES,
    jobs: int | None = None,
    timeout_s: float = TIMEOUT_S,
    show: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Compiles all cases for a target, shows a line for each kernel, and returns all as one JSON object.

    Args:
      only: regular expression; selects cases where it occurs in "name key=value ...". chosen: selection among these.
      jobs: processes at once.

    Raises:
      ValueError: no such target; no such case.
    """
    target = aot.target(name)
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise ValueError(f"{only!r} is not a regular expression: {error}") from None
    taken = [case for case in find_cases(target, sources) if pattern.search(str(case[2])) and chosen(case[2])]
    if not taken:
        raise ValueError(f"no case for {name} has {only!r} in its name")
    began = time.perf_counter()
    show(f"{target.device} ({target.arch}), jax {importlib.metadata.version('jax')}, {len(taken)} cases")
    if target.hopper and sass.find_nvdisasm() is None:
        show(f"no machine code is checked: nvdisasm is not installed (extra {aot.EXTRA})")
    show(_line(("", *_COLUMNS.values())))
    rows: list[dict[str, Any]] = []
    with concurrent.futures.ThreadPoolExecutor(jobs or min(os.cpu_count() or 1, 8)) as pool:
        waiting = [pool.submit(_check_in_process, *found, target, timeout_s) for found in taken]
        try:
            for (_, _, case), future in zip(taken, waiting):
                result = future.result()
                show("\n".join([_title(case, result[0]), *map(_describe, result)]))
                rows += result
        finally:
            pool.shutdown(cancel_futures=True)
    failed = sum(row["reason"] is not None for row in rows)
    show(f"{len(rows)} reports, {failed} failed, {time.perf_counter() - began:.0f} s")
    return {"target": name, "jax": importlib.metadata.version("jax"), "kernels": rows, "failed": failed}


def _line(cells: Sequence[object]) -> str:
    first, *rest = (f"{cell:,}" if isinstance(cell, int) else cell for cell in cells)
    return f"{first:<28}" + "".join(f"{cell:>11}" for cell in rest)


def _title(case: Case, row: dict[str, Any]) -> str:
    said = str(case)
    if row.get("donated_bytes"):
        said += "  pool {pool_bytes:,} bytes, aliased {alias_bytes:,}, temp {temp_bytes:,}".format_map(row)
    if "least_bytes" in row:
        said += ", {launches:,} launches read {read_bytes:,} and write {written_bytes:,} bytes".format_map(row)
        said += ", at least {least_bytes:,} together".format_map(row)
    if row.get("captured"):
        said += ", {captured} of {thunks} thunks in command buffers".format_map(row)
    return "\n".join(filter(None, [said, report.describe_exchange(row)]))


def _describe(row: dict[str, Any]) -> str:
    lines = []
    if row.get("kernel"):
        cells = row | {"grid": "x".join(str(n) for n in row["grid"] if n > 1) or "1"}
        lines.append(_line((f"  {row['kernel']}", *(cells[column] for column in _COLUMNS))))
    elif "temp_bytes" in row:
        lines.append("  no Pallas kernel in it")
    if row["reason"]:
        lines.append(f"  FAILED: {row['reason']}")
    return "\n".join(lines)
