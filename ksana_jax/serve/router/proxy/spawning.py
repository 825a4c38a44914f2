"""The command, port and end of a `ksana serve` that Ray Serve starts."""

from __future__ import annotations

import ctypes
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from ksana_jax.core.errors import ConfigError

STOP_S = 10.0  # beyond a server's own time for running requests
# Prefix of `ksana`'s fatal error.
ERROR = "ksana: error: "
LOCALHOST = "127.0.0.1"
PR_SET_PDEATHSIG = 1


def why_ended(code: int, last: str) -> str:
    """Describes a server's end, given its exit code and its last line."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return last.removeprefix(ERROR) if last.startswith(ERROR) else f"exit code {code}" + f": {last}" * bool(last)


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
    """Has Linux end the process when its starter is killed; elsewhere it would survive."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
