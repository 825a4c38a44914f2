"""The end of a process of a job, and its agreement with others."""

import os
import queue

import numpy as np
import pytest

from ksana_jax.core.errors import ConfigError, JobError
from ksana_jax.core.hosts_setting import HostsSetting
from ksana_jax.engine.distributed import job
from ksana_jax.engine.distributed.driver import SameCalls, digest
from ksana_jax.engine.distributed.rendezvous import Peer


class FakeConnection:
    """A connection that records sent messages, and on which some arrive."""

    def __init__(self, *messages):
        self.sent, self.arriving = [], queue.SimpleQueue()
        for message in messages:
            self.arriving.put(message)

    def send_bytes(self, data):
        self.sent.append(job.pickle.loads(data))

    def recv(self):
        return self.arriving.get()


@pytest.fixture(autouse=True)
def stays(monkeypatch):
    monkeypatch.setattr(job.atexit, "register", lambda function: None)


def test_a_forked_child_that_ends_does_not_take_leave_for_its_parent(monkeypatch):
    connection = FakeConnection()
    found = job.Job(HostsSetting("127.0.0.1:1", 2, 0), [Peer(1, "other", connection)])
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        found._leave()
    assert not connection.sent
    found._leave()
    assert connection.sent == [{"bye": True}]


def test_where_jax_runs_already_the_setting_is_auto(monkeypatch):
    monkeypatch.setattr(job.distributed.global_state, "client", object())
    monkeypatch.setattr(job.distributed.global_state, "num_processes", 1)
    with pytest.raises(ConfigError, match=r"jax has already started; give auto or spmd where jax\.distributed runs"):
        job.join({"coordinator_address": "127.0.0.1:1", "num_processes": 2, "process_id": 0}, None)
    with pytest.raises(ConfigError, match=r"jax\.distributed runs with one process"):
        job.join("auto", None)


def test_without_a_launcher_auto_is_one_clear_error():
    with pytest.raises(ConfigError, match="distributed is spmd, and jax cannot start: no launcher that jax knows"):
        job.join("spmd", None)


def same_calls(process_id, *messages) -> SameCalls:
    setting = HostsSetting("127.0.0.1:1", 2, process_id, spmd=True)
    found = SameCalls(job.Job(setting, [Peer(1 - process_id, "other", FakeConnection(*messages))]), "m", "auto")
    found.number = 0
    return found


def test_equal_calls_of_an_spmd_program_pass():
    inputs = ({"tokens": np.arange(3)}, 0.5)
    ours = ("step", 0, digest(inputs))
    for workers in (same_calls(0, ours), same_calls(1, [ours, ours])):
        workers._send("step", *inputs)
        assert workers.job.failure is None


@pytest.mark.parametrize("process_id", [0, 1])
def test_other_calls_of_an_spmd_program_are_an_error_that_names_the_process(process_id):
    ours, other = ("step", 0, digest((np.arange(3),))), ("step", 0, "0" * 12)
    workers = same_calls(0, other) if process_id == 0 else same_calls(1, [other, ours])
    with pytest.raises(JobError, match=r"^process 1 calls step of engine 0 with inputs \w{12}, process 0 step"):
        workers._send("step", np.arange(3))


def test_measured_times_do_not_decide_in_an_spmd_program():
    with pytest.raises(ConfigError, match=r"preempt auto and host_cache_bytes: measured times decide, which differ"):
        same_calls(0)._prepare(None, {"host_cache_bytes": 2**20, "preempt": "auto"}, [])


def test_a_process_that_ends_while_another_calls_is_named():
    with pytest.raises(JobError, match=r"^process 0 \(other\) has ended its program, and process 1 calls more steps$"):
        same_calls(1, {"bye": True})._send("step")


def test_digests_differ_with_values_shapes_and_types():
    inputs = [1, 1.0, "1", None, True, [1], (1,), {1: 1}, np.zeros(2, np.int32), np.zeros(2, np.float32)]
    inputs += [np.zeros((1, 2), np.int32), [[1], 2], [[1, 2]], HostsSetting("a:1", 2, 0), HostsSetting("a:1", 2, 1)]
    assert len(set(map(digest, inputs))) == len(inputs)
    assert digest(np.arange(6).reshape(2, 3).T) == digest(np.arange(6).reshape(2, 3).T.copy())
