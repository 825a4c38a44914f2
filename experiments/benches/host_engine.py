"""An engine whose host half alone runs, with stopwatches, for the benchmark of the host loop. No model, no jax.

The executor returns random tokens, and its time is not counted. All rows decode, with contexts staggered over a block's
length, so that every step has the average number of rows that need a new block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.core.patterns import FULL, AttentionPattern
from ksana_jax.core.request import SamplingParams
from ksana_jax.engine.build import build_engine
from ksana_jax.engine.engine import Engine
from ksana_jax.kv.moves import Moves
from ksana_jax.scheduler.scheduler import Scheduler
from ksana_jax.scheduler.step.builder import BatchBuilder
from ksana_jax.scheduler.step.types import StepInput, StepOutput

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
PREFILL_TOKENS = 16_384
WARM_UP = 20
PARTS = ("schedule", "build", "advance", "settle")
# Number of requests whose adding and admitting are timed.
NUM_ADDED = 64


class RandomTokens:
    """An executor that takes almost no time, because its tokens are drawn beforehand."""

    def __init__(self, size: int):
        self.tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, size, np.int32)
        self.patterns: Sequence[AttentionPattern] = [FULL]
        self.host_blocks = self.host_states = None

    def submit(self, step: StepInput) -> StepOutput:
        return StepOutput(self.tokens[: step.num_sampled])

    def submit_together(self, steps: Sequence[StepInput]) -> list[StepOutput]:
        return [self.submit(step) for step in steps]

    def move(self, moves: Moves) -> None:
        pass

    def set_patterns(self, patterns: Sequence[AttentionPattern]) -> None:
        self.patterns = patterns

    def reset(self) -> None:
        pass


class Stopwatch:
    """Accumulates CPU and wall time of calls, in seconds since it was last read."""

    def __init__(self, call: Callable):
        self.call, self.cpu_s, self.wall_s = call, 0.0, 0.0

    def __call__(self, *args: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        result = self.call(*args)
        self.cpu_s += time.thread_time() - cpu
        self.wall_s += time.perf_counter() - wall
        return result

    def read(self) -> tuple[float, float]:
        """Returns CPU and wall seconds, and resets them to zero."""
        seconds = self.cpu_s, self.wall_s
        self.cpu_s = self.wall_s = 0.0
        return seconds


# A scheduler's timed methods: for a step after the one before it has ended, and while that runs.
_SCHEDULES = ("schedule", "schedule_ahead")


class _TimedBuilder:
    def __init__(self, builder: BatchBuilder):
        self.build = Stopwatch(builder.build)


def idle_engine(rows: int, max_model_len: int, prefix_cache: bool, kv_eviction: dict[str, Any] | None = None) -> Engine:
    """Returns an engine without a model, and room for `rows` sequences."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=rows * -(-max_model_len // BLOCK_SIZE),
        max_num_seqs=rows,
        max_num_batched_tokens=max(PREFILL_TOKENS, rows),
        max_model_len=max_model_len,
        enable_prefix_caching=prefix_cache,
        kv_eviction=kv_eviction,
    )
    model = ModelConfig(vocab_size=VOCAB_SIZE, eos_ids=(0,))
    return build_engine(model, None, config, executor=RandomTokens(rows))


def decoding_engine(
    rows: int, context: int, steps: int, prefix_cache: bool = False, kv_eviction: dict[str, Any] | None = None
) -> Engine:
    """Returns an engine with `rows` sequences of about `context` prefilled tokens that can decode `steps` steps.

    Row i begins with context - (i mod BLOCK_SIZE) tokens.
    """
    engine = idle_engine(rows, context + steps + 1, prefix_cache, kv_eviction)
    rng = np.random.default_rng(1)
    params = SamplingParams(temperature=0, max_tokens=2 * steps + context, ignore_eos=True, detokenize=False)
    for row in range(rows):
        prompt = rng.integers(0, VOCAB_SIZE, max(context - row % BLOCK_SIZE, 1), np.int32)
        engine.add_request(prompt, params)
    while engine.scheduler.waiting or not _all_decode(engine.scheduler):
        engine.step()
    return engine


def admission(context: int, prefix_cache: bool) -> dict[str, float]:
    """Returns CPU microseconds per new request of `context` tokens: add_us to check and queue it, admit_us to give it a
    row and blocks in a step; with a prefix cache, that hashes its blocks."""
    engine = idle_engine(NUM_ADDED, context + 2, prefix_cache)
    rng = np.random.default_rng(1)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    adding, admitting = [], []
    schedules = [_watched(engine.scheduler, name) for name in _SCHEDULES]
    for _ in range(NUM_ADDED):
        prompt = rng.integers(0, VOCAB_SIZE, context, np.int32)
        began = time.thread_time()
        engine.add_request(prompt, params)
        adding.append(time.thread_time() - began)
    while waiting := len(engine.scheduler.waiting):
        engine.step()
        admitting.append(sum(watch.read()[0] for watch in schedules) / max(waiting - len(engine.scheduler.waiting), 1))
    return {"add_us": float(np.median(adding)) * 1e6, "admit_us": float(np.median(admitting)) * 1e6}


def _watched(scheduler: Scheduler, name: str) -> Stopwatch:
    """Puts a stopwatch around a method of a scheduler; returns it."""
    watch = Stopwatch(getattr(scheduler, name))
    setattr(scheduler, name, watch)
    return watch


def _all_decode(scheduler: Scheduler) -> bool:
    rows = scheduler.rows
    return bool((rows.num_tokens[scheduler.order] - rows.num_computed[scheduler.order] == 1).all())


class TimedEngine:
    """An engine whose rows decode, with stopwatches."""

    def __init__(self, engine: Engine):
        self.rows, self.engine = len(engine.scheduler.order), engine
        self.executing = Stopwatch(self.engine.executor.submit)
        self.engine.executor.submit = self.executing  # type: ignore[method-assign]  a stopwatch around the same
        self.whole = Stopwatch(self.engine.step)
        self.total_s: list[np.ndarray] = []
        self.part_s: list[list[float]] = []

    def step(self) -> None:
        """Times a step."""
        self.whole()
        assert len(self.engine.scheduler.order) == self.rows and self.engine.records[-1].num_decodes == self.rows
        self.total_s.append(np.subtract(self.whole.read(), self.executing.read()))

    def watch_parts(self) -> None:
        """Makes `step_parts` time each part, which itself costs a microsecond or two."""
        timed, scheduler = _TimedBuilder(self.engine.builder), self.engine.scheduler
        self.engine.builder = timed  # type: ignore[assignment]  it has what a step calls, timed
        self.watches = {"build": [timed.build], "schedule": [_watched(scheduler, name) for name in _SCHEDULES]}
        self.watches |= {name: [_watched(scheduler, name)] for name in ("advance", "settle")}

    def step_parts(self) -> None:
        """Times the parts of a step."""
        self.engine.step()
        self.part_s.append([sum(watch.read()[0] for watch in self.watches[part]) for part in PARTS])

    def medians(self) -> dict[str, float]:
        cpu_us, wall_us = np.median(self.total_s[WARM_UP:], axis=0) * 1e6
        parts_us = np.median(self.part_s[WARM_UP:], axis=0) * 1e6
        parts = {f"{name}_us": float(us) for name, us in zip(PARTS, parts_us, strict=True)}
        return {"step_us": float(cpu_us), "wall_us": float(wall_us), **parts}
