"""One step of a recording: its times by phase, its size, and its decisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ksana_jax.core.metrics import StepRecord
from ksana_jax.lab.recording import plain_record

# The host's phases of a step, in their order, and the wait for the device.
PHASES = ("schedule", "build", "submit", "compile", "wait", "finish")


@dataclasses.dataclass
class StepTrace:
    """One step. Times are seconds on the engine's clock, durations in seconds.

    num_rows, num_samples: rows and samples requested.
    slices: {phase: (begin, duration)}. schedule: the scheduler. build: from there to the submission: arrays. submit:
      handing the step to the device, without compile: what had to be compiled first. wait: for the result. finish: from
      there to the end of the step: tokens, texts, records. device: from the submission, or the previous step's result
      if that came later, to the result: the maximum time that the device worked on the step.
    idle_s: from the previous step's result to the submission if that came later, while there was work: the minimum that
      the device was idle.
    Steps of one call (`num_scheduler_steps`) share its submit, wait and device equally; all else of the call is the
      first one's.
    moved_bytes: of whole blocks, by direction. functions: that it had to wait for, until they were compiled.
    profiled: whether the profiler ran, which makes steps slower; profiler_s: to start it and to write its output.
    parts: seconds of each part of the network on the device; None of steps without a profile.
    rows, blocks, tokens: see `recording`; None where decisions are not recorded.
    record: the engine's own record, from the end of the step on.
    """

    step: int
    num_rows: int
    num_samples: int
    slices: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    idle_s: float = 0.0
    moved_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    functions: list[str] = dataclasses.field(default_factory=list)
    profiled: bool = False
    profiler_s: float = 0.0
    parts: dict[str, float] | None = None
    rows: list[Any] | None = None
    blocks: dict[str, Any] | None = None
    tokens: dict[str, Any] | None = None
    record: StepRecord = dataclasses.field(init=False)

    def seconds(self, phase: str) -> float:
        """Returns how long a phase took; 0 for one that the step did not have."""
        return self.slices.get(phase, (0.0, 0.0))[1]

    @property
    def began_s(self) -> float:
        return self.slices["schedule"][0]

    @property
    def ended_s(self) -> float:
        return sum(self.slices["finish"])

    def end(self, record: StepRecord, block_bytes: int) -> None:
        """Adds the engine's record of the step."""
        self.record = record
        counts = {"saved": record.num_saved, "copied": record.num_copied, "loaded": record.num_loaded}
        self.moved_bytes = {way: count * block_bytes for way, count in counts.items() if count}

    def plain(self) -> dict[str, Any]:
        """Returns the step as an event of a recording, with the fields of its record."""
        own = {name: value for name, value in vars(self).items() if value is not None and name != "record"}
        return {**plain_record(self.record), **own, "padded_tokens": self.record.shape.num_tokens}


def share(steps: Sequence[StepTrace], phase: str, began_s: float, seconds: float) -> None:
    """Divides a phase of a call among its steps."""
    each_s = seconds / len(steps)
    for i, step in enumerate(steps):
        step.slices[phase] = began_s + i * each_s, each_s
