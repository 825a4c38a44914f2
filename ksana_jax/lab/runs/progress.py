"""Shows the progress of a run: its size, one line per finished trial, and on a terminal a bar below them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ksana_jax.lab.runs.config import Trial
from ksana_jax.lab.runs.run import Callbacks, EndedTrial
from ksana_jax.lab.runs.tasks import task_named
from ksana_jax.lab.runs.tasks.results import ResultRow

# On a terminal, a longer run asks whether to continue once its first trial has shown how long it takes.
ASK_AFTER_S = 3600


class Declined(Exception):
    """The user does not want to wait for the rest of a run."""


@contextlib.contextmanager
def shown(console: Console, yes: bool = False) -> Iterator[Callbacks]:
    """Shows a run on a console while the context is open; yields the callbacks for `run.run`.

    Args:
      yes: never ask whether to continue.

    Raises:
      Declined: by `on_end`, if the answer is no.
    """
    lines = Lines(console)
    if not console.is_terminal:
        yield {"on_begin": lines.begin, "on_end": lines.end}
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
        started, asks = False, not yes

        def on_progress(done: int, total: int, label: str, fraction: float) -> None:
            nonlocal started
            if not started:
                # Trials skipped as done took no time, and say nothing about the duration of the rest.
                progress.reset(bar, completed=done, total=total)
                started = True
            progress.update(bar, completed=done + fraction, description=escape(label))

        def on_end(ended: EndedTrial) -> None:
            nonlocal asks
            lines.end(ended)
            if asks and lines.left_s > ASK_AFTER_S:
                progress.stop()
                answer = console.input(
                    f"The rest takes about {duration(lines.left_s)} (--yes does not ask). Go on? [y/N] "
                )
                if answer.strip().lower() not in ("y", "yes"):
                    raise Declined
                progress.start()
            asks = False

        yield {"on_begin": lines.begin, "on_progress": on_progress, "on_end": on_end}


class Lines:
    """Writes "3/27  window=64, seed 0  12.4 s  ETA 5 min  ppl 5.64" after each trial.

    Trials are expected to take as long as their share of the tokens, where these are known.

    left_s: estimated seconds for the rest, by the trials so far.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self._console, self._clock, self.left_s = console, clock, 0.0

    def begin(self, trials: Sequence[Trial]) -> None:
        tokens = [task_named(trial.config["task"]).num_tokens(trial.config) for trial in trials]
        known = [max(count, 1) for count in tokens if count is not None]
        is_known = len(known) == len(tokens)
        self._sizes = {t.id: count for t, count in zip(trials, known if is_known else [1] * len(tokens), strict=True)}
        self._began, self._done = self._clock(), 0

    def end(self, ended: EndedTrial) -> None:
        self._done += self._sizes[ended.trial.id]
        self.left_s = (self._clock() - self._began) / self._done * (sum(self._sizes.values()) - self._done)
        result = f"failed: {ended.error}" if ended.error else _headline(ended)
        parts = [
            f"{ended.num_ended}/{ended.num_trials}",
            f"{ended.trial.label}, seed {ended.trial.seed}",
            duration(ended.seconds),
            f"ETA {duration(self.left_s)}" if ended.num_ended < ended.num_trials else "",
            result,
        ]
        line = "  ".join(part for part in parts if part)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _headline(ended: EndedTrial) -> str:
    """Returns title and value of the task's headline column."""
    # A log line must not end a run; the report shows errors of a summary.
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
