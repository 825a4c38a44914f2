"""Shows the progress of a run: one line per finished trial, and on a terminal a bar below them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypedDict

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ksana_jax.experiments.run import Ended
from ksana_jax.experiments.tasks import task_named
from ksana_jax.experiments.tasks.results import ResultRow


class Callbacks(TypedDict, total=False):
    """Callback arguments of `run.run`."""

    on_progress: Callable[[int, int, str, float], None]
    on_end: Callable[[Ended], None]


@contextlib.contextmanager
def shown(console: Console) -> Iterator[Callbacks]:
    """Shows a run on a console while the context is open; yields the callbacks for `run.run`."""
    if not console.is_terminal:
        yield {"on_end": Lines(console)}
        return
    columns = (
        TextColumn("{task.completed:.1f}/{task.total} trials"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("loading", total=None)
        started = False

        def on_progress(done: int, total: int, label: str, fraction: float) -> None:
            nonlocal started
            if not started:
                # Trials skipped as done took no time, and say nothing about the duration of the others.
                progress.reset(bar, completed=done, total=total)
                started = True
            progress.update(bar, completed=done + fraction, description=escape(label))

        yield {"on_progress": on_progress, "on_end": Lines(console)}


class Lines:
    """Writes "3/27  window=64, seed 0  12.4 s  ETA 5 min  ppl 5.64" after each trial."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self._console, self._clock = console, clock
        self._began, self._count = clock(), 0

    def __call__(self, ended: Ended) -> None:
        self._count += 1
        left = (self._clock() - self._began) / self._count * (ended.num_trials - ended.num_ended)
        result = f"failed: {ended.error}" if ended.error else _headline(ended)
        parts = [
            f"{ended.num_ended}/{ended.num_trials}",
            f"{ended.trial.label}, seed {ended.trial.seed}",
            duration(ended.seconds),
            f"ETA {duration(left)}" if ended.num_ended < ended.num_trials else "",
            result,
        ]
        line = "  ".join(part for part in parts if part)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _headline(ended: Ended) -> str:
    """Returns title and value of the task's headline column."""
    # A log line must not end a run; the report shows what is wrong with a summary.
    with contextlib.suppress(Exception):
        task = task_named(ended.trial.config["task"])
        numbers = {key: [value] for key, value in task.summarise(ended.measurements).items()}
        row = ResultRow(ended.trial.label, {}, 1, [ended.measurements], numbers)
        column = task.headline([row])
        if column is not None and (value := row.mean(column.key)) is not None:
            return f"{column.title} {column.text(value)}"
    return ""


def duration(seconds: float) -> str:
    """Formats a duration: seconds with one decimal below a minute, minutes below an hour, else hours and minutes."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes = max(round(seconds / 60), 1)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
