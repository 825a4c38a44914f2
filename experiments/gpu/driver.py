"""Runs sections one after the other, each in a process of its own, and merges what they recorded. No jax.

    process of section n      imports, waits   |go| measures, appends records            |ended or killed|
    process of section n+1                     imports, waits . . . . . . . . . . . . . . . . . . . . . |go|

A section that overruns or crashes costs only itself; its records up to there stay. One that a signal ends within a
case, which `marks` name, restarts without that case.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.gpu import marks
from experiments.gpu.context import RESTART, append_record, read_records
from experiments.gpu.plan import CLOSING_S, GRACE_S, Section, limit_s
from pallas_kernels.aot import find_ptxas

MAX_RESTARTS = 6
PROGRAM = (sys.executable, "-m", "experiments.gpu")


class Child:
    """The process of one section: starts, imports, and waits for `go`."""

    def __init__(self, section: Section, command: list[str], log: Path, scratch: Path, careful: bool = False):
        self.section, self._log, self.folder = section, log, scratch / section.name
        self.folder.mkdir(exist_ok=True)
        env = {**os.environ, **_environment(scratch), "XLA_PYTHON_CLIENT_MEM_FRACTION": str(section.memory)}
        if section.name == "engine":  # the list of launches of each program is the evidence of command buffers
            env["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + f" --xla_dump_to={self.folder}/xla"
        self.tail: deque[str] = deque(maxlen=30)
        more = ["--careful"] if careful else []
        self.process = subprocess.Popen(
            [*command, "--child", section.name, "--folder", str(self.folder), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=env,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.tail.append(line.rstrip())
            print(line.rstrip()[:400], flush=True)
            with self._log.open("a") as file:
                file.write(line)

    def run(self, limit: float) -> str:
        """Lets the section go; returns "ok" or its failure within `limit` seconds."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(f"{max(limit - GRACE_S, 1):.1f}\n")
            self.process.stdin.close()
        except OSError:
            pass  # it is dead already: wait() says how
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"overran its {limit:.0f} s"
        finally:
            self.end()
        if code == 0:
            return "ok"
        if code == RESTART:
            return "restart"
        return f"crashed with {signal.Signals(-code).name}" if code < 0 else f"crashed with exit status {code}"

    def end(self) -> None:
        """Ends the section's process and all that it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self.process.wait()
        self._reader.join(2)  # a grandchild that left the group may hold the pipe
        for pipe in (self.process.stdin, None if self._reader.is_alive() else self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _environment(scratch: Path) -> Mapping[str, str]:
    """Environment of every section: a shared cache of compilations and autotuning, and one ptxas for all.

    Mosaic GPU takes the ptxas that is first on PATH, never a package's; reports of kernels are of the package's.
    """
    ptxas = find_ptxas()
    folders = [*([str(Path(ptxas).parent)] if ptxas else []), os.environ.get("PATH", os.defpath)]
    chosen = {
        "JAX_COMPILATION_CACHE_DIR": str(scratch / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "xla_gpu_per_fusion_autotune_cache_dir",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    return {"PYTHONUNBUFFERED": "1", "PATH": os.pathsep.join(folders)} | {
        name: os.environ.get(name, value) for name, value in chosen.items()
    }


class _Attempts:
    """Runs one section; after each fault again, without the case at fault."""

    def __init__(self, section: Section, limit: float, records: Path, start: Callable[[bool], Child]):
        self._section, self._records, self._start = section, records, start
        self._ends, self.limit = time.monotonic() + limit, limit
        self.faults, self._careful = 0, False

    def run(self, child: Child) -> tuple[Child, str]:
        """The last process and how the section ended."""
        status = child.run(self.limit)
        while self._restarts(child, status):
            self.faults += 1
            child, rest = self._start(self._careful), self._ends - time.monotonic()
            status = child.run(rest) if rest > GRACE_S else "no time after a kernel's fault"
        child.end()
        return child, status + (f", {self.faults} times restarted after a kernel's fault" if self.faults else "")

    def _restarts(self, child: Child, status: str) -> bool:
        at = marks.take(child.folder)
        if self.faults >= MAX_RESTARTS or (status != "restart" and not (at and status.startswith("crashed"))):
            return False
        if status != "restart" and len(at) == 1:
            _end_line(self._records)
            last = next((line for line in reversed(child.tail) if line.strip()), "")
            reason = f"{at[0]['what']}: {status}: {last[:200]}"
            who, case = at[0]["who"], at[0]["case"]
            append_record(self._records, self._section.name, "fault", who=who, case=case, reason=reason)
        # Any of several threads may have aborted it: the next time they take turns.
        self._careful = self._careful or len(at) > 1
        return True


def run_all(
    chosen: list[Section], out: Path, *, total_s: float, options: list[str], program: Sequence[str] = PROGRAM
) -> dict[str, Any]:
    """Runs sections, writing `results.json` after each.

    Args:
      options: handed to each section's process.
      program: what runs a section, given `--records FILE`, the options, `--child NAME` and `--folder FOLDER`.

    Returns:
      {"sections": {name: {"status", "seconds", ...}}, "records": [...]}; what is in the file.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as scratch:
        return _run_all(chosen, out, Path(scratch), total_s, options, program)


def _run_all(
    chosen: list[Section], out: Path, scratch: Path, total_s: float, options: list[str], program: Sequence[str]
) -> dict[str, Any]:
    started = time.monotonic()
    records, log = out / "records.jsonl", out / "log.txt"
    command = [*program, "--records", str(records), *options]
    results: dict[str, Any] = {
        "schema_version": 1,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "options": options,
        "sections": {s.name: {"status": "not run: no time left", "seconds": 0.0} for s in chosen},
        "records": [],
    }
    following: Child | None = None
    try:
        for index, section in enumerate(chosen):
            limit = limit_s(index, chosen, total_s - CLOSING_S - (time.monotonic() - started), total_s)
            child, following = following or Child(section, command, log, scratch), None
            if limit < min(section.least_s, section.most_s):
                child.end()
                continue
            began = time.monotonic()
            print(f"--- {section.name}: at {began - started:.0f} s, limit {limit:.0f} s", flush=True)
            if index + 1 < len(chosen):
                following = Child(chosen[index + 1], command, log, scratch)
            results["sections"][section.name] = {"status": "interrupted", "seconds": 0.0, "limit_s": round(limit, 1)}
            try:
                start = functools.partial(Child, section, command, log, scratch)
                child, status = _Attempts(section, limit, records, start).run(child)
            finally:
                seconds = round(time.monotonic() - began, 1)
                results["sections"][section.name]["seconds"] = seconds
                _end_line(records)
                results["records"] = read_records(records)
            results["sections"][section.name]["status"] = status
            if not status.startswith("ok"):
                results["sections"][section.name]["last_lines"] = list(child.tail)
            print(f"--- {section.name}: {status} after {seconds:.1f} s", flush=True)
            write(out / "results.json", results)
    finally:
        if following is not None:
            following.end()
        write(out / "results.json", results)
    return results


def _end_line(path: Path) -> None:
    """Ends the line that a killed section may have left half written."""
    if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def write(path: Path, value: dict[str, Any]) -> None:
    """Writes JSON so that a reader sees the old file or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1, default=str) + "\n")
    temporary.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Reads the results of `run_all`; empty without any."""
    return json.loads(path.read_text()) if path.exists() else {"sections": {}, "records": []}
