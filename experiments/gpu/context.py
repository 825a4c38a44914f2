"""Context of a section: where to write records, how long it has, whether shapes are tiny. No jax."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.gpu.gauges import Gauges
from experiments.gpu.marks import mark

# Exit status of a section that has to restart without a candidate: its kernel hangs, or broke the CUDA context.
RESTART = 75
# A candidate that did so twice takes no further part anywhere.
STRIKES = 2
# In the text of an error after which nothing runs on the device any more.
FATAL = ("CUDA_ERROR", "illegal memory access", "illegal instruction", "misaligned address", "launch failure")


def append_record(path: Path, section: str, kind: str, **fields: Any) -> None:
    """Adds a line to a file of records."""
    with path.open("a") as file:
        file.write(json.dumps({"section": section, "kind": kind, **fields}, default=str) + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records of a file; a line that a killed section left half written is left out."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


@dataclasses.dataclass
class Context:
    """A section's world.

    Attributes:
      records: file of JSON lines that records are appended to.
      ends: `time.monotonic()` at which the section should be finished.
      tiny: shapes for a processor without a GPU: to try every line, not to measure.
      peer_python: the interpreter that has torch.
      folder: for files that last as long as the section, also when it restarts.
      careful: compile one program after the other, so that the one that aborts the compiler is known.
      shard: "K/N" takes every N-th spec of correctness.
      began: `time.monotonic()` at which the section was let go.
    """

    section: str
    records: Path
    ends: float
    tiny: bool = False
    peer_python: str = ""
    folder: Path = Path(".")
    careful: bool = False
    shard: str = "1/1"
    began: float = dataclasses.field(default_factory=time.monotonic)
    gauges: Gauges = dataclasses.field(default_factory=Gauges)
    _watched: tuple[str, str, float] | None = None
    _watching: bool = False
    has_timed: bool = False

    @property
    def out(self) -> Path:
        """The folder of the run's results."""
        return self.records.parent

    def timing_begins(self) -> None:
        """Records, once, after how many seconds the section took its first time."""
        if not self.has_timed:
            self.has_timed = True
            self.record("fact", name="first timing", seconds=round(time.monotonic() - self.began, 2))

    def left(self) -> float:
        """Seconds left."""
        return self.ends - time.monotonic()

    def record(self, kind: str, **fields: Any) -> None:
        """Appends a record at once: what a section has measured survives it.

        Args:
          kind: "time" and "check" (of a candidate on a case), "value" (one number, perhaps with a bar), "fact",
            "failed", "fault" (a kernel that hangs or breaks the device's context).
        """
        append_record(self.records, self.section, kind, **fields)

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{self.section} {self.left():5.1f} s left] {text}", flush=True)

    def value(
        self,
        metric: str,
        value: float,
        unit: str,
        *,
        bar: float | None = None,
        most: bool = True,
        speed: bool = True,
        **more: Any,
    ) -> None:
        """Records one number; a bar is the most it may be, or with most=False the least. Tiny shapes have no speed."""
        if self.tiny and speed:
            bar = None
        met = None if bar is None else bool(value <= bar if most else value >= bar)
        sign = "" if bar is None else ("at most " if most else "at least ") + f"{bar:g}"
        self.record("value", metric=metric, value=value, unit=unit, bar=sign, met=met, **more)
        verdict = "" if met is None else f" ({sign}: {'met' if met else 'NOT met'})"
        self.say(f"{metric}: {value:.4g} {unit}{verdict}")

    def attempt(self, what: str, action: Callable[[], Any]) -> Any:
        """The action's result, or None after a record of its failure: one failing part must not end the rest."""
        try:
            return action()
        except Exception as error:
            self.failed(what, error)
            return None

    def failed(self, what: str, error: BaseException, **more: Any) -> None:
        """Records an exception; a NotImplementedError means that something is unsupported."""
        unsupported = isinstance(error, NotImplementedError)
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
        trace = "" if unsupported else "".join(traceback.format_exception(error, limit=-6))[-2500:]
        self.record("failed", what=what, reason=reason, unsupported=unsupported, trace=trace, **more)
        self.say(f"{what}: {'unsupported' if unsupported else 'failed'}: {reason}")

    # ------------------------------------------------------------------ kernels that hang or break the device

    @contextlib.contextmanager
    def guard(self, who: str, case: str, seconds: float = 15.0) -> Iterator[None]:
        """Around a run of a candidate's kernel: one that hangs, aborts the process, or after which the device is lost,
        is recorded as a fault, and the section's process ends and is restarted without it."""
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, daemon=True).start()
        self._watched = (who, case, time.monotonic() + seconds)
        try:
            with mark(self.folder, "runs", who, case):
                yield
        except Exception as error:
            if any(mark in str(error) for mark in FATAL):
                self.failed(f"{who} on {case}", error, who=who, case=case)
                self._restart(who, case, str(error)[:200])
            raise
        finally:
            self._watched = None

    def _watch(self) -> None:
        while True:
            time.sleep(0.2)
            watched = self._watched
            if watched is not None and time.monotonic() > watched[2]:
                self._restart(watched[0], watched[1], "hangs")

    def _restart(self, who: str, case: str, reason: str) -> None:
        self.record("fault", who=who, case=case, reason=reason)
        self.say(f"{who} on {case}: {reason}: this section restarts without it")
        os._exit(RESTART)  # a thread may be stuck in the driver

    def excluded(self, who: str, case: str) -> bool:
        """True if a candidate has broken something on this case before, or on any two."""
        faults = [r for r in read_records(self.records) if r["kind"] == "fault" and r["who"] == who]
        return len(faults) >= STRIKES or any(r["case"] == case and r["section"] == self.section for r in faults)

    def past(self, *kinds: str, section: str | None = None) -> list[dict[str, Any]]:
        """Records of a section, by default of this one: also those from before it was restarted."""
        section = section or self.section
        return [r for r in read_records(self.records) if r["section"] == section and r["kind"] in kinds]
