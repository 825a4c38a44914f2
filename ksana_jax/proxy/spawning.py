"""Starts `ksana serve` processes on this machine, for `ksana route --spawn`."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ksana_jax.proxy.launching import Ended

STOP_S = 10.0  # beyond the server's own time for running requests
LINE_BYTES = 2**16
PR_SET_PDEATHSIG = 1


class LocalLauncher:
    """Runs servers as processes, each on a port of its own that it keeps when it is started again.

    Args:
      model, settings: arguments of `ksana serve`. key_file: their API key.
      shutdown_timeout_s: seconds for running requests when a server is stopped.
      show: takes the lines that a server writes, each after its number.
    """

    def __init__(
        self,
        model: str,
        settings: Sequence[str],
        key_file: Path,
        shutdown_timeout_s: float,
        show: Callable[[str], None],
    ):
        self._command = [sys.executable, "-m", "ksana_jax", "serve", model, *settings, "--api-key-file", str(key_file)]
        self._command += ["--host", "127.0.0.1", "--shutdown-timeout", str(shutdown_timeout_s)]
        self._shutdown_timeout_s, self._show = shutdown_timeout_s, show
        self._ports: dict[int, int] = {}
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self._readers: dict[int, asyncio.Task[str]] = {}

    async def start(self, index: int) -> str:
        """See `Launcher`."""
        port = self._ports.setdefault(index, free_port())
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *("--port", str(port)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=LINE_BYTES,
            start_new_session=True,  # Ctrl-C is for the proxy, which stops the servers when they are drained
            preexec_fn=_die_with_parent,
        )
        self.processes[index] = process
        self._readers[index] = asyncio.create_task(self._read(index, process))
        return f"http://127.0.0.1:{port}"

    async def ended(self, index: int) -> Ended:
        """See `Launcher`."""
        process = self.processes[index]
        code = await process.wait()
        last = await self._readers[index]
        if code < 0:
            return Ended(f"killed by {signal.Signals(-code).name}", code)
        return Ended(f"exit code {code}" + f": {last}" * bool(code and last), code)

    async def stop(self, index: int) -> None:
        """See `Launcher`."""
        process = self.processes.get(index)
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            try:
                async with asyncio.timeout(self._shutdown_timeout_s + STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        await self._readers[index]

    async def _read(self, index: int, process: asyncio.subprocess.Process) -> str:
        """Shows what a server writes; returns the last line."""
        assert process.stdout is not None
        last = ""
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # longer than the limit, and dropped
                continue
            if not line:
                return last
            last = line.decode("utf-8", "replace").rstrip()
            self._show(f"[server {index}] {last}")


def free_port() -> int:
    """Returns a port of 127.0.0.1 on which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _die_with_parent() -> None:
    """Has Linux end the process when the proxy is killed; elsewhere it would live on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
