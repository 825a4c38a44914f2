"""Runs `template_sandbox` as a child process: one for all templates, started when the first is rendered."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

from ksana_jax.tokenizers import template_sandbox

# Ten times as much as the longest conversations of `test_template_process.py` take.
CPU_S = 2.0
# For a process that does not run, because the machine is overloaded or it was stopped.
WAIT_S = 60.0
MEMORY_BYTES = 2**29


def render(source: str, given: dict[str, Any], now: str | None, most: int) -> str:
    """Renders a template as `template_sandbox.render` does, in its process.

    Raises:
      ValueError: the output is longer than `most`, the template raises something, or it takes more than CPU_S of a core
        or MEMORY_BYTES.
    """
    request = {"source": source, "given": given, "now": now, "most": most}
    # A forked child must not share its parent's pipe, and get the answers to it.
    return _sandbox(CPU_S, os.getpid()).ask(json.dumps(request).encode() + b"\n")


class _Sandbox:
    """A child process that answers one request at a time."""

    def __init__(self, cpu_s: float):
        self._cpu_s, self._lock = cpu_s, threading.Lock()
        self._start()

    def _start(self) -> None:
        # -P keeps the script's folder, whose files have names of other modules, from the path. The terminal's Ctrl-C
        # does not reach another process group.
        command = [sys.executable, "-P", template_sandbox.__file__, str(self._cpu_s), str(MEMORY_BYTES)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        self._stop = weakref.finalize(self, _stop, self._process, os.getpid())

    def ask(self, line: bytes) -> str:
        with self._lock:
            if self._process.poll() is not None:
                self._stop()
                self._start()
            began, timer = time.monotonic(), threading.Timer(WAIT_S, self._process.kill)
            timer.start()
            try:
                answer = _exchange(self._process, line)
            except BaseException:  # such as Ctrl-C; the answer would be taken for the next request's
                self._process.kill()
                self._process.wait()
                raise
            finally:
                timer.cancel()
            if not answer:
                in_time, status = time.monotonic() - began < WAIT_S, self._process.wait()
                raise ValueError(
                    self._why(status) if in_time else f"its process has not answered for {WAIT_S:g} seconds"
                )
        found = json.loads(answer)
        if "error" in found:
            raise ValueError(found["error"])
        return found["text"]

    def _why(self, status: int) -> str:
        if status == -signal.SIGPROF:
            return f"it takes more than {self._cpu_s:g} seconds of processor time"
        if status == template_sandbox.OUT_OF_MEMORY:
            return f"it takes more than {MEMORY_BYTES // 2**20:,} MB of memory"
        return f"its process ended with status {status}"


@functools.cache
def _sandbox(cpu_s: float, process_id: int) -> _Sandbox:
    return _Sandbox(cpu_s)


def _exchange(process: Any, line: bytes) -> bytes:
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return process.stdout.readline()


def _stop(process: subprocess.Popen, parent_id: int) -> None:
    if parent_id == os.getpid():  # no forked child
        process.kill()
        process.communicate()
