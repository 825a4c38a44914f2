"""Watches one engine from outside: the times of each step by phase, its shape, its moves, its requests.

It wraps methods of the engine's parts where the engine calls them, and takes the wrappers off at the end. No decision
depends on it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ksana_jax.core.metrics import StepRecord
from ksana_jax.engine.completion import Request
from ksana_jax.engine.engine import Engine
from ksana_jax.kv.moves import Moves
from ksana_jax.lab.trace.functions import CompilationLog, reason_of
from ksana_jax.lab.trace.wrapping import Wrappers
from ksana_jax.scheduler.step.types import ScheduledBatch, StepInput, StepShape

# The host's phases of a step, in their order, and the wait for the device.
PHASES = ("schedule", "build", "submit", "compile", "wait", "finish")


@dataclasses.dataclass
class StepTrace:
    """One step. Times are seconds on the engine's clock, durations in seconds.

    schedule_s: the scheduler. build_s: from there to the submission: arrays. submit_s: handing the step to the device,
      without compile_s: what had to be compiled first. wait_s: for the result. finish_s: from there to the end of the
      step: tokens, texts, records.
    submitted_s, result_s, device_ended_s: when submit_s, wait_s and device_s ended.
    device_s: from the submission, or the previous step's result if that came later, to the result: the most that the
      device can have worked on the step. idle_s: from the previous step's result to the submission if that came later,
      while there was work: the least that the device had nothing to do.
    Steps of one call (`num_scheduler_steps`) share its submit_s, wait_s and device_s equally; all else of the call is
      the first one's.
    num_rows, num_tokens, num_sampled: that were asked for. shape: what the step was padded to.
    moved_bytes: of whole blocks, by direction. compiled: functions that it had to wait for.
    profiled: whether the profiler ran, which makes steps slower; profiler_s: to start it and to write what it saw.
    record: the engine's own record.
    """

    step: int
    began_s: float
    num_rows: int
    num_tokens: int
    num_decodes: int
    num_sampled: int
    schedule_s: float
    build_s: float = 0.0
    submit_s: float = 0.0
    compile_s: float = 0.0
    wait_s: float = 0.0
    finish_s: float = 0.0
    device_s: float = 0.0
    idle_s: float = 0.0
    submitted_s: float = 0.0
    result_s: float = 0.0
    device_ended_s: float = 0.0
    ended_s: float = 0.0
    shape: StepShape | None = None
    moved_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    compiled: list[str] = dataclasses.field(default_factory=list)
    profiled: bool = False
    profiler_s: float = 0.0
    record: StepRecord | None = None
    _scheduled_s: float = 0.0
    _output_s: float = 0.0

    def plain(self) -> dict[str, Any]:
        """Returns the step as plain values for JSON, with the fields of its record."""
        own = {k: v for k, v in vars(self).items() if not k.startswith("_") and k not in ("record", "shape")}
        shape = None if self.shape is None else self.shape._asdict() | {"parts": [list(p) for p in self.shape.parts]}
        record = {} if self.record is None else self.record._asdict()
        return record | own | {"padded_tokens": self.padded_tokens, "shape": shape}

    @property
    def padded_tokens(self) -> int:
        """Tokens that the device computes, padding included."""
        return self.num_tokens if self.shape is None else self.shape.num_tokens


class _Pending:
    """A submitted step whose result is timed; everything else is the executor's own."""

    def __init__(self, pending: Any, done: Callable[[Callable[[], Any]], Any]):
        self._pending, self._done = pending, done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)

    def result(self) -> Any:
        return self._done(self._pending.result)


class EngineWatch:
    """Records the steps and requests of an engine until `stop`.

    Args:
      number: of the engine within the trace. log: what is compiled meanwhile.
      before_step: called before a step is submitted; returns whether the profiler runs. after_step: called after it.

    Attributes:
      steps, requests: so far.
    """

    def __init__(
        self,
        engine: Engine,
        number: int,
        log: CompilationLog,
        before_step: Callable[[StepTrace], bool],
        after_step: Callable[[StepTrace], None],
    ):
        self.number, self._clock = number, engine.clock
        self.steps: list[StepTrace] = []
        self.requests: list[Request] = []
        self._log, self._before_step, self._after_step = log, before_step, after_step
        self._running: collections.deque[StepTrace] = collections.deque()
        self._last_result_s = 0.0
        # Weakly: a dropped engine must free its pool.
        self._engine = weakref.ref(engine)
        self._wrappers = Wrappers()
        self._wrappers.add(engine, "scheduler", "_schedule", self._schedule)
        self._wrappers.add(engine, "executor", "submit", self._submit)
        self._wrappers.add(engine, "executor", "submit_together", self._submit_together)
        self._wrappers.add(engine, "executor", "reset", self._reset)
        self._wrappers.add(engine, "factory", "new_requests", self._new_requests)
        engine.observers.append(self._observe)

    def stop(self) -> None:
        """Leaves the engine as it was."""
        if (engine := self._engine()) is not None:
            self._wrappers.remove(engine)
            engine.observers.remove(self._observe)

    def _new_requests(self, method: Callable[..., list[Request]], *args: Any, **given: Any) -> list[Request]:
        made = method(*args, **given)
        self.requests += made
        return made

    def _reset(self, method: Callable[[], None]) -> None:
        self._running.clear()
        method()

    def _schedule(self, method: Callable[..., ScheduledBatch | None], **given: bool) -> ScheduledBatch | None:
        began = self._clock()
        self._note_built(began)
        batch = method(**given)
        if batch is not None:
            now, sampled = self._clock(), len(batch.sampled)
            number = len(self.steps) + len(self._running) + 1
            step = StepTrace(number, began, len(batch.rows), batch.num_tokens, len(batch.decodes), sampled, now - began)
            step._scheduled_s = now
            self._running.append(step)
        return batch

    def _note_built(self, now: float) -> None:
        """Ends the building of the step that was scheduled last, unless it is submitted."""
        if self._running and (step := self._running[-1]).shape is None:
            step.build_s = step.build_s or now - step._scheduled_s

    def _submit(self, method: Callable[[StepInput], Any], given: StepInput) -> Any:
        [pending] = self._submitted([given], lambda: [method(given)])
        return pending

    def _submit_together(self, method: Callable[[Sequence[StepInput]], Any], given: Sequence[StepInput]) -> Any:
        return self._submitted(given, lambda: method(given))

    def _submitted(self, given: Sequence[StepInput], submit: Callable[[], Sequence[Any]]) -> list[_Pending]:
        """Times a call for some steps: the first ones that are not submitted."""
        steps, log, engine = [s for s in self._running if s.shape is None][: len(given)], self._log, self._engine()
        assert engine is not None
        built, step = self._clock(), steps[0]
        self._note_built(built)
        profiled = self._before_step(step)
        began, writing, known = self._clock(), log.writing_s, len(log.functions)
        step.profiler_s = began - built
        for each, asked in zip(steps, given, strict=True):
            each.shape, each.profiled = asked.shape, profiled
            each.moved_bytes = moved_bytes(asked.moves, engine.memory.layout.block_bytes)
        programs = list(getattr(engine.executor, "programs", ()))
        pending = submit()
        now, new = self._clock(), log.functions[known:]
        for function in new:
            function.step, function.engine, function.reason = step.step, self.number, reason_of(function.key, programs)
            programs.append(function.key)
        step.compiled, step.compile_s = [f.name for f in new], sum(f.traced_s + f.compiled_s for f in new)
        submit_s = max(now - began - step.compile_s - (log.writing_s - writing), 0.0)
        for left, each in enumerate(reversed(steps)):
            each.submit_s = submit_s / len(steps)
            each.submitted_s = now - left * each.submit_s
        first = _Pending(pending[0], lambda result: self._wait(steps, now - submit_s, result))
        others = zip(steps[1:], pending[1:], strict=True)
        return [first, *(_Pending(p, functools.partial(self._take, each)) for each, p in others)]

    def _wait(self, steps: Sequence[StepTrace], submitting: float, result: Callable[[], Any]) -> Any:
        """Times the result of a call for some steps, of which the first one's is asked for."""
        began = self._clock()
        output = result()
        now, step = self._clock(), steps[0]
        step._output_s = now
        for left, each in enumerate(reversed(steps)):
            each.wait_s = (now - began) / len(steps)
            each.result_s = now - left * each.wait_s
            each.device_s = (now - max(submitting, self._last_result_s)) / len(steps)
            each.device_ended_s = now - left * each.device_s
        last = self.steps[-1].record if self.steps else None
        if last is not None and last.num_running + last.num_waiting:
            step.idle_s = max(submitting - step.compile_s - step.profiler_s - self._last_result_s, 0.0)
        self._last_result_s = now
        return output

    def _take(self, step: StepTrace, result: Callable[[], Any]) -> Any:
        """Takes the result of a step whose call has ended with an earlier one."""
        output = result()
        step._output_s = self._clock()
        return output

    def _observe(self, engine: Engine) -> None:
        if not self._running:
            return
        step, now = self._running.popleft(), engine.clock()
        step.finish_s, step.ended_s, step.record = now - step._output_s, now, engine.records[-1]
        self.steps.append(step)
        self._after_step(step)
        step.profiler_s += self._clock() - now


def moved_bytes(moves: Moves | None, block_bytes: int) -> dict[str, int]:
    """Returns the bytes of moved blocks: saved to the host, copied on the device, loaded from the host."""
    if moves is None:
        return {}
    counts = {"saved": len(moves.saves), "copied": len(moves.copies), "loaded": len(moves.loads)}
    return {way: count * block_bytes for way, count in counts.items() if count}
