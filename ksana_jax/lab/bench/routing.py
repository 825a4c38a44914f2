"""`ksana bench routing`: time to choose a server, by policy, number of servers and prompt length."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.bench.core import Bench, Case, option, spread
from ksana_jax.lab.experiments.tasks.results import Column, Measurement, ResultRow
from ksana_jax.serve.routing import POLICIES, RoutedRequest, Router, RouterSettings

BLOCK_SIZE = 512
PREFIXES = 64  # texts that prompts begin with, up to any of their blocks
BLOCKS_PER_SERVER = 2500


@dataclasses.dataclass
class Routing(Bench):
    """Measures how long the router takes to choose a server, and to account for the request.

    Prompts share prefixes of random length; two requests per server are under way, half of them in prefill."""

    WARM_TURN = False

    servers: tuple[int, ...] = option((16, 256, 1000), "numbers of servers")
    blocks: tuple[int, ...] = option((30, 200), "blocks of a prompt")
    policies: tuple[str, ...] = option(tuple(POLICIES), "policies to compare")
    requests: int = option(2000, "requests to time; medians are reported")
    seed: int = option(0, "seed of prompts and choices")

    def title(self) -> str:
        return f"Choice of a server, median of {self.requests:,} requests, {PREFIXES} shared prefixes"

    def cases(self) -> list[Case]:
        checks.require(
            *(checks.integer("servers", count) for count in self.servers),
            *(checks.integer("blocks", count) for count in self.blocks),
            *(checks.one_of("policies", name, POLICIES) for name in self.policies),
            checks.integer("requests", self.requests),
            checks.integer("seed", self.seed, 0),
            error=ConfigError,
        )
        return [
            Case(policy, {"servers": servers, "blocks": blocks})
            for servers in self.servers
            for blocks in self.blocks
            for policy in self.policies
        ]

    def start(self) -> None:
        self.routers: dict[str, _Steady] = {}

    def turn(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Measurement]]:
        for case in cases:
            yield case, self.measure(case)

    def measure(self, case: Case) -> Measurement:
        steady = self.routers.get(case.name)
        if steady is None:
            steady = self.routers[case.name] = _Steady(case.label, **case.point, seed=self.seed)
            steady.send(2 * case.point["servers"] + 200)
        return steady.send(self.requests)

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("match_s", "look-up, µs", _microseconds),
            Column("decision_s", "look-up + policy, µs", _microseconds),
            spread("decision_s"),
            Column("total_s", "with accounts, µs", _microseconds),
        ]

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        by_servers: dict[int, list[tuple[float, str]]] = {}
        for row in rows:
            if (seconds := row.mean("decision_s")) is not None:
                by_servers.setdefault(row.point["servers"], []).append((seconds, row.label))
        slowest = [f"{_microseconds(max(f)[0])} µs with {n:,} servers ({max(f)[1]})" for n, f in by_servers.items()]
        return f"Slowest decision: {', '.join(slowest)}." if slowest else ""

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        return [
            "Look-up: how much of the prompt each server caches, or only the chosen one if its policy did not ask. "
            "Accounts: ledger, index, and what the policy notes. Hashes of the prompt are not included.",
            *super().notes(rows),
        ]


class _Steady:
    """A router with a constant amount of work under way; its look-ups and its policy are timed."""

    def __init__(self, policy: str, servers: int, blocks: int, seed: int):
        settings = RouterSettings(block_size=BLOCK_SIZE, pool_tokens=BLOCKS_PER_SERVER * BLOCK_SIZE)
        self.router = Router(range(servers), policy, settings, seed)
        self.servers, self.blocks, self.dice = servers, blocks, random.Random(seed)
        self.numbers = itertools.count()
        self.texts = [[_name(text, block) for block in range(blocks)] for text in range(PREFIXES)]
        self.match_s: list[float] = []
        self.policy_s: list[float] = []  # without the look-up
        # A request takes one of two look-ups: of all servers if its policy asks for it, or of the one that was chosen.
        index: Any = self.router.index
        index.match, index.num_matched = (_timed(look, self.match_s) for look in (index.match, index.num_matched))
        self.router.policy.choose = _timed(self.router.policy.choose, self.policy_s, within=self.match_s)

    def send(self, count: int) -> Measurement:
        self.match_s.clear()
        self.policy_s.clear()
        total_s, router, clock = [], self.router, time.perf_counter
        gap_s = self.blocks * BLOCK_SIZE / router.settings.prefill_tokens_per_s / self.servers
        for _ in range(count):
            number = next(self.numbers)
            shared = self.dice.randrange(self.blocks)
            own = [_name(PREFIXES + number, block) for block in range(self.blocks - shared)]
            hashes = self.texts[self.dice.randrange(PREFIXES)][:shared] + own
            request = RoutedRequest(str(number), self.blocks * BLOCK_SIZE + 1, hashes)
            now = number * gap_s
            then = clock()
            router.choose(request, now)
            total_s.append(clock() - then)
            router.first_token(str(number - self.servers), now)
            router.finished(str(number - 2 * self.servers), now)
        match_s, policy_s = statistics.median(self.match_s), statistics.median(self.policy_s)
        return {
            "match_s": match_s,
            "decision_s": match_s + policy_s,
            "total_s": statistics.median(total_s),
        }


def _timed(function: Callable[..., Any], seconds: list[float], within: list[float] | None = None) -> Callable[..., Any]:
    """Wraps a function to add its seconds to a list, excluding timed calls in it, which add theirs to another."""
    clock, add, inner = time.perf_counter, seconds.append, [] if within is None else within

    def timed(*args: Any) -> Any:
        known, then = len(inner), clock()
        found = function(*args)
        add(clock() - then - sum(inner[known:]))
        return found

    return timed


def _name(text: int, block: int) -> bytes:
    """Returns a name as long as a hash."""
    return text.to_bytes(16, "little") + block.to_bytes(16, "little")


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"
