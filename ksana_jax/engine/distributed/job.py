"""The job that this process belongs to: its connections, jax across its processes, and its end when one of them fails.

A collective whose peer has exited may fail, or wait for ever. So a thread of process 0 listens to each other
process, and a thread of each to process 0: a broken connection fails the job. A caller in a collective then gets its
exception replaced by the reason, or, if it still waits, the process ends with that line.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import os
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from ksana_jax.core.errors import ConfigError, JobError, one_line
from ksana_jax.core.hosts_setting import SPMD, HostsSetting
from ksana_jax.devices.starting import use_device
from ksana_jax.engine.distributed import rendezvous
from ksana_jax.engine.distributed.rendezvous import Peer

# Seconds for a collective to notice that the job has failed, and for a failed collective to learn why.
GRACE_S = 3.0
_LEAVE_S = 5.0
# Arguments of jax.distributed.initialize. The job notices lost processes itself, and waits for paused ones: jax aborts
# all processes, without a name, when a heartbeat is missing.
_LIMITS: dict[str, Any] = {"heartbeat_timeout_seconds": 10**6, "shutdown_timeout_seconds": 30}
# Key of process 0's address in the store of jax.distributed, and how long others wait for it.
_ADDRESS_KEY, _ADDRESS_MS = "ksana_jax/address", 300_000
_lock = threading.Lock()
_job: Job | None = None


class Job:
    """All processes of a job, seen from one of them.

    Args:
      setting: of this process. peers: the other processes, or for those that follow process 0 alone.

    Attributes:
      lock: held from sending something until this process has started it too, so that all have one order.
      failure: why the job has ended; None if it has not.
      closing: engines to be closed before the next message: one may be collected in the middle of another.
      messages: arrived from peers, each with its peer. {"bye": True} is process 0's end, {"gone": True} a failure.
    """

    def __init__(self, setting: HostsSetting, peers: list[Peer]):
        self.setting, self.peers, self._process = setting, peers, os.getpid()
        self.lock, self._sending = threading.RLock(), threading.Lock()
        self.failure: str | None = None
        self._failed, self._changing = threading.Event(), threading.Lock()
        self._waiting: dict[int, float] = {}  # thread: start of its wait for other processes
        self._leaving = False
        self._left: float | None = None  # when the process's exit began
        self.closing: collections.deque[int] = collections.deque()
        self.messages: queue.SimpleQueue[tuple[Peer, Any]] = queue.SimpleQueue()
        for peer in peers:
            threading.Thread(target=self._listen, args=(peer,), daemon=True, name=f"ksana-{peer.process_id}").start()
        atexit.register(self._leave)

    @property
    def leads(self) -> bool:
        """True if this is process 0."""
        return self.setting.process_id == 0

    def _listen(self, peer: Peer) -> None:
        while True:
            try:
                message = peer.connection.recv()
            except Exception as error:  # of the connection, or of what it brought
                if not self._leaving:
                    self.fail(f"{peer} is gone: {str(error) or 'the connection was closed'}")
                    if not (self.leads or self.setting.spmd):
                        end_process(str(self.failure))  # now: jax aborts processes whose service has gone
                    self.messages.put((peer, {"gone": True}))
                return
            if isinstance(message, dict) and "failed" in message:
                self.fail(f"{peer} failed: {message['failed']}")
            if isinstance(message, dict) and "bye" in message:
                self._leaving = True
            self.messages.put((peer, message))

    def send(self, message: Any) -> None:
        """Sends a message to all peers; a broken connection fails the job.

        Raises:
          JobError: the job has failed.
        """
        self.check()
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            for peer in self.peers:
                try:
                    peer.connection.send_bytes(data)
                except OSError as error:
                    self.fail(f"{peer} is gone: {error}")
        self.check()

    def replies(self) -> list[tuple[Peer, Any]]:
        """Waits for one message of each peer.

        Raises:
          JobError: the job has failed, or process 0 of an SPMD program has ended.
        """
        found: dict[int, tuple[Peer, Any]] = {}
        while len(found) < len(self.peers):
            peer, message = self.messages.get()
            self.check()
            if isinstance(message, dict) and "bye" in message:
                raise JobError(f"{peer} has ended its program, and process {self.setting.process_id} calls more steps")
            found[peer.process_id] = (peer, message)
        return [found[peer.process_id] for peer in self.peers]

    def agree(self, own: Any) -> list[Any]:
        """Returns the values of all processes, by their ids; all of them call this.

        Raises:
          JobError: see `replies`.
        """
        if self.leads:
            values = [own, *(value for _, value in self.replies())]
            self.send(values)
            return values
        self.send(own)
        return self.replies()[0][1]

    def check(self) -> None:
        """Checks that the job has not failed.

        Raises:
          JobError: it has failed.
        """
        if self.failure is not None:
            raise JobError(self.failure)

    def fail(self, why: str) -> None:
        """Ends the job; the first reason counts."""
        with self._changing:
            if self.failure is not None or self._leaving:
                return
            self.failure = why
        self._failed.set()
        threading.Thread(target=self._end_if_stuck, daemon=True, name="ksana-end").start()

    def wait_for_failure(self) -> None:
        """Gives a broken connection time to be noticed, after a collective has failed, perhaps because of it."""
        self._failed.wait(GRACE_S / 2)

    def _end_if_stuck(self) -> None:
        failed = time.monotonic()
        while True:
            time.sleep(GRACE_S / 10)
            now = time.monotonic()
            if any(now - max(since, failed) > GRACE_S for since in list(self._waiting.values())):
                end_process(f"{self.failure}")
            if self._left is not None and now - max(self._left, failed) > _LEAVE_S:
                os._exit(1)  # what collectives have left behind keeps the process from ending

    @contextlib.contextmanager
    def together(self, collective: bool = True) -> Iterator[None]:
        """Surrounds waits for other processes: this process ends if the job fails and the wait continues.

        Args:
          collective: whether the job has failed if this process fails in it.

        Raises:
          JobError: the job has failed.
        """
        self.check()
        thread = threading.get_ident()
        self._waiting[thread] = time.monotonic()
        try:
            yield
        except JobError:
            raise
        except BaseException as error:
            if collective:
                # A collective often fails before the connection is known to be broken.
                if isinstance(error, Exception):
                    self.wait_for_failure()
                line = " ".join(str(error).split())[:300]
                self.fail(f"process {self.setting.process_id} failed in a step: {type(error).__name__}: {line}")
            if self.failure is not None and isinstance(error, Exception):
                raise JobError(self.failure) from error
            raise
        finally:
            self._waiting.pop(thread, None)

    def _leave(self) -> None:
        """Ends this process's part of the job, at its exit; a forked child has none."""
        if self._process != os.getpid():
            return
        if self.leads and self.failure is None:
            with contextlib.suppress(JobError):
                self.send({"bye": True})
        self._leaving, self._left = True, time.monotonic()
        if self.failure is not None:
            leave_jax()


def end_process(why: str) -> None:
    """Prints one line and ends the process, even if threads wait."""
    sys.stdout.flush()
    print(f"ksana: error: {one_line(why)}", file=sys.stderr, flush=True)
    os._exit(1)


def leave_jax() -> None:
    """Keeps jax from waiting at exit for processes that may be lost, and its service until the process has ended."""
    state: Any = distributed.global_state
    for held in (state.client, state.service, state.preemption_sync_manager):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    state.client = state.service = state.preemption_sync_manager = None


def join(given: Any, device: Any) -> Job:
    """Starts jax in this process together with the others of a job, if it has not started; a process joins one job.

    Args:
      given: see `HostsSetting.read`; not None. device: as in `EngineConfig`; process 0's counts.

    Raises:
      ConfigError: a process is missing or differs, or jax has already started alone.
    """
    global _job
    with _lock:
        setting = HostsSetting.read(given)
        if _job is not None:
            if setting not in (_job.setting, SPMD if _job.setting.spmd else "auto"):
                raise ConfigError(f"distributed is {setting}, this process has joined {_job.setting}: it joins one job")
            return _job
        if named := isinstance(setting, HostsSetting):
            if jax.distributed.is_initialized() or xla_bridge.backends_are_initialized():
                raise ConfigError(
                    "distributed: jax has already started; give auto or spmd where jax.distributed runs, or make the "
                    "engine before the first use of jax"
                )
        else:
            setting = _of_jax(setting == SPMD)
        peers = rendezvous.gather(setting) if setting.process_id == 0 else [rendezvous.reach(setting)]
        job = Job(setting, peers)
        if job.leads:
            welcome = {"service": _free_address(setting.address[0]) if named else None, "device": device}
            job.send(welcome)
        else:
            [(leader, welcome)] = job.replies()
            if "refused" in welcome:
                raise ConfigError(f"{leader} refused process {setting.process_id}: {welcome['refused']}")
        with job.together():
            if named:
                own, service = (setting.num_processes, setting.process_id), welcome["service"]
                detects = {"cluster_detection_method": "deactivate", "initialization_timeout": 60}
                _initialize(service, *own, coordinator_bind_address=service, **detects)
            _connect_cpus(setting.address[0] if job.leads else rendezvous.own_address(peers[0]))
            use_device(welcome["device"])
            jax.devices()
        _job = job
        return job


def _free_address(host: str) -> str:
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family) as free:
        return f"{f'[{host}]' if ':' in host else host}:{free.getsockname()[1]}"


def _of_jax(spmd: bool) -> HostsSetting:
    """Returns a setting for the processes of jax.distributed, started by their launcher or before."""
    if not jax.distributed.is_initialized():
        try:
            _initialize()
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"distributed is {SPMD if spmd else 'auto'}, and jax cannot start: no launcher that jax knows has "
                f"started this process, or it has used jax ({one_line(error)})"
            ) from error
    state: Any = distributed.global_state
    if state.num_processes < 2:
        raise ConfigError("distributed is auto, and jax.distributed runs with one process")
    if state.process_id == 0:
        address = _free_address(state.coordinator_address.rpartition(":")[0].strip("[]"))
        state.client.key_value_set(_ADDRESS_KEY, address)
    else:
        address = state.client.blocking_key_value_get(_ADDRESS_KEY, _ADDRESS_MS)
    return HostsSetting(address, state.num_processes, state.process_id, spmd=spmd)


def _initialize(*where: Any, **settings: Any) -> None:
    # Its preemption service would catch SIGTERM and do nothing.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(*where, **_LIMITS, **settings)


def _connect_cpus(own_address: str) -> None:
    """Has gloo, of jax's CPU, listen at an address: by default it takes the host's name, which is often loopback."""
    client: Any = distributed.global_state.client

    def cpu_client() -> Any:
        gloo = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=own_address)
        return xla_bridge.make_cpu_client(collectives=gloo)

    if not xla_bridge.backends_are_initialized():
        xla_bridge.register_backend_factory("cpu", cpu_client, priority=0, fail_quietly=False)
