"""Connects the processes of a job: process 0 listens, the workers connect and identify themselves. No jax."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import ipaddress
import logging
import os
import platform
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.hosts_setting import HostsSetting
from ksana_jax.engine.distributed.wire import Channel, Closed

logger = logging.getLogger("ksana_jax")
_MAGIC = b"ksana-job-1\n"
_NONCE, _DIGEST = 16, 32
# Seconds for a connection to authenticate, number that may do so at once, and bytes of a hello.
_HANDSHAKE_S = 5.0
_MAX_HANDSHAKES = 64
_MAX_HELLO = 2**16
_MAX_NAME = 300


class _Hello(NamedTuple):
    """A process's description of itself."""

    peer: Peer
    num_processes: int
    versions: dict[str, Any]


class Peer(NamedTuple):
    """Another process of the job. name: its host and process number there."""

    process_id: int
    name: str
    channel: Channel

    def __str__(self) -> str:
        return f"process {self.process_id} ({self.name})"


def own_name() -> str:
    """Returns host and process number of this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


@functools.cache
def versions() -> dict[str, str]:
    """Returns values that must be equal in all processes, or they would compile different programs."""
    digest, package = hashlib.sha256(), Path(__file__).parents[2]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)} ".encode() + path.read_bytes())
    found = {name: version(name) for name in ("jax", "jaxlib", "numpy")}
    return {"Python": platform.python_version(), **found, "the code of ksana_jax": digest.hexdigest()[:12]}


def _token() -> bytes:
    return os.environ.get("KSANA_JOB_TOKEN", "").encode()


def _proof(role: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(_token(), _MAGIC + role + b"".join(nonces), "sha256")


def gather(setting: HostsSetting, kinds: Iterable[type]) -> list[Peer]:
    """Waits for all other processes; returns them by their ids. For process 0.

    Raises:
      ConfigError: the address cannot be listened at, processes are missing, or one of them differs.
    """
    try:
        family = socket.getaddrinfo(*setting.address, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server(setting.address, family=family, backlog=setting.num_processes)
    except OSError as error:
        raise ConfigError(f"process 0 cannot listen at {setting.coordinator_address}: {error}") from error
    if not _token() and not ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback:
        logger.warning("KSANA_JOB_TOKEN is not set: anyone reaching %s may join the job", setting.coordinator_address)
    found: dict[int, Peer] = {}
    deadline = time.monotonic() + setting.initialization_timeout
    arrived: queue.SimpleQueue[_Hello] = queue.SimpleQueue()
    threading.Thread(target=_greet_all, args=(listening, arrived, tuple(kinds)), daemon=True).start()
    try:
        while len(found) < setting.num_processes - 1:
            try:
                hello = arrived.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                raise ConfigError(_missing(setting, found)) from None
            if _belongs(hello, setting, found):
                found[hello.peer.process_id] = hello.peer
    except ConfigError as error:
        for peer in found.values():
            _refuse(peer.channel, str(error))
        raise
    finally:
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        listening.close()
    return [found[process_id] for process_id in sorted(found)]


def _greet_all(listening: socket.socket, arrived: queue.SimpleQueue[_Hello], kinds: tuple[type, ...]) -> None:
    """Greets each connection in a thread of its own, so that none keeps others waiting; ends with the socket."""
    room = threading.Semaphore(_MAX_HANDSHAKES)

    def greet(connection: socket.socket, host: str) -> None:
        try:
            if (hello := _greeted(connection, host, kinds)) is not None:
                arrived.put(hello)
        finally:
            room.release()

    while True:
        room.acquire()
        try:
            connection, address = listening.accept()
        except OSError:
            return
        threading.Thread(target=greet, args=(connection, address[0]), daemon=True).start()


def _missing(setting: HostsSetting, found: dict[int, Peer]) -> str:
    missing = [str(i) for i in range(1, setting.num_processes) if i not in found]
    return (
        f"after {setting.initialization_timeout:g} s, process{'es' * (len(missing) > 1)} {', '.join(missing)} of "
        f"{setting.num_processes} have not connected to process 0 at {setting.coordinator_address}"
    )


def _greeted(connection: socket.socket, host: str, kinds: tuple[type, ...]) -> _Hello | None:
    """Returns the peer's description of itself; None if it does not belong to the job."""
    connection.settimeout(_HANDSHAKE_S)
    channel = Channel(connection, kinds)
    channel.deadline = time.monotonic() + _HANDSHAKE_S
    try:
        nonce = secrets.token_bytes(_NONCE)
        connection.sendall(_MAGIC + nonce)
        answer = channel._exactly(len(_MAGIC) + _NONCE + _DIGEST)
        theirs, proof = answer[len(_MAGIC) : -_DIGEST], answer[-_DIGEST:]
        if not answer.startswith(_MAGIC) or not hmac.compare_digest(proof, _proof(b"follower", nonce, theirs)):
            raise Closed("it has another KSANA_JOB_TOKEN, or is no process of ksana")
        connection.sendall(_proof(b"leader", theirs, nonce))
        hello = _read_hello(channel)
    except OSError as error:
        logger.warning("a connection from %s was refused: %s", host, error)
        channel.close()
        return None
    channel.deadline = None
    connection.settimeout(None)
    return hello


def _read_hello(channel: Channel) -> _Hello:
    said = channel.receive(_MAX_HELLO, 0)
    types = {"process_id": int, "num_processes": int, "name": str, "versions": dict}
    if not isinstance(said, dict) or any(type(said.get(name)) is not kind for name, kind in types.items()):
        raise Closed("it does not say which process it is")
    if len(said["name"]) > _MAX_NAME or not said["name"].isprintable():
        raise Closed("its name is not one line")
    return _Hello(Peer(said["process_id"], said["name"], channel), said["num_processes"], said["versions"])


def _belongs(hello: _Hello, setting: HostsSetting, found: dict[int, Peer]) -> bool:
    """True if a process has a number that is still missing.

    Raises:
      ConfigError: it differs from this process.
    """
    peer = hello.peer
    if peer.process_id in found or not 0 < peer.process_id < setting.num_processes:
        other = f"is {found[peer.process_id].name}" if peer.process_id in found else "cannot be"
        _refuse(peer.channel, f"process_id {peer.process_id} of {setting.num_processes} {other}")
        return False
    differing = [("num_processes", hello.num_processes, setting.num_processes)]
    differing += [(name, hello.versions.get(name), value) for name, value in versions().items()]
    for name, other, own in differing:
        if other != own:
            message = f"{peer} has {name} {str(other)[:_MAX_NAME]}, process 0 has {own}"
            _refuse(peer.channel, message)
            raise ConfigError(message)
    return True


def _refuse(channel: Channel, why: str) -> None:
    try:
        channel.send({"refused": why})
    except Closed:
        pass
    channel.close()


def reach(setting: HostsSetting, kinds: Iterable[type]) -> Peer:
    """Connects to process 0, which may start later; returns it. For all other processes.

    Raises:
      ConfigError: it cannot be reached, or refuses this process.
    """
    deadline, where = time.monotonic() + setting.initialization_timeout, setting.coordinator_address
    while True:
        try:
            connection = socket.create_connection(setting.address, timeout=max(deadline - time.monotonic(), 0.001))
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"process {setting.process_id} could not reach process 0 at {where} within "
                    f"{setting.initialization_timeout:g} s: {error}"
                ) from error
            time.sleep(0.1)
    channel = Channel(connection, kinds)
    channel.deadline = max(deadline, time.monotonic() + _HANDSHAKE_S)
    try:
        greeting = channel._exactly(len(_MAGIC) + _NONCE)
        nonce, theirs = secrets.token_bytes(_NONCE), greeting[len(_MAGIC) :]
        connection.sendall(_MAGIC + nonce + _proof(b"follower", theirs, nonce))
        proof = channel._exactly(_DIGEST)
    except OSError as error:
        channel.close()
        raise ConfigError(f"process 0 at {where} refused process {setting.process_id}: {error}") from error
    if not greeting.startswith(_MAGIC) or not hmac.compare_digest(proof, _proof(b"leader", nonce, theirs)):
        channel.close()
        raise ConfigError(f"what answers at {where} is not process 0 of this job")
    channel.deadline = None
    connection.settimeout(None)
    ids = {"process_id": setting.process_id, "num_processes": setting.num_processes}
    channel.send({**ids, "name": own_name(), "versions": versions()})
    return Peer(0, where, channel)
