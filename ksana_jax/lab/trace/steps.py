"""One step of a recording: its times by phase, what it was asked for, and what was decided."""

from __future__ import annotations

import dataclasses
from typing import Any

from ksana_jax.core.metrics import StepRecord

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
    num_rows, num_sampled: that were asked for. moved_bytes: of whole blocks, by direction.
    compiled: functions that it had to wait for.
    profiled: whether the profiler ran, which makes steps slower; profiler_s: to start it and to write what it saw.
    rows, blocks, tokens: see `recording`; None where decisions are not recorded.
    record: the engine's own record, from the end of the step on.
    """

    step: int
    began_s: float
    num_rows: int
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
    moved_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    compiled: list[str] = dataclasses.field(default_factory=list)
    profiled: bool = False
    profiler_s: float = 0.0
    rows: list[Any] | None = None
    blocks: dict[str, Any] | None = None
    tokens: dict[str, Any] | None = None
    record: StepRecord = dataclasses.field(init=False)

    def end(self, record: StepRecord, block_bytes: int) -> None:
        """Adds the engine's record of the step."""
        self.record = record
        counts = {"saved": record.num_saved, "copied": record.num_copied, "loaded": record.num_loaded}
        self.moved_bytes = {way: count * block_bytes for way, count in counts.items() if count}

    def plain(self) -> dict[str, Any]:
        """Returns the step as an event of a recording, with the fields of its record."""
        own = {name: value for name, value in vars(self).items() if value is not None and name != "record"}
        shape = self.record.shape
        plain_shape = shape._asdict() | {"parts": [list(part) for part in shape.parts]}
        own |= {"padded_tokens": shape.num_tokens, "shape": plain_shape}
        return {"event": "step", **self.record._asdict(), **own}
