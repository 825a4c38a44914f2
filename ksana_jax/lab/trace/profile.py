"""Runs jax's profiler over some steps of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax

from ksana_jax.lab.trace.parts import CALL
from ksana_jax.lab.trace.steps import StepTrace


class Profiler:
    """Profiles steps once the first one has compiled nothing, until it has seen `num_steps` of them.

    Attributes:
      steps: number of those that ended under the profiler.
      calls: steps of each call, by the "call" of its mark in the profile; in the end of those that ended under it.
    """

    def __init__(self, folder: Path, num_steps: int):
        self.folder, self.steps = folder, 0
        self.calls: dict[int, list[StepTrace]] = {}
        self._num_steps, self._ready, self._running = num_steps, False, False
        self._annotation: jax.profiler.StepTraceAnnotation | None = None

    def before_call(self, steps: Sequence[StepTrace]) -> bool:
        """Starts the profiler if it is time; returns whether it runs. Then the device is idle, so that what it computes
        until the next call is of these steps."""
        if self._ready and not self._running and self.steps < self._num_steps:
            options = jax.profiler.ProfileOptions()
            # Every call of a Python function would be an event, and steps several times as long.
            options.python_tracer_level = 0
            jax.profiler.start_trace(str(self.folder), create_perfetto_trace=True, profiler_options=options)
            self._running = True
        if self._running:
            jax.block_until_ready(jax.live_arrays())
            self._annotation = jax.profiler.StepTraceAnnotation(CALL, step_num=steps[0].step, call=len(self.calls))
            self._annotation.__enter__()
            self.calls[len(self.calls)] = list(steps)
        return self._running

    def after_step(self, step: StepTrace) -> None:
        """Stops the profiler after its last step."""
        self._ready = self._ready or not step.functions
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self._running:
            self.steps += 1
            if self.steps >= self._num_steps:
                self.stop()

    def stop(self) -> None:
        """Stops the profiler if it runs."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
            self.calls = {n: steps for n, steps in self.calls.items() if all(hasattr(s, "record") for s in steps)}
