"""The job that this process belongs to: its connections, jax across its processes, and its end when one of them fails.

A collective whose peer has exited may fail, or wait for ever. So a thread of process 0 listens to each other
process, and a thread of each to process 0: a broken connection fails the job. A caller in a collective then gets its
exception replaced by the reason, or, if it still waits, the process ends with that line.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from ksana_jax.core.errors import ConfigError, JobError, one_line
from ksana_jax.core.hosts_setting import AUTO, HostsSetting
from ksana_jax.devices.starting import use_device
from ksana_jax.engine.distributed import rendezvous, service
from ksana_jax.engine.distributed.rendezvous import Peer
from ksana_jax.engine.distributed.wire import Closed, encoded

logger = logging.getLogger("ksana_jax")
# Seconds for a collective to notice that the job has failed, and for a failed collective to learn why.
GRACE_S = 3.0
_LEAVE_S = 5.0
# Key of process 0's address in the store of a jax.distributed that runs already, and how long others wait for it.
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
      started_jax: True if jax.distributed has been started for this job, and did not run before.
    """

    def __init__(self, setting: HostsSetting, peers: list[Peer]):
        self.setting, self.peers, self._process = setting, peers, os.getpid()
        self.lock = threading.RLock()
        self.failure: str | None = None
        self.started_jax = False
        self.service: Any = None  # the process of `service`, which ends when this one does
        self._failed, self._changing = threading.Event(), threading.Lock()
        self._waiting: dict[int, float] = {}  # thread: start of its wait for other processes
        self._leaving = False
        self._left: float | None = None  # when the process's exit began
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
                message = self._checked(peer.channel.receive())
            except Closed as error:
                if not self._leaving:
                    self.fail(f"{peer} is gone: {error}")
                    self.messages.put((peer, {"gone": True}))
                return
            if isinstance(message, dict) and "failed" in message:
                self.fail(f"{peer} failed: {' '.join(str(message['failed']).split())[:500]}")
            self.messages.put((peer, message))
            if isinstance(message, dict) and "bye" in message:
                self._leaving = True

    def _checked(self, message: Any) -> Any:
        """Returns a message that has a known form: names with values, or, of process 0, what to do with an engine."""
        named = isinstance(message, dict) and all(isinstance(name, str) for name in message)
        asked = isinstance(message, tuple) and [type(part) for part in message[:2]] == [str, int]
        if not named and (self.leads or not asked):
            raise Closed("what arrived is no message")
        return message

    def send(self, message: Any) -> None:
        """Sends a message to all peers; a broken connection fails the job.

        Raises:
          JobError: the job has failed.
        """
        self.check()
        if not self.peers:
            return
        pieces = encoded(message, self.peers[0].channel.kinds)
        for peer in self.peers:
            try:
                peer.channel.send_pieces(pieces)
            except Closed as error:
                self.fail(f"{peer} is gone: {error}")
        self.check()

    def replies(self) -> list[tuple[Peer, Any]]:
        """Waits for one message of each peer.

        Raises:
          JobError: the job has failed.
        """
        found: dict[int, tuple[Peer, Any]] = {}
        while len(found) < len(self.peers):
            peer, message = self.messages.get()
            self.check()
            found[peer.process_id] = (peer, message)
        return [found[peer.process_id] for peer in self.peers]

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
    def waiting(self) -> Iterator[None]:
        """Surrounds waits for other processes: this process ends if the job fails and the wait continues.

        Raises:
          JobError: the job has failed.
        """
        self.check()
        thread = threading.get_ident()
        self._waiting[thread] = time.monotonic()
        try:
            yield
        except Exception as error:
            if self.failure is not None and not isinstance(error, JobError):
                raise JobError(self.failure) from error
            raise
        finally:
            self._waiting.pop(thread, None)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Surrounds a collective action; if it fails in this process, the job has failed.

        Raises:
          JobError: the job has failed.
        """
        with self.waiting():
            try:
                yield
            except JobError:
                raise
            except BaseException as error:
                # A collective often fails before the connection is known to be broken.
                if isinstance(error, Exception):
                    self.wait_for_failure()
                line = " ".join(str(error).split())[:300]
                self.fail(f"process {self.setting.process_id} failed in a step: {type(error).__name__}: {line}")
                if isinstance(error, Exception):
                    raise JobError(str(self.failure)) from error
                raise

    def _leave(self) -> None:
        """Ends this process's part of the job, at its exit; a forked child has none."""
        if self._process != os.getpid():
            return
        self._leaving, self._left = True, time.monotonic()
        if self.leads:
            for peer in self.peers:
                with contextlib.suppress(Closed):
                    peer.channel.send({"bye": True})
        if self.started_jax:
            forget_jax()
        for peer in self.peers:
            peer.channel.close()


def end_process(why: str) -> None:
    """Prints one line and ends the process, even if threads wait."""
    sys.stdout.flush()
    print(f"ksana: error: {one_line(why)}", file=sys.stderr, flush=True)
    os._exit(1)


def current() -> Job | None:
    """Returns the job of this process; None if it belongs to none."""
    return _job


def join(given: Any, device: Any, kinds: Iterable[type]) -> Job:
    """Starts jax in this process together with the others of a job; a process joins one job.

    Args:
      given: see `HostsSetting.read`; not None. device: as in `EngineConfig`; process 0's counts.
      kinds: types of messages.

    Raises:
      ConfigError: a process is missing or differs, or jax has already started.
    """
    global _job
    with _lock:
        if _job is not None:
            _check_same(_job, given)
            return _job
        setting = _read(given)
        job = _lead(setting, device, kinds) if setting.process_id == 0 else _follow(setting, kinds)
        _job = job
        return job


def _read(given: Any) -> HostsSetting:
    """Returns the setting of this process; with auto, that of the jax.distributed that runs in it, if one does."""
    from jax._src import distributed, xla_bridge

    runs = distributed.global_state.client is not None
    if runs and given == AUTO:
        return _of_running_jax()
    if runs or xla_bridge.backends_are_initialized():
        what = "where jax.distributed runs, give auto" if runs else "the engine must come before its first use"
        raise ConfigError(f"distributed: jax has already started; {what}")
    setting = detected() if given == AUTO else HostsSetting.read(given)
    assert isinstance(setting, HostsSetting)
    return setting


def _of_running_jax() -> HostsSetting:
    """Returns a setting for the processes of the jax.distributed that runs; process 0 listens on another port."""
    from jax._src import distributed

    state: Any = distributed.global_state
    if state.num_processes < 2:
        raise ConfigError("distributed is auto, and jax.distributed runs with one process")
    if state.process_id == 0:
        host = state.coordinator_address.rpartition(":")[0]
        with socket.create_server(
            (host.strip("[]"), 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ) as free:
            address = f"{host}:{free.getsockname()[1]}"
        state.client.key_value_set(_ADDRESS_KEY, address)
    else:
        address = state.client.blocking_key_value_get(_ADDRESS_KEY, _ADDRESS_MS)
    return HostsSetting(address, state.num_processes, state.process_id)


def _check_same(job: Job, given: Any) -> None:
    setting = HostsSetting.read(given)
    if given != AUTO and setting != job.setting:
        raise ConfigError(f"distributed is {setting}, and this process has joined {job.setting}: it can join one job")


def _lead(setting: HostsSetting, device: Any, kinds: Iterable[type]) -> Job:
    peers = rendezvous.gather(setting, kinds)
    job = Job(setting, peers)
    address = None  # jax runs
    if not _jax_runs():
        address, job.service = service.start(setting.address[0], setting.num_processes)
    job.send({"service": address, "device": device})
    if address is not None:
        _start_jax(job, address, device, setting.address[0])
    return job


def _follow(setting: HostsSetting, kinds: Iterable[type]) -> Job:
    leader = rendezvous.reach(setting, kinds)
    try:
        welcome = leader.channel.receive()
    except Closed as error:
        raise ConfigError(f"{leader} is gone: {error}") from error
    if isinstance(welcome, dict) and "refused" in welcome:
        raise ConfigError(f"process 0 at {leader.name} refused process {setting.process_id}: {welcome['refused']}")
    expected = type(None) if _jax_runs() else str
    if not isinstance(welcome, dict) or type(welcome.get("service", 0)) is not expected or "device" not in welcome:
        raise ConfigError(f"what answers at {leader.name} is not process 0 of this job")
    job = Job(setting, [leader])
    if welcome["service"] is not None:
        _start_jax(job, welcome["service"], welcome["device"], leader.channel.socket.getsockname()[0])
    return job


def _start_jax(job: Job, address: str, device: Any, own_address: str) -> None:
    """Starts jax's backend, for which all processes wait for each other.

    Args:
      own_address: of this process, for the other processes.
    """
    import jax
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    setting, state, job.started_jax = job.setting, distributed.global_state, True
    with job.together():
        state.process_id, state.num_processes, state.coordinator_address = (
            setting.process_id,
            setting.num_processes,
            address,
        )
        client: Any = _jax.get_distributed_runtime_client(
            address, setting.process_id, init_timeout=60, heartbeat_timeout=service.NEVER_S, use_compression=True
        )
        client.connect()
        state.client = client

        # By default gloo takes the address of the host's name, which is often the loopback interface's.
        def cpu_client() -> Any:
            gloo = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=own_address)
            return xla_bridge.make_cpu_client(collectives=gloo)

        xla_bridge.register_backend_factory("cpu", cpu_client, priority=0, fail_quietly=False)
        use_device(device)
        jax.devices()


def _jax_runs() -> bool:
    from jax._src import distributed

    return distributed.global_state.client is not None


def forget_jax() -> None:
    """Keeps jax from disconnecting at exit from its coordination service, which may have ended."""
    from jax._src import distributed

    distributed.global_state.client = None


def detected() -> HostsSetting:
    """Returns the job described by this process's launcher: Slurm, Open MPI, or another one that jax knows.

    Raises:
      ConfigError: there is none.
    """
    import jax
    from jax._src import clusters

    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 300)
    address, num_processes, process_id, local_devices = found
    if address is None or num_processes is None or process_id is None:
        raise ConfigError("distributed is auto, and no launcher that jax knows has started this process")
    if local_devices:
        visible = ",".join(map(str, local_devices))
        jax.config.update("jax_cuda_visible_devices", visible)
        jax.config.update("jax_rocm_visible_devices", visible)
    return HostsSetting(address, num_processes, process_id)
