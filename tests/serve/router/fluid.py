"""A small model of servers for comparing policies: prefill first in, first out at one rate; an LRU of blocks.

Decode takes a fixed time for each token and no capacity. Routers see no more than in earnest: what they sent, and first
tokens and ends when they happen.
"""

import collections
import dataclasses
import heapq
import itertools
import math

import numpy as np

from ksana_jax.serve.router import RoutedRequest, Router, RouterSettings, hashes_of
from tests.serve.router.invariants import check_router

BLOCK = 512
RATE = 8000.0
DECODE_S = 0.02


@dataclasses.dataclass
class Server:
    num_blocks: int
    free_s: float = 0.0
    work_s: float = 0.0
    cached: collections.OrderedDict = dataclasses.field(default_factory=collections.OrderedDict)

    def serve(self, request, now):
        """Returns when the first token comes, and how many tokens were cached."""
        found = next((n for n, h in enumerate(request.hashes) if h not in self.cached), len(request.hashes))
        hit = min(found * BLOCK, request.num_prompt - 1)
        seconds = (request.num_prompt - hit) / RATE
        self.free_s = max(now, self.free_s) + seconds
        self.work_s += seconds
        for h in reversed(request.hashes):
            self.cached[h] = None
            self.cached.move_to_end(h)
        while len(self.cached) > self.num_blocks:
            self.cached.popitem(last=False)
        return self.free_s, hit


@dataclasses.dataclass
class Outcome:
    ttft: np.ndarray
    hit_rate: float
    skew: float  # largest over mean work of a server
    load: float  # mean work over time

    @property
    def p50(self):
        return float(np.median(self.ttft))

    @property
    def p99(self):
        return float(np.percentile(self.ttft, 99))


def prompts(workload):
    """Returns (num_prompt, hashes) of each item; made once for all policies."""
    return [(item.num_prompt, hashes_of(item.tokens(), BLOCK)) for item in workload.items]


def at_load(workload, num_servers, load):
    """Returns the workload at the rate at which servers without caches would be busy for a share of their time."""
    return workload.scaled(load * num_servers * RATE / float(np.mean([item.num_prompt for item in workload.items])))


def run(policy, workload, chains, num_servers, num_blocks, seed=0, check=False, **settings):
    """Serves a workload; num_blocks: that each server caches."""
    settings = RouterSettings(BLOCK, RATE, pool_tokens=num_blocks * BLOCK, **settings)
    router = Router(range(num_servers), policy, settings, seed)
    servers = [Server(num_blocks) for _ in range(num_servers)]
    workers = collections.defaultdict(list)
    for item in workload.items:
        if item.after is not None:
            workers[item.after].append(item)
    serial = itertools.count()
    events = [(i.arrival_s, next(serial), "arrives", i) for i in workload.items if i.after is None]
    heapq.heapify(events)
    ttft, hits = np.full(len(workload.items), math.nan), 0
    while events:
        now, _, what, item = heapq.heappop(events)
        name = str(item.index)
        if what == "arrives":
            num_prompt, hashes = chains[item.index]
            request = RoutedRequest(name, num_prompt, hashes, item.max_tokens, item.client)
            first_s, hit = servers[router.choose(request, now)].serve(request, now)
            ttft[item.index] = first_s - now
            hits += hit
            heapq.heappush(events, (first_s, next(serial), "first token", item))
            heapq.heappush(events, (first_s + DECODE_S * item.num_output, next(serial), "ends", item))
        elif what == "first token":
            router.first_token(name, now)
        else:
            router.progress(name, item.num_output, now)
            router.finished(name, now)
            for follower in workers[item.index]:
                heapq.heappush(events, (now + follower.think_s, next(serial), "arrives", follower))
        if check:
            check_router(router)
    check_router(router)
    assert not router.ledger.live and not np.isnan(ttft).any()
    work = np.array([server.work_s for server in servers])
    total = sum(num_prompt for num_prompt, _ in chains)
    return Outcome(ttft, hits / total, float(work.max() / work.mean()), float(work.mean() / now))
