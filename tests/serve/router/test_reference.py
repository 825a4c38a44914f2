"""Every choice on random traces is one that a plain implementation of its policy allows, with loops over servers."""

import copy
import math
import random

import pytest

from ksana_jax.serve.router import POLICIES, BlockStored, Router, RouterSettings
from ksana_jax.serve.router.policies.chwbl import _point
from tests.serve.router.prompts import request

BLOCK = 100
# Arithmetic in another order differs by rounding.
CLOSE = 1e-9
TABLE = {"name": "prefix_table", "min_rate": 0.02, "max_prefixes_per_server": 2, "grow_after_s": 0.5, "window_s": 20}
SETTINGS = {"chwbl": {"name": "chwbl", "points": 7}, "prefix_table": TABLE, "e2": {"name": "e2", "window_s": 30}}
SETTINGS |= {"cache_aware": {"name": "cache_aware", "balance_abs": 3}}


class Reference:
    """The servers that a policy may choose, from the router's state before the choice."""

    def __init__(self, router):
        self.router, self.last, self.sent, self.waits = router, -1, [], {}
        self.outputs, self.ended = 0, 0

    def begin(self, asked, now, ready):
        self.asked, self.now, self.ready = asked, now, ready
        self.token_s = self.router.ledger.token_s.tolist()
        self.blocks = {n: self.blocks_of(n) for n in ready}

    def blocks_of(self, server):
        cache, count = self.router.index._caches[server], 0
        for name in self.asked.hashes:
            if name not in cache.expected and name not in cache.stored:
                break
            count += 1
        return count

    def tokens(self, n):
        return min(self.blocks[n] * BLOCK, self.asked.num_prompt - 1)

    def requests(self, n):
        return len(self.router.ledger.on(n))

    def wait(self, n):
        ledger, s = self.router.ledger, self.router.settings
        queue = [live for live in ledger.on(n) if not live.decoding]
        work = sum(live.work for live in queue)
        rows = self.requests(n) - len(queue)
        held = sum(live.held for live in ledger.on(n))
        full = s.pool_tokens is not None and held > s.full_pool * s.pool_tokens
        done_s = min(self.now - ledger.since[n], queue[0].work * self.token_s[n]) if queue else 0
        return work * self.token_s[n] - done_s + rows * s.decode_row_s + full * s.full_pool_s

    def prefill(self, n):
        new = self.asked.num_prompt - self.tokens(n)
        stored = self.router.index._caches[n].stored
        slow = sum("GPU" not in stored.get(name, {"GPU"}) for name in self.asked.hashes[: self.blocks[n]])
        return self.token_s[n] * (self.router.settings.work(new, self.tokens(n)) + 0.25 * BLOCK * slow)

    def ttft(self, n):
        return self.wait(n) + self.prefill(n)

    def lowest(self, cost, servers=None):
        costs = {n: cost(n) for n in (self.ready if servers is None else servers)}
        return {n for n, c in costs.items() if c <= min(costs.values()) + CLOSE}

    # ------------------------------------------------------------------ one method for each policy

    def random(self):
        return set(self.ready)

    def round_robin(self):
        return {min([n for n in self.ready if n > self.last] or self.ready)}

    def least_work(self):
        return self.lowest(self.wait)

    def power_of_two(self):
        dice = random.Random()
        dice.setstate(self.router.random.getstate())
        return self.lowest(self.wait, dice.sample(self.ready, 2) if len(self.ready) > 1 else None)

    def chwbl(self):
        if not self.asked.hashes:
            return self.lowest(self.requests)
        policy, total = self.router.policy, sum(self.requests(n) for n in self.ready)
        open_ = {n for n in self.ready if self.requests(n) < math.ceil(policy.bound * (total + 1) / len(self.ready))}
        start = _point(self.asked.hashes[: policy.num_blocks][-1])
        ring = sorted((_point(b"%d/%d" % (n, p)), n) for n in policy._of_server for p in range(policy.points))
        at = next((place for place, (point, _) in enumerate(ring) if point >= start), 0)
        return {next(n for _, n in ring[at:] + ring[:at] if n in open_)}

    def cache_aware(self):
        policy, loads = self.router.policy, [self.requests(n) for n in self.ready]
        if max(loads) - min(loads) > policy.balance_abs and max(loads) > policy.balance_rel * min(loads):
            return self.lowest(self.requests)
        longest = max(self.blocks.values())
        if longest * BLOCK > policy.cache_threshold * self.asked.num_prompt:
            return {n for n in self.ready if self.blocks[n] == longest}
        return self.lowest(lambda n: self.router.index._caches[n].num_blocks)

    def e2(self):
        policy, index = self.router.policy, self.router.index
        self.sent = [s for s in self.sent if s["at"] > self.now - policy.window_s]

        def total(key, n):
            return sum(s[key] for s in self.sent if s["server"] == n)

        load = {n: total("load", n) for n in self.ready}
        skewed = max(load.values()) > policy.rebalance * min(load.values())
        longest = max(self.blocks_of(n) for n in range(len(index._caches)))
        if longest * BLOCK * 2 > self.asked.num_prompt:
            allowed = self.lowest(load.get, [n for n in self.ready if self.blocks[n] == longest] or None)
            if any(self.blocks[n] == longest for n in self.ready):
                # Which one of several is known after the choice: with one, what is expected there decides.
                if len(allowed) > 1:
                    return set(self.ready)
                [server] = allowed
                if not (skewed and load[server] == max(load.values())) and not self.must_copy(server):
                    return allowed

        def cost(n):
            full = index._caches[n].num_blocks >= index.capacity[n]
            hits = total("matched", n) / max(total("prompt", n), 1)
            return load[n] + self.prefill(n) * (1 + hits * full)

        return self.lowest(cost)

    def must_copy(self, server):
        waits = self.router.policy._waits
        held = [self.blocks_of(n) for n in range(len(self.router.index._caches))]
        everywhere = sum(b > 0 for b in held) >= len(self.ready)
        block = min((min(b for b in held if b) if everywhere else 0), len(self.asked.hashes) - 1)
        recent_s, usual_s = waits.get(self.asked.hashes[block], (self.ttft(server),) * 2)
        recent_s += 0.2 * (self.ttft(server) - recent_s)
        usual_s += 0.02 * (self.ttft(server) - usual_s)
        return recent_s > self.router.policy.copy * usual_s

    def min_ttft(self):
        return self.lowest(self.ttft)

    def prefix_table(self):
        table = self.router.policy.table
        lengths = [n for n in range(len(self.asked.hashes), 0, -1) if self.asked.hashes[n - 1] in table.prefixes]
        if not lengths:
            return self.lowest(self.ttft)
        prefix = copy.deepcopy(table.prefixes[self.asked.hashes[lengths[0] - 1]])  # should_grow notes something in it
        inside = [n for n in self.ready if n in prefix.members or self.tokens(n) > prefix.num_tokens]
        elsewhere_s = min(self.wait(n) + prefix.num_tokens * self.token_s[n] for n in self.ready)
        crowded = min(map(self.wait, inside), default=math.inf) > elsewhere_s + CLOSE
        if table.should_grow(prefix, self.now, crowded):
            pool = (self.router.index.capacity * BLOCK).tolist()
            joins = [
                n
                for n in self.ready
                if n not in prefix.members
                and table.num_prefixes[n] < table.settings.max_prefixes_per_server
                and table.num_tokens[n] + prefix.num_tokens <= table.settings.pool_share * pool[n]
            ]
            if joins:
                # Whichever joins is one of these; the choice is then the best of those inside and it.
                return set().union(*(self.lowest(self.ttft, {*inside, n}) for n in self.lowest(self.ttft, joins)))
        outside = [n for n in self.ready if n not in inside]
        return self.lowest(self.ttft, outside if crowded else inside)

    def end(self, server, live):
        policy, self.last = self.router.policy, server
        decode_s = getattr(policy, "decode_token_s", 0) * self.outputs / max(self.ended, 1)
        load = live.work * self.token_s[server] + decode_s
        self.sent.append(
            {"at": self.now, "server": server, "load": load, "prompt": self.asked.num_prompt, "matched": live.matched}
        )


def live_through(policy, num_servers, count, seed):
    """Sends random requests, which progress and end at random times; yields the allowed and the chosen server."""
    dice = random.Random(seed)
    context, pool = dice.choice([None, 2000.0]), dice.choice([None, 2500])
    settings = RouterSettings(BLOCK, 1000, context_tokens=context, pool_tokens=pool, ttl_s=40)
    router = Router(range(num_servers - 2), SETTINGS.get(policy, policy), settings, seed)
    for number in (num_servers - 2, num_servers - 1):
        router.add_server(number, prefill_tokens_per_s=1500)
    reference, now, ready = Reference(router), 0.0, list(range(num_servers))
    for number in range(count):
        now += dice.expovariate(num_servers)
        if dice.random() < 0.02:
            drained = dice.randrange(num_servers)
            router.set_weight(drained, 0.0 if drained in ready and len(ready) > 2 else 1.0)
            ready = [n for n in range(num_servers) if router._weights[n] > 0]
        if dice.random() < 0.3:  # a server caches a text, the end of it in host memory
            hashes, place = request("", 600, "".join(dice.choice("aaab") for _ in range(6))).hashes, dice.randrange(7)
            events = [BlockStored(hashes[:place]), BlockStored(hashes[place:], medium="CPU")]
            router.events(dice.randrange(num_servers), events)
        text = "".join(dice.choice("aaab") for _ in range(dice.randrange(9)))
        asked = request(number, 100 * (len(text) + dice.randrange(4)) + dice.randrange(1, 100), text)
        router.index.sweep(now)
        reference.begin(asked, now, ready)
        allowed = getattr(reference, policy)()
        server = router.choose(asked, now)
        reference.end(server, router.ledger.live[asked.request_id])
        yield allowed, server
        for name in [name for name in router.ledger.live if dice.random() < 0.5 / num_servers]:
            router.progress(name, 3, now)
            if dice.random() < 0.7:
                reference.outputs += router.ledger.live[name].num_output
                reference.ended += 1
                router.finished(name, now)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_servers", "count", "seeds"), [(5, 300, 3), (40, 150, 1)])
def test_choices_are_those_of_a_plain_implementation(policy, num_servers, count, seeds):
    decided = 0
    for seed in range(seeds):
        for number, (allowed, server) in enumerate(live_through(policy, num_servers, count, seed)):
            assert server in allowed, f"request {number} of seed {seed}: {server}, allowed {sorted(allowed)}"
            decided += len(allowed) < num_servers / 2
    # Most choices are between few servers, or they would show nothing.
    assert policy == "random" or decided > 0.4 * count * seeds, decided
