"""The work of another process for process 0, and its refusals."""

import contextlib
import queue

import pytest

from ksana_jax.engine.distributed import worker
from ksana_jax.engine.distributed.rendezvous import Peer


class FakeJob:
    """A job in which process 0 has sent some messages."""

    failure = None

    def __init__(self, *messages):
        self.messages, self.sent = queue.SimpleQueue(), []
        self.peers = [Peer(0, "first", self)]
        self.channel = self
        for message in messages:
            self.messages.put((self.peers[0], message))

    waiting = contextlib.nullcontext
    setting = type("Setting", (), {"process_id": 1})

    def send(self, message):
        self.sent.append(message)

    def wait_for_failure(self):
        pass


@pytest.mark.parametrize("what", ["_submit", "__init__", "prepared", "anything" * 99])
def test_process_0_may_ask_for_nothing_but_the_work_of_an_engine(what, monkeypatch):
    def end(why):
        raise SystemExit(why)

    monkeypatch.setattr(worker, "end_process", end)
    job = FakeJob(("close", 0), (what, 0))
    with pytest.raises(SystemExit, match="process 1 failed: ValueError: process 0 asks for '"):
        worker.serve_driver(job)
    assert len(job.sent) == 1 and len(job.sent[0]["failed"]) < 100


def test_all_that_process_0_may_ask_for_is_there():
    assert all(callable(getattr(worker._Engine, name)) for name in worker.ASKED)
