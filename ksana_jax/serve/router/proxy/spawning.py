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

from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.router.proxy.launching import INVALID, EndedServer

STOP_S = 10.0  # beyond a server's own time for running requests
LINE_BYTES = 2**16
# Prefix of `ksana`'s fatal error.
ERROR = "ksana: error: "
LOCALHOST = "127.0.0.1"
PR_SET_PDEATHSIG = 1


class LocalLauncher:
    """Runs servers as processes, each on a port that it keeps across restarts.

    Args:
      command: starts a server; `--port` and a number are added to it.
      stop_s: seconds after which a server that was told to stop is killed.
      show: takes the lines that a server writes, each after its number.

    Attributes:
      processes: the last one of each number.
    """

    def __init__(self, command: Sequence[str], stop_s: float, show: Callable[[str], None]):
        self._command, self._stop_s, self._show = command, stop_s, show
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
            preexec_fn=die_with_parent,
        )
        self.processes[index] = process
        self._readers[index] = asyncio.create_task(self._read(index, process))
        return f"http://127.0.0.1:{port}"

    async def ended(self, index: int) -> EndedServer:
        """See `Launcher`."""
        process = self.processes[index]
        code = await process.wait()
        last = await self._readers[index]
        if code < 0:
            return EndedServer(f"killed by {signal.Signals(-code).name}", code)
        return ended_with(code, last)

    async def stop(self, index: int) -> None:
        """See `Launcher`."""
        process = self.processes.get(index)
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            try:
                async with asyncio.timeout(self._stop_s):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        await self._readers[index]

    async def _read(self, index: int, process: asyncio.subprocess.Process) -> str:
        """Shows a server's output, and returns the last line; a fatal error is returned and not shown."""
        assert process.stdout is not None
        last = ""
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # longer than the limit, and dropped
                continue
            if not line:
                return last
            if last.startswith(ERROR):  # it was not the last line
                self._show(f"[server {index}] {last}")
            last = line.decode("utf-8", "replace").rstrip()
            if not last.startswith(ERROR):
                self._show(f"[server {index}] {last}")


def ended_with(code: int, last: str) -> EndedServer:
    """Describes a server's end, given its last line."""
    if code == INVALID and last.startswith(ERROR):
        return EndedServer(last.removeprefix(ERROR), code)
    return EndedServer(f"exit code {code}" + f": {last}" * bool(code and last), code)


def serve_command(
    model: str, settings: Sequence[str], key_file: Path | None, shutdown_timeout_s: float, host: str = LOCALHOST
) -> list[str]:
    """Returns the command of a server without its port; see `ksana serve`."""
    key = () if key_file is None else ("--api-key-file", str(key_file))
    command = [sys.executable, "-m", "ksana_jax", "serve", model, *settings, *key]
    return [*command, "--host", host, "--shutdown-timeout", str(shutdown_timeout_s)]


def read_replicas(text: str) -> tuple[int, int]:
    """Returns the least and the most servers of "4" or "1-4".

    Raises:
      ConfigError: it is neither.
    """
    least, _, most = text.partition("-")
    if not (least.isdecimal() and (most or least).isdecimal() and 1 <= int(least) <= int(most or least)):
        raise ConfigError(f"servers are {text!r:.40}, must be a number from 1, or a range such as 1-4")
    return int(least), int(most or least)


def free_port(host: str = LOCALHOST) -> int:
    """Returns a free port of an address of this machine."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        return listener.getsockname()[1]


def die_with_parent() -> None:
    """Has Linux end the process when the proxy is killed; elsewhere it would survive."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
