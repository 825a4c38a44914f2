"""Runs sections one after the other, each in a process of its own, and merges what they recorded. No jax.

    process of section n      imports, waits   |go| measures, appends records            |ended or killed|
    process of section n+1                     imports, waits . . . . . . . . . . . . . . . . . . . . . |go|

A section that overruns, crashes or is killed costs only itself; its records up to there stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.gpu.context import RESTART, read_records
from experiments.gpu.plan import CLOSING_S, GRACE_S, Section, limit_s

MAX_RESTARTS = 6
PROGRAM = (sys.executable, "-m", "experiments.gpu")


class Child:
    """The process of one section: starts, imports, and waits for `go`."""

    def __init__(self, section: Section, command: list[str], log: Path):
        self.section, self._log = section, log
        self.folder = tempfile.TemporaryDirectory(prefix=f"gpu-{section.name}-", ignore_cleanup_errors=True)
        self._env = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": str(section.memory),
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        }
        if section.name == "engine":  # the list of launches of each program is the evidence of command buffers
            dump = f" --xla_dump_to={self.folder.name}/xla"
            self._env["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + dump
        self.tail: deque[str] = deque(maxlen=30)
        self.process = subprocess.Popen(
            [*command, "--child", section.name, "--folder", self.folder.name], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=self._env,
            start_new_session=True,
        )  # fmt: skip
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
        """Lets the section go; returns "ok" or what became of it within `limit` seconds."""
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
        self.folder.cleanup()


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
    started = time.monotonic()
    records, log = out / "records.jsonl", out / "log.txt"
    command = [*program, "--records", str(records), *options]
    results: dict[str, Any] = {
        "schema_version": 1, "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "options": options,
        "sections": {s.name: {"status": "not run: no time left", "seconds": 0.0} for s in chosen}, "records": [],
    }  # fmt: skip
    following: Child | None = None
    try:
        for index, section in enumerate(chosen):
            limit = limit_s(index, chosen, total_s - CLOSING_S - (time.monotonic() - started))
            child, following = following or Child(section, command, log), None
            if limit < min(section.least_s, section.most_s):
                child.end()
                continue
            began = time.monotonic()
            print(f"--- {section.name}: at {began - started:.0f} s, limit {limit:.0f} s", flush=True)
            if index + 1 < len(chosen):
                following = Child(chosen[index + 1], command, log)
            results["sections"][section.name] = {"status": "interrupted", "seconds": 0.0, "limit_s": round(limit, 1)}
            try:
                status, faults = child.run(limit), 0
                while status == "restart" and faults < MAX_RESTARTS:
                    # A kernel hung or broke the device's context: the rest of the section goes on without it.
                    faults += 1
                    child = Child(section, command, log)
                    rest = limit - (time.monotonic() - began)
                    status = child.run(rest) if rest > GRACE_S else "no time after a kernel's fault"
                child.end()
                if faults:
                    status += f", {faults} times begun anew after a kernel's fault"
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
    """What `run_all` wrote; nothing where it wrote nothing."""
    return json.loads(path.read_text()) if path.exists() else {"sections": {}, "records": []}
