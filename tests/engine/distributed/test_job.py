"""The end of a process of a job."""

import os
import queue

import pytest

from ksana_jax.core.errors import ConfigError, JobError
from ksana_jax.core.hosts_setting import HostsSetting
from ksana_jax.engine.distributed import job
from ksana_jax.engine.distributed.rendezvous import Peer
from ksana_jax.engine.distributed.wire import Closed


class FakeChannel:
    """A connection that records sent messages, and waits until it is closed."""

    def __init__(self):
        self.sent, self.closed = [], queue.SimpleQueue()

    def send(self, message):
        self.sent.append(message)

    def receive(self):
        self.closed.get()
        raise Closed("of the test")

    def close(self):
        self.closed.put(None)


def test_a_forked_child_that_ends_does_not_take_leave_for_its_parent(monkeypatch):
    monkeypatch.setattr(job.atexit, "register", lambda function: None)
    monkeypatch.setattr(job, "forget_jax", lambda: None)
    channel = FakeChannel()
    found = job.Job(HostsSetting("127.0.0.1:1", 2, 0), [Peer(1, "other", channel)])
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        found._leave()
    assert not channel.sent and channel.closed.empty()
    found._leave()
    assert channel.sent == [{"bye": True}]


class Talking(FakeChannel):
    """A connection on which one message arrives."""

    def __init__(self, message):
        super().__init__()
        self.message = [message]

    def receive(self):
        return self.message.pop() if self.message else super().receive()


@pytest.mark.parametrize("message", [3, None, [1], "text", {1: 2}, ("step", 0), ("step",), ([], 0)])
def test_a_message_of_another_form_ends_the_job_with_the_reason(message, monkeypatch):
    monkeypatch.setattr(job.atexit, "register", lambda function: None)
    found = job.Job(HostsSetting("127.0.0.1:1", 2, 0), [Peer(1, "other", Talking(message))])
    with pytest.raises(JobError, match=r"^process 1 \(other\) is gone: what arrived is no message$"):
        found.replies()


def test_a_follower_takes_requests_of_process_0_alone_in_their_form(monkeypatch):
    monkeypatch.setattr(job.atexit, "register", lambda function: None)
    leader = Peer(0, "first", Talking(("step", 3, [1])))
    found = job.Job(HostsSetting("127.0.0.1:1", 2, 1), [leader])
    assert found.messages.get(timeout=5) == (leader, ("step", 3, [1])) and found.failure is None
    for message in (("step", "3"), (1, 2), ("step",)):
        with pytest.raises(Closed):
            found._checked(message)


@pytest.mark.parametrize("welcome", [3, [], {}, {"service": 3, "device": None}, {"service": "a:1"}])
def test_a_welcome_of_another_form_is_one_clear_error(welcome, monkeypatch):
    monkeypatch.setattr(job.rendezvous, "reach", lambda *given: Peer(0, "a:1", Talking(welcome)))
    with pytest.raises(ConfigError, match="what answers at a:1 is not process 0 of this job"):
        job._follow(HostsSetting("127.0.0.1:1", 2, 1), ())


def test_where_jax_runs_already_the_setting_is_auto(monkeypatch):
    from jax._src import distributed

    monkeypatch.setattr(distributed.global_state, "client", object())
    monkeypatch.setattr(distributed.global_state, "num_processes", 1)
    with pytest.raises(ConfigError, match=r"jax has already started; where jax\.distributed runs, give auto$"):
        job._read({"coordinator_address": "127.0.0.1:1", "num_processes": 2, "process_id": 0})
    with pytest.raises(ConfigError, match=r"jax\.distributed runs with one process"):
        job._read("auto")
