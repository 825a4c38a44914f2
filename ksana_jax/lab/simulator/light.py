"""A server without steps, for fleets of a thousand: runs of equal steps pass at once, tokens are counted, none is made.

It serves like `SimEngine` and has its rules: prompts are computed first come first served with the tokens
that decodes leave of a step, rows decode at a speed set by their number, cached prefixes are not recomputed, rows
stop at max_num_seqs and at the end of the pool. It lacks tiers, windows and eviction, other orders of waiting requests
than arrival, and blocks of answers, which are counted in fractions.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from ksana_jax.core.config import ConfigError, EngineConfig, ModelConfig
from ksana_jax.core.patterns import per_layer
from ksana_jax.lab.simulator.chains import Chains
from ksana_jax.lab.simulator.clock import VirtualClock
from ksana_jax.lab.simulator.cost import Cost, Coverage
from ksana_jax.lab.simulator.light_cache import Held, LightCache
from ksana_jax.lab.simulator.one_engine import Served
from ksana_jax.lab.simulator.step_seconds import StepSeconds
from ksana_jax.scheduler.running import StepBudget
from ksana_jax.scheduler.step.types import most_tiles
from ksana_jax.scheduler.waiting import LOOKAHEAD

if TYPE_CHECKING:
    from ksana_jax.serve.workload.items import WorkItem


@dataclasses.dataclass(eq=False, slots=True)
class _Row:
    """A request in a server. chain: hashes of its prompt. left: tokens to compute before the next is sampled.
    done: tokens computed or found. num_output: tokens of its answer so far, at the last count of `joined_at`."""

    served: Served
    chain: Sequence[Hashable]
    came_s: float
    number: int
    left: int = 0
    done: int = 0
    num_output: int = 0
    joined_at: int = 0
    held: Held | None = None


class LightEngine:
    """A server of a fleet, by the same calls as `SimEngine`.

    Args:
      events, cost, platform, answered, ended: see `SimEngine`.
      chains: of the workload; its blocks may be larger than the engine's, which makes long prompts cheaper to look up.

    Raises:
      ConfigError: the engine has a feature that this model lacks.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        events: VirtualClock,
        cost: Cost,
        *,
        chains: Chains,
        platform: str = "cpu",
        ended: Callable[[Served], None] = lambda served: None,
        answered: Callable[[Served], None] = lambda served: None,
    ):
        _refuse(model, config)
        patterns = per_layer(model.pattern, model.num_layers)
        self.config = config = config.for_model(model, patterns)
        self.events, self.ended, self.answered = events, ended, answered
        self._seconds = StepSeconds(config, cost, platform)
        self._tiles = list(most_tiles(config.max_num_batched_tokens, config.query_tile))
        self._chains, self._block_size = chains, chains.block_size
        assert config.num_blocks is not None and config.max_model_len is not None
        self._max_model_len = config.max_model_len
        self.cache = LightCache(config.num_blocks * config.block_size // self._block_size, config.enable_prefix_caching)
        self._waiting: collections.deque[_Row] = collections.deque()
        self._chunked: list[_Row] = []  # rows with prompt tokens left
        # Rows that decode, by the number of steps at which their answers end.
        self._decoding: list[tuple[int, int, _Row]] = []
        self._num_steps = 0
        self._context = 0  # tokens that the rows that decode have computed, all together
        self._numbers = itertools.count()
        # The run of equal steps under way: its begin and end, number of steps, and chunk tokens in each.
        self._began_s, self._ends_s, self._steps, self._step_s = 0.0, math.nan, 0, 0.0
        self._chunks: list[tuple[_Row, int]] = []
        self.busy_s = 0.0
        self.num_preemptions = 0

    @property
    def coverage(self) -> Coverage:
        """Coverage of the steps by the cost model."""
        return self._seconds.coverage

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._waiting) + len(self._chunked) + len(self._decoding)

    def submit(self, item: WorkItem) -> Served:
        """Passes a request on; see `SimEngine.submit`."""
        now = self.events()
        served = Served(item, now)
        if problem := self._problem(item):
            served.finished_s, served.finish_reason, served.error = now, "refused", problem
            self.events.at(now, lambda: self.ended(served))
            return served
        chain = self._chains.of_prompt(item) if self.cache.caching else ()
        self._waiting.append(_Row(served, chain, now, next(self._numbers), left=item.num_prompt))
        if not self._steps:
            if len(self._waiting) == 1:  # later arrivals at the same time join it
                self._wake(now)
        elif not self._chunks and self._steps > 1 and self._num_rows < self.config.max_num_seqs:
            # It joins when the step under way has ended, or the one after it where that is scheduled already.
            passed = max(math.ceil((now - self._began_s) / self._step_s), 1) + self.config.async_scheduling
            if passed < self._steps:
                self._steps = passed
                self._wake(max(self._began_s + passed * self._step_s, now))
        return served

    @property
    def _num_rows(self) -> int:
        return len(self._chunked) + len(self._decoding)

    def _problem(self, item: WorkItem) -> str:
        if item.num_prompt >= self._max_model_len:
            return f"prompt has {item.num_prompt:,} tokens, max_model_len is {self._max_model_len:,}"
        longest = min(item.num_prompt + item.max_tokens, self._max_model_len)
        if -(-longest // self._block_size) > self.cache.num_blocks:
            return f"{longest:,} tokens need more than the pool's {self.cache.num_blocks:,} blocks"
        return ""

    def _wake(self, time: float) -> None:
        self._ends_s = time
        self.events.at(time, lambda: self._happen(time))

    def _happen(self, time: float) -> None:
        """Ends the run of steps under way and begins the next one, unless a request has shortened it since."""
        if time != self._ends_s:
            return
        if self._steps:
            self._end_run(time)
        if not self.num_open:
            self._steps, self._ends_s = 0, math.nan
            return
        self._begin_run(time)

    # ------------------------------------------------------------------ a run of steps

    def _begin_run(self, now: float) -> None:
        last_step_began = now - self._step_s if self._steps and self.config.async_scheduling else now
        rows = len(self._decoding)
        chunks = self._schedule(last_step_began)
        if not chunks and not rows:
            # The only request waits for the step under way to end, which had none of its own.
            chunks = self._schedule(now)
        assert chunks or rows, "there is work, and none of it can be scheduled"
        steps = self._decoding[0][0] - self._num_steps if rows else 2**31
        if not chunks and self._waiting and self._waiting[0].came_s > last_step_began:
            steps = 1  # after which it is scheduled
        if chunks:
            row, count = chunks[0]
            steps = min(steps, max((row.left - 1) // count, 1)) if len(chunks) == 1 and row.left > count else 1
        if rows:
            steps = max(min(steps, self._steps_until_full(rows)), 1)
        context = self._context + rows * (steps - 1) // 2
        counts = [(row.done + count * (steps - 1) // 2, count) for row, count in chunks]
        sampled = rows + sum(row.left == count for row, count in chunks)
        self._step_s = self._seconds(rows, context, counts, sampled)
        self._began_s, self._steps, self._chunks = now, steps, chunks
        self._wake(now + steps * self._step_s)

    def _steps_until_full(self, rows: int) -> int:
        """Returns the number of steps for which rows that decode find blocks; preempts the last ones before it is 0."""
        while (available := self.cache.available * self._block_size / rows) < 1 and rows > 1:
            self._preempt()
            rows -= 1
        return max(int(available), 1)

    def _schedule(self, came_until: float) -> list[tuple[_Row, int]]:
        """Returns the prompt tokens that the next step computes, of running rows and then of waiting ones."""
        if not self._chunked and not self._waiting:
            return []
        budget = StepBudget(self.config.max_num_batched_tokens - len(self._decoding), self._tiles)
        chunks: list[tuple[_Row, int]] = []
        for row in self._chunked:
            if count := budget.most(row.left):
                chunks.append((row, count))
                budget.take(count)
        at = 0
        while at < min(len(self._waiting), LOOKAHEAD) and self._num_rows < self.config.max_num_seqs:
            row = self._waiting[at]
            if row.came_s > came_until:
                break
            matched = self.cache.match(row.chain) if self.cache.caching else 0
            matched = min(matched, (row.left - 1) // self._block_size)  # the last token is computed in any case
            if self.cache.awaits(row.chain, matched):
                at += 1
                continue
            private = -(-row.left // self._block_size) - matched
            count = budget.most(row.left - matched * self._block_size)
            no_room = self._num_rows and private + self.cache.num_idle(row.chain[:matched]) > self.cache.available
            if not count or no_room:
                break
            del self._waiting[at]
            self._admit(row, matched, private)
            chunks.append((row, count))
            budget.take(count)
        return chunks

    def _admit(self, row: _Row, matched: int, private: int) -> None:
        row.held = self.cache.take(row.chain, matched, private)
        row.done = matched * self._block_size
        row.left -= row.done
        if math.isnan(row.served.scheduled_s):
            row.served.scheduled_s, row.served.num_cached_tokens = self.events(), row.done
        self._chunked.append(row)

    def _end_run(self, now: float) -> None:
        steps, rows = self._steps, len(self._decoding)
        self.busy_s += steps * self._step_s
        self._seconds.count(steps, self._step_s)
        self._num_steps += steps
        self._context += steps * rows
        self.cache.private += steps * rows / self._block_size  # each row's share is added to it when it leaves
        while self._decoding and self._decoding[0][0] <= self._num_steps:
            _, _, row = heapq.heappop(self._decoding)
            self._leave_decoding(row)
            self._finish(row, now)
        for row, count in self._chunks:
            row.left -= count * steps
            row.done += count * steps
            if not row.left:
                self._chunked.remove(row)
                self._first_token(row, now)

    def _first_token(self, row: _Row, now: float) -> None:
        """Lets a row whose prompt, or what a preemption left of it, is computed sample a token and decode."""
        assert row.held is not None
        served = row.served
        self.cache.computed(row.held, row.chain)
        row.num_output += 1
        if math.isnan(served.first_token_s):
            served.first_token_s = now
            self.answered(served)
        row.joined_at = self._num_steps
        if row.num_output >= served.item.num_output:
            self._finish(row, now)
            return
        self._context += row.done
        ends_at = self._num_steps + served.item.num_output - row.num_output
        heapq.heappush(self._decoding, (ends_at, row.number, row))

    def _leave_decoding(self, row: _Row) -> None:
        """Counts the tokens that a row has decoded since it joined."""
        assert row.held is not None
        steps = self._num_steps - row.joined_at
        row.held.private += steps / self._block_size
        row.done += steps
        row.num_output += steps
        self._context -= row.done

    def _finish(self, row: _Row, now: float) -> None:
        assert row.held is not None
        served, item = row.served, row.served.item
        if self.cache.caching and item.session is not None:
            # The next turn of a session begins with this prompt and this answer.
            self.cache.computed(row.held, self._chains.of(item))
        self.cache.give_back(row.held)
        served.finished_s, served.num_output = now, item.num_output
        served.finish_reason = "stop" if item.num_output < item.max_tokens else "length"
        self.ended(served)

    def _preempt(self) -> None:
        """Takes the blocks of the row that came last; it computes its tokens again when there is room."""
        at = max(range(len(self._decoding)), key=lambda i: self._decoding[i][1])
        _, _, row = self._decoding.pop(at)
        heapq.heapify(self._decoding)
        assert row.held is not None
        self._leave_decoding(row)
        self.cache.give_back(row.held)
        row.left, row.done = row.done + 1, 0
        row.served.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(row)


def _refuse(model: ModelConfig, config: EngineConfig) -> None:
    """Raises ConfigError if an engine has what the light model lacks."""
    patterns = per_layer(model.pattern, model.num_layers)
    lacking = {
        "num_blocks None": config.num_blocks is None,
        "host_cache_bytes, disk_cache_dir": bool(config.host_cache_bytes) or config.disk_cache_dir is not None,
        "kv_eviction": config.kv_eviction is not None,
        "kv_selection": config.kv_selection is not None,
        "enable_lora": config.enable_lora,
        "windows": any(pattern.window is not None for pattern in patterns),
        f"policy {config.policy!r}": config.policy != "fcfs",
        "num_scheduler_steps": config.num_scheduler_steps > 1,
    }
    if found := [name for name, lacks in lacking.items() if lacks]:
        raise ConfigError(f"the light model has no {', '.join(found)}: use the full one")
