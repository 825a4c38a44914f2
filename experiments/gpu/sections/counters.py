"""Nsight Compute's counters and stall samples of single launches: why kernels wait. Needs `ncu` on PATH."""

from __future__ import annotations

import csv
import functools
import gzip
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from experiments.gpu.context import Context
from experiments.gpu.profiled import KERNELS

# The counters that a record keeps; the report's pages, which are files, have all.
KEPT = re.compile(
    r"gpu__time_duration\.sum|gpu__dram_throughput\.avg\.pct_of_peak_sustained_elapsed"
    r"|launch__(registers_per_thread|occupancy_limit_(registers|shared_mem))"
    r"|smsp__issue_active\.avg\.per_cycle_active|sm__warps_active\.avg\.pct_of_peak_sustained_active"
    r"|smsp__average_warps_issue_stalled_\w+_per_issue_active\.ratio"
    r"|sm__pipe_(alu|fma|tensor_op_gmma)_cycles_active\.avg\.pct_of_peak_sustained_active"
    r"|l1tex__data_pipe_lsu_wavefronts\.avg\.pct_of_peak_sustained_elapsed"
    r"|l1tex__data_bank_conflicts_pipe_lsu_mem_shared\.sum"
)
# Nsight Compute calls these sets sections. Stall samples of each instruction join them; counts of each would patch the
# kernel, which takes longer than the rest.
SETS = (
    "LaunchStats",
    "Occupancy",
    "SpeedOfLight",
    "SchedulerStats",
    "WarpStateStats",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
)
SAMPLES = "group:smsp__pcsamp_warp_stall_reasons,l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
MOST_S = 45.0  # for one kernel


def run(context: Context) -> None:
    if (ncu := shutil.which("ncu")) is None:
        raise NotImplementedError("Nsight Compute's `ncu` is not on PATH")
    for name in KERNELS:
        if context.left() < MOST_S / 2:
            context.record("fact", name="left out", kernel=name)
        else:
            context.attempt(name, functools.partial(_profile, context, ncu, name))


def _profile(context: Context, ncu: str, name: str) -> None:
    """Profiles one kernel and its merge; writes the pages of the report to files, and records what is `KEPT`."""
    title = re.sub(r"\W+", "_", name)
    report = context.folder / f"{title}.ncu-rep"
    program = [sys.executable, "-m", "experiments.gpu.profiled", *(["--tiny"] if context.tiny else []), name]
    # XLA would take most of the device's memory at once, and launches in a graph are profiled as one.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags}
    sets = [word for name in SETS for word in ("--section", name)]
    options = ["--clock-control", "none", *sets, "--metrics", SAMPLES, "-k", "regex:hopper_", "-f", "-o", str(report)]
    _output([ncu, *options, *program], min(MOST_S, context.left() - 4), env=env)
    context.say(f"{name}: profiled")
    for page in ("raw", "source"):
        text = _output([ncu, "--import", str(report), "--page", page, "--csv"], max(context.left() - 1, 1))
        with gzip.open(context.out / f"counters_{title}_{page}.csv.gz", "wt") as file:
            file.write(text)
        if page == "raw":
            _record(context, name, text)


def _output(command: list[str], timeout_s: float, env: Any = None) -> str:
    with tempfile.TemporaryFile("w+") as errors:
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=timeout_s, env=env)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"not done in {timeout_s:.0f} s: {(error.stdout or b'')[-500:]}") from None
        if done.returncode:
            errors.seek(0)
            raise RuntimeError(f"exit status {done.returncode}: {(done.stdout + errors.read())[-1500:]}")
    return done.stdout


def _record(context: Context, name: str, raw: str) -> None:
    """Records the kept counters of each launch; the first row of the page below its names has their units."""
    lines = [line for line in raw.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    for row in rows[1:]:
        kernel = row["Kernel Name"]
        kept = {k: v for k, v in row.items() if v and KEPT.fullmatch(k or "")}
        context.record("counters", case=name, who=kernel, counters=kept)
        context.say(f"{name}: {kernel}: {kept.get('gpu__time_duration.sum')} {rows[0].get('gpu__time_duration.sum')}")
