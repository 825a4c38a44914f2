"""jax's coordination service, by which processes exchange what their collectives need to start, in its own process.

Clients of the service end their process as soon as it disappears, with a page of text. In a separate process,
it outlives a killed process 0 by some seconds, so that the workers end with one line.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import time

from ksana_jax.core.errors import ConfigError

# Seconds that the service outlives process 0.
LINGER_S = 5
# The job detects lost processes: the service must not end processes.
NEVER_S = 10**6
_START_S = 60.0


def start(host: str, num_processes: int) -> tuple[str, subprocess.Popen]:
    """Starts the service on a free port of an address; returns "host:port", and the process.

    Raises:
      ConfigError: it does not start.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family) as free:
        port = free.getsockname()[1]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    command = [sys.executable, "-m", __name__, address, str(num_processes)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(_START_S) or not process.stdout.read(1):
            process.kill()
            raise ConfigError(f"jax's coordination service did not start at {address}")
    process.stdout.close()
    return address, process


def _serve(address: str, num_processes: int) -> None:
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    service = _jax.get_distributed_runtime_service(
        address, num_processes, heartbeat_timeout=NEVER_S, shutdown_timeout=LINGER_S, recoverable=True
    )
    sys.stdout.write("1")
    sys.stdout.flush()
    sys.stdin.read()  # until process 0 has ended
    time.sleep(LINGER_S)
    del service
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
