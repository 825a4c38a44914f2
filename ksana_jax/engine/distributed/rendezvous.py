"""Connects the processes of a job: process 0 listens, the others connect and identify themselves. No jax.

Connections are `multiprocessing.connection`'s, authenticated by a shared key.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import queue
import socket
import struct
import threading
import time
from importlib.metadata import version
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, NamedTuple

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.hosts_setting import HostsSetting

logger = logging.getLogger("ksana_jax")
# Seconds for each message of a connection that is being authenticated.
_HANDSHAKE_S = 5
# TCP keepalive: idle seconds before the first probe, seconds between probes, and their number.
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


class Peer(NamedTuple):
    """Another process of the job. name: its host and process number there."""

    process_id: int
    name: str
    connection: Connection

    def __str__(self) -> str:
        return f"process {self.process_id} ({self.name})"


@functools.cache
def versions() -> dict[str, str]:
    """Returns values that must be equal in all processes, or they would compile different programs."""
    digest, package = hashlib.sha256(), Path(__file__).parents[2]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)} ".encode() + path.read_bytes())
    found = {name: version(name) for name in ("jax", "jaxlib", "numpy")}
    return {"Python": platform.python_version(), **found, "the code of ksana_jax": digest.hexdigest()[:12]}


def _token() -> bytes:
    if token := os.environ.get("KSANA_JOB_TOKEN", ""):
        return token.encode()
    raise ConfigError(
        "distributed: KSANA_JOB_TOKEN is not set, the secret of the job's processes: "
        "export KSANA_JOB_TOKEN=$(openssl rand -hex 16) and give all of them the same"
    )


def watched(given: socket.socket) -> Connection:
    """Makes a connection of a socket. The kernel ends it within some 8 s after the other host is lost.

    A process that ends closes its connections at once; only a host or a network that fails is silent.
    """
    given.setblocking(True)
    given.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    given.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {name: seconds for name, seconds in _KEEPALIVE.items() if hasattr(socket, name)}
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        options["TCP_USER_TIMEOUT"] = 8000
    for name, value in options.items():
        given.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(given.detach())


def own_address(peer: Peer) -> str:
    """Returns the address of this host by which a peer reaches it."""
    with socket.socket(fileno=os.dup(peer.connection.fileno())) as same:
        return same.getsockname()[0]


@contextlib.contextmanager
def _limited(connection: Connection, seconds: int = _HANDSHAKE_S):
    """Has waiting for a message end with an OSError while the context is open."""
    for limit in (seconds, 0):
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", limit, 0))
        if limit:
            yield


def gather(setting: HostsSetting) -> list[Peer]:
    """Waits for all other processes; returns them by their ids. For process 0.

    Raises:
      ConfigError: the address cannot be listened at, processes are missing, or one of them differs.
    """
    token = _token()
    try:
        family = socket.getaddrinfo(*setting.address, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server(setting.address, family=family, backlog=setting.num_processes)
    except OSError as error:
        raise ConfigError(f"process 0 cannot listen at {setting.coordinator_address}: {error}") from error
    found: dict[int, Peer] = {}
    deadline = time.monotonic() + setting.initialization_timeout
    arrived: queue.SimpleQueue[tuple[Connection, dict[str, Any]]] = queue.SimpleQueue()
    threading.Thread(target=_greet_all, args=(listening, token, arrived), daemon=True).start()
    try:
        while len(found) < setting.num_processes - 1:
            try:
                connection, hello = arrived.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                raise ConfigError(_missing(setting, found)) from None
            peer = Peer(hello["process_id"], hello["name"], connection)
            if _belongs(peer, hello, setting, found):
                found[peer.process_id] = peer
    except ConfigError as error:
        for peer in found.values():
            _refuse(peer, str(error))
        raise
    finally:
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        listening.close()
    return [found[process_id] for process_id in sorted(found)]


def _greet_all(listening: socket.socket, token: bytes, arrived: queue.SimpleQueue[Any]) -> None:
    """Greets each connection in a separate thread, so that none keeps others waiting; ends with the socket."""

    def greet(connection: Connection, host: str) -> None:
        try:
            with _limited(connection):
                deliver_challenge(connection, token)
                answer_challenge(connection, token)
                hello = connection.recv()
            arrived.put((connection, hello))
        except (OSError, EOFError, AuthenticationError) as error:
            why = error if isinstance(error, AuthenticationError) else "it is no process of ksana"
            logger.warning("a connection from %s was refused: %s", host, why)
            connection.close()

    while True:
        try:
            given, address = listening.accept()
        except OSError:
            return
        threading.Thread(target=greet, args=(watched(given), address[0]), daemon=True).start()


def _missing(setting: HostsSetting, found: dict[int, Peer]) -> str:
    missing = [str(i) for i in range(1, setting.num_processes) if i not in found]
    return (
        f"after {setting.initialization_timeout:g} s, process{'es' * (len(missing) > 1)} {', '.join(missing)} of "
        f"{setting.num_processes} have not connected to process 0 at {setting.coordinator_address}"
    )


def _belongs(peer: Peer, hello: dict[str, Any], setting: HostsSetting, found: dict[int, Peer]) -> bool:
    """True if a process has a number that is still missing.

    Raises:
      ConfigError: it differs from this process.
    """
    if peer.process_id in found or not 0 < peer.process_id < setting.num_processes:
        other = f"is {found[peer.process_id].name}" if peer.process_id in found else "cannot be"
        _refuse(peer, f"process_id {peer.process_id} of {setting.num_processes} {other}")
        return False
    for name, own in {**_shared(setting), **versions()}.items():
        if (other := hello.get(name)) != own:
            message = f"{peer} has {name} {other}, process 0 has {own}"
            _refuse(peer, message)
            raise ConfigError(message)
    return True


def _shared(setting: HostsSetting) -> dict[str, Any]:
    return {"num_processes": setting.num_processes, "spmd": setting.spmd}


def _refuse(peer: Peer, why: str) -> None:
    with contextlib.suppress(OSError):
        peer.connection.send({"refused": why})
    peer.connection.close()


def reach(setting: HostsSetting) -> Peer:
    """Connects to process 0, which may start later; returns it. For all other processes.

    Raises:
      ConfigError: it cannot be reached, or does not know the token.
    """
    token, where = _token(), setting.coordinator_address
    deadline = time.monotonic() + setting.initialization_timeout
    while True:
        try:
            connection = watched(
                socket.create_connection(setting.address, timeout=max(deadline - time.monotonic(), 0.001))
            )
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"process {setting.process_id} could not reach process 0 at {where} within "
                    f"{setting.initialization_timeout:g} s: {error}"
                ) from error
            time.sleep(0.1)
    try:
        with _limited(connection):
            answer_challenge(connection, token)
            deliver_challenge(connection, token)
        name = f"{socket.gethostname()}:{os.getpid()}"
        connection.send({"process_id": setting.process_id, "name": name, **_shared(setting), **versions()})
    except (OSError, EOFError, AuthenticationError) as error:
        connection.close()
        raise ConfigError(
            f"process {setting.process_id}: what answers at {where} is not process 0 of this job, or has another "
            f"KSANA_JOB_TOKEN ({error or type(error).__name__})"
        ) from error
    return Peer(0, where, connection)
