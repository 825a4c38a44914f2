"""Numbers behind the web page's charts of the engines: GET /live. Reading them takes less than a millisecond."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ksana_jax.core.request import FinishReason
from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.engine.engine import Engine
from ksana_jax.engine.engine_thread import StepNews
from ksana_jax.serve.server.errors import json_response
from ksana_jax.serve.server.state import serving_of

# Latencies cover requests of this many last seconds, and at most this many requests.
RECENT_S = 60.0
MOST_RECENT = 4096
# Running requests that are shown one by one, those with the most blocks.
MOST_OWNERS = 12


class Live:
    """Counts of an AsyncLLM from this object's creation on, and its recent latencies. For the event loop's thread."""

    def __init__(self, llm: AsyncLLM):
        self.llm, self._clock = llm, llm.engine.clock
        self.num_finished = self.num_failed = self.num_output_tokens = self.num_prompt_tokens = 0
        self._ttft_s: collections.deque[tuple[float, float]] = collections.deque(maxlen=MOST_RECENT)
        self._tpot_s: collections.deque[tuple[float, float]] = collections.deque(maxlen=MOST_RECENT)
        llm.observers.append(self.observe)

    def observe(self, news: StepNews) -> None:
        """Adds the news of a step."""
        now = self._clock()
        for request in news.first_tokens:
            if (ttft_s := request.metrics.ttft_s) is not None:
                self._ttft_s.append((now, ttft_s))
        for record in news.records:
            self.num_output_tokens += record.num_new_tokens
            self.num_prompt_tokens += record.num_chunk_tokens
        for output in news.outputs:
            if output.finished:
                self.num_finished += 1
                self.num_failed += any(c.finish_reason is FinishReason.ERROR for c in output.outputs)
                if (tpot_s := output.metrics.tpot_s) is not None:
                    self._tpot_s.append((now, tpot_s))

    def content(self) -> dict[str, Any]:
        """Returns plain values, read while the engines run, so that numbers may be of two steps.

        Counts start at this object's creation; prefix-cache and preemption counts at the engine's.
        """
        stats, engines, now = self.llm.stats(), self.llm.replicas.engines, self._clock()
        counters = [engine.memory.counters for engine in engines]
        return {
            "time_s": now,
            "requests": {
                "running": stats.num_running,
                "waiting": stats.num_waiting,
                "open": stats.num_requests,
                "finished": self.num_finished,
                "failed": self.num_failed,
            },
            "pool": _pool(engines),
            "prefix_cache": {
                "enabled": any(engine.memory.prefixes.enabled for engine in engines),
                "queried_tokens": sum(c.queried_tokens for c in counters),
                "hit_tokens": sum(c.hit_tokens for c in counters),
            },
            "tokens": {"prompt": self.num_prompt_tokens, "output": self.num_output_tokens},
            "ttft_s": _recent(self._ttft_s, now),
            "tpot_s": _recent(self._tpot_s, now),
            "preemptions": sum(engine.scheduler.num_preemptions for engine in engines),
        }


def _pool(engines: Iterable[Engine]) -> dict[str, Any]:
    """Returns the blocks of the device's pools by owner, and the running sequences with the most blocks.

    A block that several sequences share counts once among `running`, and for each of them in `owners`.
    """
    found = {"blocks": 0, "running": 0, "cached": 0, "free": 0}
    held: list[tuple[int, int]] = []
    for engine in engines:
        pool, rows = engine.scheduler.blocks, engine.scheduler.rows
        found["blocks"] += pool.num_blocks
        found["running"] += pool.num_used
        found["cached"] += pool.num_idle
        found["free"] += pool.num_free
        blocks = rows.num_blocks.sum(axis=0)
        largest = np.argsort(-blocks, kind="stable")[:MOST_OWNERS]
        held += zip(blocks[largest].tolist(), rows.num_computed[largest].tolist(), strict=True)
    held = sorted((one for one in held if one[0]), reverse=True)[:MOST_OWNERS]
    return {**found, "owners": [{"blocks": blocks, "tokens": tokens} for blocks, tokens in held]}


def _recent(values: collections.deque[tuple[float, float]], now: float) -> dict[str, float] | None:
    """Returns percentiles of the values of the last RECENT_S seconds, and forgets older ones; None of no values."""
    while values and values[0][0] < now - RECENT_S:
        values.popleft()
    if not values:
        return None
    p50, p90 = np.percentile([value for _, value in values], (50, 90)).tolist()
    return {"p50": p50, "p90": p90, "count": len(values)}


async def live(request: Request) -> Response:
    """Answers with the state of the server, and with `Live.content` once its model is loaded."""
    serving, state = serving_of(request), request.app.state
    content: dict[str, Any] = {"status": serving.status}
    if serving.status != "loading":
        # Counting begins with the first question: without it, no step has this work.
        if getattr(state, "live", None) is None:
            state.live = Live(serving.any_llm)
        content |= state.live.content()
    response = json_response(content)
    response.headers["cache-control"] = "no-store"
    return response
