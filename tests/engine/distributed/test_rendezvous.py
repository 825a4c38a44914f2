"""Processes find each other, and refuse strangers to the job. Threads stand in for processes."""

import concurrent.futures
import contextlib
import os
import select
import socket
import time

import pytest

from ksana_jax import LLM, ModelConfig
from ksana_jax.core.config import ConfigError, EngineConfig
from ksana_jax.core.hosts_setting import HostsSetting
from ksana_jax.engine.distributed import rendezvous
from ksana_jax.engine.distributed.rendezvous import gather, reach


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("KSANA_JOB_TOKEN", "of the tests")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def settings(count: int, timeout: float = 10.0) -> list[HostsSetting]:
    address = f"127.0.0.1:{free_port()}"
    return [HostsSetting(address, count, index, timeout) for index in range(count)]


@contextlib.contextmanager
def started(*calls):
    """Futures of functions with their arguments, each in a thread."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        yield [pool.submit(function, *arguments) for function, *arguments in calls]


def test_all_processes_meet_in_any_order():
    own = settings(3)
    with started(*((reach, own[i]) for i in (2, 1)), (gather, own[0])) as (second, first, leading):
        peers = leading.result()
    assert [peer.process_id for peer in peers] == [1, 2]
    for peer, follower in zip(peers, (first.result(), second.result()), strict=True):
        peer.connection.send({"hello": peer.process_id})
        assert follower.connection.recv() == {"hello": peer.process_id}
        follower.connection.close()
        with pytest.raises(EOFError):
            peer.connection.recv()
        peer.connection.close()


def test_processes_that_do_not_arrive_are_named_on_both_sides():
    own = settings(4, timeout=0.6)
    with started((gather, own[0]), (reach, own[2])) as (leading, other):
        with pytest.raises(ConfigError, match=r"after 0.6 s, processes 1, 3 of 4 have not connected .* 127.0.0.1:\d+"):
            leading.result()
        assert "processes 1, 3 of 4" in refused(other.result())


def test_a_process_that_reaches_nobody_says_whom():
    with pytest.raises(
        ConfigError, match=r"process 1 could not reach process 0 at 127.0.0.1:.* within 0.3 s: .*refused"
    ):
        reach(settings(2, timeout=0.3)[1])


def close(*peers: rendezvous.Peer) -> None:
    for peer in peers:
        peer.connection.close()


def refused(leader: rendezvous.Peer) -> str:
    """Why process 0 has refused a process."""
    why = leader.connection.recv()["refused"]
    close(leader)
    return why


def connect(setting: HostsSetting) -> socket.socket:
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(setting.address)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n" + bytes(60), b"", b"\x00\x00\x00\x20" + bytes(32)])
def test_stray_connections_are_refused_and_the_job_goes_on(said, caplog):
    own = settings(2)
    with started((gather, own[0])) as [leading]:
        with connect(own[0]) as stray:
            stray.sendall(said)
        follower = reach(own[1])
        [peer] = leading.result()
        assert peer.process_id == 1
        close(peer, follower)


def test_connections_that_send_nothing_keep_nobody_waiting(monkeypatch):
    own = settings(3)
    with started((gather, own[0])) as [leading], contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(connect(own[0]))
        began = time.monotonic()
        first, second = reach(own[1]), reach(own[2])
        close(*leading.result(), first, second)
        assert time.monotonic() - began < 2.5


def test_a_silent_connection_is_closed():
    left, right = socket.socketpair(socket.AF_UNIX)
    connection = rendezvous.Connection(left.detach())
    with right, pytest.raises(OSError), rendezvous._limited(connection, 1):
        connection.recv()
    connection.close()


@pytest.mark.parametrize("other", ["theirs", ""])
def test_another_token_is_refused(other, monkeypatch):
    own = settings(2, timeout=1.0)
    with started((gather, own[0])) as [leading]:
        time.sleep(0.2)
        monkeypatch.setenv("KSANA_JOB_TOKEN", other)
        with pytest.raises(ConfigError, match="KSANA_JOB_TOKEN"):
            reach(own[1])
        with pytest.raises(ConfigError, match="process 1 of 2 have not"):
            leading.result()


def test_processes_with_other_versions_are_refused_on_both_sides(monkeypatch):
    own, real = settings(2), rendezvous.versions()
    others = iter([real | {"jax": "0.4.1"}, real])
    monkeypatch.setattr(rendezvous, "versions", others.__next__)
    with started((gather, own[0]), (reach, own[1])) as (leading, other):
        with pytest.raises(ConfigError, match=rf"process 1 \(.*\) has jax 0.4.1, process 0 has {real['jax']}"):
            leading.result()
        assert "has jax 0.4.1" in refused(other.result())


def test_another_number_of_processes_is_refused():
    own = settings(2)
    wrong = HostsSetting(own[0].coordinator_address, 3, 2)
    with started((gather, own[0]), (reach, wrong)) as (leading, other):
        assert "process_id 2 of 2 cannot be" in refused(other.result())
        follower = reach(own[1])
        close(*leading.result(), follower)


def test_a_process_id_is_given_once():
    own = settings(3)
    with started((gather, own[0])) as [leading]:
        one, other = reach(own[1]), reach(own[1])
        # Each is greeted in a thread, and either may be first.
        [ready], _, _ = select.select([one.connection, other.connection], [], [], 10)
        first, again = (other, one) if ready is one.connection else (one, other)
        assert "process_id 1 of 3 is " in refused(again)
        second = reach(own[2])
        peers = leading.result()
        assert len(peers) == 2
        close(*peers, first, second)


def test_an_address_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        own = HostsSetting(f"127.0.0.1:{taken.getsockname()[1]}", 2, 0)
        with pytest.raises(ConfigError, match=rf"process 0 cannot listen at {own.coordinator_address}: .*in use"):
            gather(own)


def test_the_kernel_watches_connections():
    own = settings(2)
    with started((gather, own[0]), (reach, own[1])) as futures:
        for peer in (futures[0].result()[0], futures[1].result()):
            with socket.socket(fileno=os.dup(peer.connection.fileno())) as found:
                assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert found.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == bytes(16)
                tcp = [found.getsockopt(socket.IPPROTO_TCP, n) for n in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)]
                assert sum(tcp) + 2 * tcp[1] <= 10
            close(peer)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "distributed is 3, must be auto, spmd or a mapping"),
        ({"coordinator": "a:1"}, "distributed has no field 'coordinator'; the nearest is 'coordinator_address'"),
        ({"coordinator_address": "a:1", "process_id": 0}, "distributed has no num_processes"),
        ({"coordinator_address": "a", "num_processes": 2, "process_id": 0}, "'a', must be HOST:PORT"),
        ({"coordinator_address": "a:99999", "num_processes": 2, "process_id": 0}, "must be HOST:PORT"),
        ({"coordinator_address": "a:1", "num_processes": 2, "process_id": 2}, "process_id is 2, must be below"),
        ({"coordinator_address": "a:1", "num_processes": 1, "process_id": 0}, "num_processes is 1"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(given, said):
    with pytest.raises(ConfigError, match=said) as caught:
        EngineConfig(distributed=given)
    assert "\n" not in str(caught.value)


def test_a_disk_tier_is_refused():
    given = {"coordinator_address": "[::1]:5000", "num_processes": 2, "process_id": 0}
    assert HostsSetting.read(given).address == ("::1", 5000)
    tiers = {"enable_prefix_caching": True, "host_cache_bytes": 2**20, "disk_cache_dir": "x"}
    with pytest.raises(ConfigError, match="disk_cache_dir does not go with distributed"):
        EngineConfig(distributed=given, **tiers)


def test_a_job_without_a_secret_is_refused(monkeypatch):
    monkeypatch.delenv("KSANA_JOB_TOKEN")
    for process_id, start in enumerate((gather, reach)):
        with pytest.raises(ConfigError, match=r"^distributed: KSANA_JOB_TOKEN is not set"):
            start(settings(2)[process_id])


def test_weights_in_memory_are_refused():
    given = {"coordinator_address": "127.0.0.1:5000", "num_processes": 2, "process_id": 0}
    with pytest.raises(ConfigError, match="weights in memory are those of one process"):
        LLM.from_params(ModelConfig(), None, distributed=given)
