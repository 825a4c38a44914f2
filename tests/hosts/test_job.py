"""The end of a process of a job."""

import os
import queue

from ksana_jax.hosts import job
from ksana_jax.hosts.rendezvous import Peer
from ksana_jax.hosts.setting import HostsSetting
from ksana_jax.hosts.wire import Closed


class FakeChannel:
    """A connection that records what is sent, and waits until it is closed."""

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
