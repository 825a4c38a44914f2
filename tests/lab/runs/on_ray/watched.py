"""A task without an engine that says which process runs it, and waits, fails or dies where its settings say."""

import dataclasses
import os
import signal
import time
from pathlib import Path

import numpy as np

from ksana_jax.lab.runs.tasks.base import BaseTask, Column, number


@dataclasses.dataclass
class WatchedSettings:
    """folder: where a file for each attempt, X-SEED.PID, appears as it begins.
    wait_at: x whose first attempts wait for a file "go" there. fail_at, die_at: x whose attempts fail, or die.
    """

    x: int = 1
    folder: str = ""
    wait_at: int | None = None
    fail_at: int | None = None
    die_at: int | None = None


class Watched(BaseTask):
    Settings = WatchedSettings

    def run(self, trial):
        settings = WatchedSettings(**trial.config["settings"])
        folder = Path(settings.folder)
        first = not list(folder.glob(f"{settings.x}-{trial.seed}.*"))
        (folder / f"{settings.x}-{trial.seed}.{os.getpid()}").touch()
        trial.progress(0.5)
        while settings.x == settings.wait_at and first and not (folder / "go").exists():
            time.sleep(0.02)
        if settings.x == settings.fail_at:
            raise RuntimeError(f"x is {settings.x}")
        if settings.x == settings.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        yield {"metric": "value", "value": settings.x * 10 + trial.seed, "array": trial.save("x", x=np.arange(3))}

    def summarise(self, measurements):
        return {"mean": float(np.mean([m["value"] for m in measurements]))}

    def columns(self, rows):
        return [Column("mean", "mean", number(3), "min")]
