"""A task without an engine, and a command that runs it and can be killed: python fake_task.py FILE OUT."""

import dataclasses
import os
import sys
import time
from pathlib import Path

from ksana_jax.lab.runs.tasks import TASKS
from ksana_jax.lab.runs.tasks.base import BaseTask, Column, number


@dataclasses.dataclass
class FakeSettings:
    x: int = 1
    y: float = 0.5
    num_lines: int = 3
    sleep_s: float = 0.0
    fail_at: int | None = None


class Fake(BaseTask):
    Settings = FakeSettings

    def run(self, trial):
        settings = FakeSettings(**trial.config["settings"])
        for line in range(settings.num_lines):
            if settings.fail_at == settings.x:
                raise RuntimeError(f"x is {settings.x}")
            time.sleep(settings.sleep_s)
            yield {"metric": "value", "value": settings.x * 10 + settings.y * line + trial.seed}

    def summarise(self, measurements):
        values = [m["value"] for m in measurements]
        return {"mean": sum(values) / len(values), "lines": len(values)}

    def columns(self, rows):
        return [Column("mean", "mean", number(3), "min"), Column("lines", "lines", number(0))]

    def draw(self, figure, rows):
        axes = figure.subplots()
        axes.plot([r.mean("mean") or 0 for r in rows])


def register():
    TASKS["fake"] = "fake_task:Fake"


if __name__ == "__main__":
    register()
    # What a device is asked takes seconds; a fake task has none.
    from ksana_jax.lab.runs import run as run_module
    from ksana_jax.lab.runs import trials

    run_module.environment = trials.environment = lambda: {"pid": os.getpid()}
    from ksana_jax.lab.runs.config import load
    from ksana_jax.lab.runs.report import report

    folder = Path(sys.argv[2])
    print(run_module.run(load(sys.argv[1]), folder), flush=True)
    report(folder)
