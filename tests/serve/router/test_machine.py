"""Random simulations of a router: servers come and go, requests begin, progress and end in any order."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ksana_jax.serve.router import POLICIES, BlockRemoved, BlockStored, NoServer, Router, RouterSettings
from tests.serve.router.invariants import check_router
from tests.serve.router.prompts import request

TEXTS = st.text("ab", max_size=8)
TABLE = {"name": "prefix_table", "min_rate": 0.02, "max_prefixes_per_server": 2, "grow_after_s": 1, "shrink_after_s": 2}


class Lives(RuleBasedStateMachine):
    """The model: which requests are open, and on which server."""

    @initialize(policy=st.sampled_from([*sorted(set(POLICIES) - {"prefix_table"}), TABLE]), pool=st.booleans())
    def start(self, policy, pool):
        tokens = 1200 if pool else None
        self.router = Router("ab", policy, RouterSettings(100, 1000, pool_tokens=tokens, ttl_s=20))
        self.now, self.count = 0.0, 0
        self.open, self.ended = {}, {}
        self.draining = set()

    @rule(passed=st.floats(0, 9), text=TEXTS, own=st.integers(0, 3), extra=st.integers(1, 99), out=st.booleans())
    def choose(self, passed, text, own, extra, out):
        self.now += passed
        self.count += 1
        asked = request(self.count, 100 * (len(text) + own) + extra, text)
        exclude = {min(self.router.servers, default="")} if out else set()
        allowed = set(self.router.servers) - self.draining - exclude
        if not allowed:
            with pytest.raises(NoServer):
                self.router.choose(asked, self.now, exclude)
            return
        server = self.router.choose(asked, self.now, exclude)
        assert server in allowed
        self.open[asked.request_id] = server

    def one(self, data):
        return data.draw(st.sampled_from(sorted(self.open))) if self.open else None

    @rule(data=st.data(), tokens=st.integers(0, 5))
    def progress(self, data, tokens):
        if (name := self.one(data)) is not None:
            self.now += 0.125
            self.router.first_token(name, self.now)
            self.router.progress(name, tokens, self.now)

    @rule(data=st.data(), cached=st.none() | st.integers(0, 500))
    def finish(self, data, cached):
        if (name := self.one(data)) is not None:
            assert self.router.finished(name, self.now, cached)
            self.ended[name] = self.open.pop(name)

    @rule()
    def nothing_ends_twice(self):
        for name in self.ended:
            assert not self.router.finished(name, self.now)
            self.router.progress(name, 3, self.now)

    @rule(data=st.data())
    def drain(self, data):
        if self.router.servers:
            server = data.draw(st.sampled_from(sorted(self.router.servers)))
            self.router.set_weight(server, 0.0)
            self.draining.add(server)

    @rule(data=st.data())
    def die(self, data):
        if self.router.servers:
            server = data.draw(st.sampled_from(sorted(self.router.servers)))
            lost = self.router.remove(server, self.now)
            assert sorted(lost) == sorted(name for name, at in self.open.items() if at == server)
            for name in lost:
                self.ended[name] = self.open.pop(name)
            self.draining.discard(server)

    @rule(server=st.sampled_from("abcdef"))
    def join(self, server):
        if server not in self.router.servers:
            self.router.add_server(server)

    @rule(data=st.data(), text=TEXTS, removed=st.booleans())
    def report(self, data, text, removed):
        if self.router.servers:
            server = data.draw(st.sampled_from(sorted(self.router.servers)))
            hashes = request("x", 100 * len(text), text).hashes
            events = [BlockStored(hashes), *([BlockRemoved(hashes[len(hashes) // 2 :])] if removed else [])]
            self.router.events(server, events)

    @invariant()
    def all_is_right(self):
        if hasattr(self, "router"):
            check_router(self.router)
            live = self.router.ledger.live
            assert live.keys() == self.open.keys()
            assert all(self.router._ids[live[name].server] == server for name, server in self.open.items())
            assert (self.router.ledger.wait_s(self.now) >= 0).all()


class TestLives(Lives.TestCase):
    settings = settings(
        max_examples=25,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )


@pytest.mark.soak
class TestManyLives(Lives.TestCase):
    settings = settings(
        max_examples=600, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
    )
