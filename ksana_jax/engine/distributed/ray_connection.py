"""Connects this process to a Ray cluster, or starts one on this machine. Knows no trials and no engines."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from ksana_jax.core.errors import ConfigError

# Ray's address: a cluster of this process, or the one that RAY_ADDRESS or this machine's `ray start` names.
LOCAL, AUTO = "local", "auto"

CONNECT_S = 5.0  # a reachable machine takes a connection within milliseconds
ANSWER_S = 30.0  # a cluster takes a new driver within 2 s; Ray itself would try for more than a minute

_PROBE = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False, configure_logging=False)"


@contextlib.contextmanager
def connected(address: str = AUTO) -> Iterator[Any]:
    """Connects to a Ray cluster while the context is open; yields the module ray.

    A process that is connected already stays so, whatever the address. Ray's usage statistics are off unless the
    environment variable RAY_USAGE_STATS_ENABLED says otherwise. A cluster that is started here ("local") listens on
    127.0.0.1 only, has no dashboard, and ends with the context.

    Raises:
      ConfigError: Ray is not installed, or no cluster answers at the address within 35 s.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == LOCAL:
        _stay_on_this_machine()
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"Ray is not installed ({error}); the extra has it: pip install 'ksana-jax[ray]'") from None
    if ray.is_initialized():
        yield ray
        return
    if address == LOCAL:
        settings: dict[str, Any] = {"include_dashboard": False}
    else:
        _check_answers(address)
        settings = {}
    try:
        ray.init(address, log_to_driver=False, configure_logging=False, **settings)
    except Exception as error:  # Ray raises a dozen kinds, RuntimeError for other versions among them
        raise ConfigError(f"Ray at {address}: {_line(str(error))}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _stay_on_this_machine() -> None:
    """Has Ray listen on 127.0.0.1, and its processes know each other by a token of their own."""
    # The only setting for it, by its name for other systems; Ray reads it when it is imported.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    if "RAY_AUTH_MODE" not in os.environ:
        # Ray would otherwise write a token into the user's home, and say so.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _check_answers(address: str) -> None:
    """Checks that a cluster answers, in a process of its own: Ray's core ends processes that wait too long.

    Raises:
      ConfigError: it does not.
    """
    if "://" in address:
        raise ConfigError(
            f"Ray at {address}: clients from outside are not supported; run the command on a machine of the cluster, "
            "or with `ray job submit`"
        )
    given = os.environ.get("RAY_ADDRESS") or address if address == AUTO else address
    host, _, port = given.rpartition(":")
    if given != AUTO:
        if not (host and port.isdecimal()):
            raise ConfigError(f"Ray's address is {given!r}, must be HOST:PORT, {AUTO!r} or {LOCAL!r}")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"Ray at {given}: {error}; `ray start --head` on a machine starts a cluster") from None
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _PROBE, address], timeout=ANSWER_S, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"Ray at {given}: no cluster answers there within {ANSWER_S:.0f} s") from None
    if "Could not find any running Ray instance" in asked.stderr:
        raise ConfigError(
            "no Ray cluster runs on this machine, and RAY_ADDRESS is not set: give --ray-address HOST:PORT, or local "
            "for a cluster of this machine alone"
        )
    if asked.returncode:
        said = asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"]
        raise ConfigError(f"Ray at {given}: {_line(said[-1])}")


def _line(text: str) -> str:
    return " ".join(text.split())
