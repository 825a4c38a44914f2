"""Records one engine from outside: the times of its steps, its requests, and its decisions.

It wraps methods of the engine's parts where the engine calls them, and removes the wrappers at the end. No decision
depends on it.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.core.request import FinishReason
from ksana_jax.engine.completion import Request
from ksana_jax.engine.engine import Engine
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.lab import recording
from ksana_jax.lab.trace.functions import CompilationLog, reason_of
from ksana_jax.lab.trace.header import header, plain_patterns, source_of
from ksana_jax.lab.trace.profile import Profiler
from ksana_jax.lab.trace.requests import plain_input, plain_request
from ksana_jax.lab.trace.steps import StepTrace, share
from ksana_jax.lab.trace.wrapping import Wrappers
from ksana_jax.models.flops import StepFlops
from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.step.types import ScheduledBatch, StepInput


@dataclasses.dataclass
class _Running:
    """A step that was scheduled and has not ended. names: of its sequences, by row."""

    step: StepTrace
    batch: ScheduledBatch
    names: dict[int, str]
    scheduled_s: float
    submitted: bool = False


class _Pending:
    """A submitted step whose result is timed; everything else is the executor's own."""

    def __init__(self, pending: Any, done: Callable[[Callable[[], Any]], Any]):
        self._pending, self._done = pending, done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)

    def result(self) -> Any:
        return self._done(self._pending.result)


class Recorder:
    """Records an engine until `stop`.

    Args:
      decisions: whether to record a replay's inputs: prompts, scheduled tokens, blocks and sampled tokens.
      number: of the engine within a trace. log: of compilations. profiler: notified of each step.

    Attributes:
      flops: of the model's steps. header: see `header`.
      events: as `recording` describes them, steps as `StepTrace`. steps, requests: so far.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        decisions: bool = True,
        number: int = 1,
        log: CompilationLog | None = None,
        profiler: Profiler | None = None,
    ):
        self.header = header(engine, decisions)
        self.flops = StepFlops.of(engine.model)
        self.events: list[recording.Event | StepTrace] = []
        self.steps: list[StepTrace] = []
        self.requests: list[Request] = []
        self._log = CompilationLog(Path()) if log is None else log
        self._profiler = Profiler(Path(), 0) if profiler is None else profiler
        self.number, self._decisions, self._clock = number, decisions, engine.clock
        self._open: dict[str, Request] = {}
        self._blocks: dict[str, list[int]] = {}
        self._running: collections.deque[_Running] = collections.deque()
        self._settled: _Running | None = None
        self._last_result_s = 0.0
        # Weakly: a dropped engine must free its pool.
        self._engine = weakref.ref(engine)
        self._wrappers = Wrappers()
        self._wrappers.add(engine, "scheduler", "_schedule", self._schedule)
        self._wrappers.add(engine, "scheduler", "settle", self._settle)
        self._wrappers.add(engine, "executor", "submit", self._submit)
        self._wrappers.add(engine, "executor", "submit_together", self._submit_together)
        self._wrappers.add(engine, "executor", "reset", self._reset)
        self._wrappers.add(engine, "factory", "new_requests", self._new_requests)
        self._wrappers.add(engine, "", "add", self._add)
        self._wrappers.add(engine, "", "set_patterns", self._set_patterns)
        self._wrappers.add(engine, "", "set_eviction", self._set_eviction)
        engine.observers.append(self._observe)

    def stop(self) -> None:
        """Removes the wrappers."""
        if (engine := self._engine()) is not None:
            self._wrappers.remove(engine)
            engine.observers.remove(self._observe)

    def plain(self) -> list[recording.Event]:
        """Returns the events as plain values; requests come last."""
        events = [event.plain() if isinstance(event, StepTrace) else event for event in self.events]
        return events + list(map(plain_request, self.requests))

    def write(self, path: Path) -> None:
        """Writes the recording."""
        recording.write(path, self.header, self.plain())

    def _note(self, event: str, **fields: Any) -> None:
        if self._decisions:
            self.events.append({"event": event, **fields})

    def _new_requests(self, method: Callable[..., list[Request]], *args: Any, **given: Any) -> list[Request]:
        made = method(*args, **given)
        if (engine := self._engine()) is not None:
            self.header |= source_of(engine)  # an LLM sets it after its engine was built
        self.requests += made
        self._note("created", requests=list(map(plain_input, made, args[0] if args else given["asked"])))
        return made

    def _add(self, method: Callable[..., None], requests: Collection[Request]) -> None:
        method(requests)
        if self._decisions:
            self._open |= {request.request_id: request for request in requests}
        self._note("added", request_ids=[request.request_id for request in requests])

    def _set_patterns(self, method: Callable[..., None], patterns: Sequence[AttentionPattern]) -> None:
        method(patterns)
        self._note("patterns", patterns=plain_patterns(patterns))

    def _set_eviction(self, method: Callable[..., None], eviction: EvictionMethod) -> None:
        method(eviction)
        self._note("eviction", method=eviction.setting)

    def _note_ended(self) -> None:
        """Drops requests that have ended; aborts between two steps are events."""
        for request_id, request in list(self._open.items()):
            if request.finished:
                del self._open[request_id]
                if any(c.seq.finish_reason is FinishReason.ABORT for c in request.completions):
                    self._note("aborted", request_id=request_id)

    def _schedule(self, method: Callable[..., ScheduledBatch | None], **given: bool) -> ScheduledBatch | None:
        self._note_ended()
        began = self._clock()
        self._note_built(began)
        batch, engine = method(**given), self._engine()
        if batch is None or engine is None:
            return batch
        now = self._clock()
        number = len(self.steps) + len(self._running) + 1
        step = StepTrace(number, len(batch.rows), len(batch.sampled), {"schedule": (began, now - began)})
        running = _Running(step, batch, {}, now)
        if self._decisions:
            self._note_decisions(running, engine.scheduler.rows)
            running.scheduled_s = self._clock()
        self._running.append(running)
        return batch

    def _note_decisions(self, running: _Running, rows: Rows) -> None:
        batch, step = running.batch, running.step
        running.names = names = {
            row: f"{seq.request_id}/{seq.index}" for row in batch.rows.tolist() if (seq := rows.seqs[row])
        }
        counts = zip(batch.rows.tolist(), batch.num_per_row.tolist(), strict=True)
        step.rows = [[names[row], int(rows.num_computed[row]), int(count)] for row, count in counts]
        changes = {name: self._new_blocks(name, rows.block_ids(row)) for row, name in names.items()}
        step.blocks = {name: change for name, change in changes.items() if change}

    def _new_blocks(self, name: str, ids: Any) -> list[Any] | None:
        """Returns how many blocks of its table a sequence kept, and those after them; None if nothing changed."""
        now, before = ids.tolist(), self._blocks.get(name, [])
        self._blocks[name] = now
        kept = 0
        while kept < min(len(now), len(before)) and now[kept] == before[kept]:
            kept += 1
        return None if kept == len(now) == len(before) else [kept, now[kept:]]

    def _note_built(self, now: float) -> None:
        """Ends the building of the step that was scheduled last, unless it is submitted."""
        if self._running and not (last := self._running[-1]).submitted:
            last.step.slices.setdefault("build", (last.scheduled_s, now - last.scheduled_s))

    def _submit(self, method: Callable[[StepInput], Any], given: StepInput) -> Any:
        [pending] = self._submitted(1, lambda: [method(given)])
        return pending

    def _submit_together(self, method: Callable[[Sequence[StepInput]], Any], given: Sequence[StepInput]) -> Any:
        return self._submitted(len(given), lambda: method(given))

    def _submitted(self, count: int, submit: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Times a call for some steps: the first ones that are not submitted."""
        several = [running for running in self._running if not running.submitted][:count]
        if not several:  # an executor's submit calls submit_together
            return submit()
        steps, log, engine = [running.step for running in several], self._log, self._engine()
        assert engine is not None
        built, step = self._clock(), steps[0]
        self._note_built(built)
        profiled = self._profiler.before_call(steps)
        began, writing, known = self._clock(), log.writing_s, len(log.functions)
        step.profiler_s = began - built
        for running in several:
            running.submitted, running.step.profiled = True, profiled
        programs = list(getattr(engine.executor, "programs", ()))
        pending = submit()
        now, new = self._clock(), log.functions[known:]
        for function in new:
            function.step, function.engine, function.reason = step.step, self.number, reason_of(function.key, programs)
            programs.append(function.key)
        step.functions, compile_s = [f.name for f in new], sum(f.traced_s + f.compiled_s for f in new)
        if new:
            step.slices["compile"] = began, compile_s
        submit_s = max(now - began - compile_s - (log.writing_s - writing), 0.0)
        share(steps, "submit", now - submit_s, submit_s)
        return [_Pending(pending[0], lambda result: self._wait(steps, now - submit_s, result)), *pending[1:]]

    def _wait(self, steps: Sequence[StepTrace], submitting: float, result: Callable[[], Any]) -> Any:
        """Times the result of a call for some steps; the first one's result is requested."""
        began = self._clock()
        output, now = result(), self._clock()
        on_device = max(submitting, self._last_result_s)
        share(steps, "wait", began, now - began)
        share(steps, "device", on_device, now - on_device)
        last = self.steps[-1].record if self.steps else None
        if last is not None and last.num_running + last.num_waiting:
            aside_s = steps[0].seconds("compile") + steps[0].profiler_s
            steps[0].idle_s = max(submitting - aside_s - self._last_result_s, 0.0)
        self._last_result_s = now
        return output

    def _settle(
        self, method: Callable[..., list[Any]], batch: ScheduledBatch, tokens: Any, num_accepted: Any = None
    ) -> list[Any]:
        self._note_ended()  # by an abort between two steps of one call
        if self._running and self._running[0].batch is batch:  # otherwise it was scheduled before the recorder started
            running = self._settled = self._running.popleft()
            if self._decisions:
                runs = tokens.tolist()
                if num_accepted is not None:
                    runs = [run[: count + 1] for run, count in zip(runs, num_accepted.tolist(), strict=True)]
                names = [running.names[row] for row in batch.sampled.tolist()]
                running.step.tokens = dict(zip(names, runs, strict=True))
        return method(batch, tokens, num_accepted)

    def _reset(self, method: Callable[[], None]) -> None:
        self._running.clear()
        self._settled = None
        method()

    def _observe(self, engine: Engine) -> None:
        if (running := self._settled) is None:
            return
        self._settled, step, record, now = None, running.step, engine.records[-1], engine.clock()
        step.slices["finish"] = record.ended_s, now - record.ended_s
        step.end(record, self.header["block_bytes"])
        self.events.append(step)
        self.steps.append(step)
        self._profiler.after_step(step)
        step.profiler_s += self._clock() - now
