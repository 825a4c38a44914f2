"""Measures CPU time of the host loop per decode step: scheduling, step arrays and state updates; no model, no jax.

The executor returns random tokens, and its time is not counted. All rows decode, with contexts staggered over a block's
length, so that every step has the average number of rows that need a new block.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ksana_jax import checks
from ksana_jax.config import EngineConfig, ModelConfig
from ksana_jax.engine.build import build_engine
from ksana_jax.engine.engine import Engine
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.moves import Moves
from ksana_jax.patterns import FULL, AttentionPattern
from ksana_jax.request import SamplingParams
from ksana_jax.scheduler.scheduler import Scheduler
from ksana_jax.step.builder import BatchBuilder
from ksana_jax.step.contract import StepInput, StepOutput

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
PREFILL_TOKENS = 16_384
WARM_UP = 20
PARTS = ("schedule", "build", "advance", "settle")


class RandomTokens:
    """An executor that takes almost no time, because its tokens are drawn beforehand."""

    def __init__(self, size: int):
        self.tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, size, np.int32)
        self.patterns: Sequence[AttentionPattern] = [FULL]
        self.host_blocks = None

    def submit(self, step: StepInput) -> StepOutput:
        return StepOutput(self.tokens[: step.num_sampled])

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


class _TimedBuilder:
    def __init__(self, builder: BatchBuilder):
        self.build = Stopwatch(builder.build)


def decoding_engine(rows: int, context: int, steps: int, kv_eviction: dict[str, Any] | None = None) -> Engine:
    """Returns an engine with `rows` sequences of about `context` prefilled tokens that can decode `steps` steps.

    Row i begins with context - (i mod BLOCK_SIZE) tokens.
    """
    block_size = BLOCK_SIZE
    max_model_len = context + steps + 1
    config = EngineConfig(
        block_size=block_size,
        num_blocks=rows * -(-max_model_len // block_size),
        max_num_seqs=rows,
        max_num_batched_tokens=max(PREFILL_TOKENS, rows),
        max_model_len=max_model_len,
        kv_eviction=kv_eviction,
    )
    executor = RandomTokens(rows)
    engine = build_engine(ModelConfig(vocab_size=VOCAB_SIZE, eos_ids=(0,)), None, config, executor=executor)
    scheduler = engine.scheduler
    rng = np.random.default_rng(1)
    params = SamplingParams(temperature=0, max_tokens=2 * steps + context, ignore_eos=True, detokenize=False)
    for row in range(rows):
        prompt = rng.integers(0, VOCAB_SIZE, max(context - row % block_size, 1), np.int32)
        engine.add_request(prompt, params)
    while scheduler.waiting or not _all_decode(scheduler):
        engine.step()
    return engine


def _all_decode(scheduler: Scheduler) -> bool:
    rows = scheduler.rows
    return bool((rows.num_tokens[scheduler.order] - rows.num_computed[scheduler.order] == 1).all())


class _TimedEngine:
    """An engine whose rows decode, with stopwatches."""

    def __init__(self, rows: int, context: int, steps: int, kv_eviction: dict[str, Any] | None):
        self.rows, self.engine = rows, decoding_engine(rows, context, steps, kv_eviction)
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
        self.watches = {"build": timed.build}
        for name in ("schedule", "advance", "settle"):
            self.watches[name] = Stopwatch(getattr(scheduler, name))
            setattr(scheduler, name, self.watches[name])

    def step_parts(self) -> None:
        """Times the parts of a step."""
        self.engine.step()
        self.part_s.append([self.watches[part].read()[0] for part in PARTS])

    def medians(self) -> dict[str, float]:
        cpu_us, wall_us = np.median(self.total_s[WARM_UP:], axis=0) * 1e6
        parts_us = np.median(self.part_s[WARM_UP:], axis=0) * 1e6
        return {
            "rows": self.rows,
            "step_us": round(float(cpu_us), 1),
            "wall_us": round(float(wall_us), 1),
            **{f"{name}_us": round(float(us), 1) for name, us in zip(PARTS, parts_us, strict=True)},
        }


def measure(
    rows: int, steps: int, context: int, evictions: Sequence[dict[str, Any] | None] = (None,)
) -> list[dict[str, float]]:
    """Returns medians over steps in microseconds: CPU time `step_us` and wall time `wall_us` of Engine.step without its
    executor, and CPU time of its parts.

    Args:
      evictions: `kv_eviction` of several engines, whose steps take turns, so that a changing load affects all alike.
    """
    # Rows that were prefilled first have already decoded some steps when the last one joins.
    most = rows * context // PREFILL_TOKENS + 2 + 2 * (WARM_UP + steps)
    engines = [_TimedEngine(rows, context, most, kv_eviction) for kv_eviction in evictions]
    for _ in range(WARM_UP + steps):
        for engine in engines:
            engine.step()
    for engine in engines:
        engine.watch_parts()
    for _ in range(WARM_UP + steps):
        for engine in engines:
            engine.step_parts()
    return [engine.medians() for engine in engines]


def main(
    rows: list[int],
    steps: int = 200,
    context: int = 1024,
    as_json: bool = False,
    kv_eviction: dict[str, Any] | None = None,
) -> None:
    """Measures decode steps and prints a table.

    Args:
      rows: numbers of running sequences to measure.
      steps: number of steps, of which the median is reported.
      context: tokens of each sequence when it starts to decode.
      as_json: whether the last line is {"results": [{"rows": 256, "step_us": ..., ...}, ...]}.
      kv_eviction: as `EngineConfig.kv_eviction`: each number of rows is measured without and with it, by turns.
    """
    if not rows:
        raise ValueError("rows is empty: give at least one number")
    counts = [*(("rows", count) for count in rows), ("steps", steps), ("context", context)]
    checks.require(*(checks.integer(name, value) for name, value in counts))
    read_eviction(kv_eviction)
    print(f"host loop, decode steps, median of {steps}: contexts of {context:,} tokens, block size {BLOCK_SIZE}")
    print(f"{'rows':>6} {'step µs':>9} {'wall µs':>9}   of which " + " ".join(f"{part:>9}" for part in PARTS))
    results = []
    evictions = (None, kv_eviction) if kv_eviction else (None,)
    for count in rows:
        for setting, r in zip(evictions, measure(count, steps, context, evictions), strict=True):
            results.append(r | ({"kv_eviction": setting} if kv_eviction else {}))
            parts = " ".join(f"{r[f'{part}_us']:9,.1f}" for part in PARTS)
            ratio = f"   evicting: {r['step_us'] / results[-2]['step_us']:.2f} times" if setting else ""
            print(f"{count:6,} {r['step_us']:9,.1f} {r['wall_us']:9,.1f}            {parts}{ratio}")
    if as_json:
        print(json.dumps({"results": results}))
