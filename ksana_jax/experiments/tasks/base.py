"""What a task is: settings, a run that yields measurements, and how they become a table and a figure."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ksana_jax import checks
from ksana_jax.errors import ConfigError
from ksana_jax.experiments.tasks.results import Column, Measurement, ResultRow

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    from ksana_jax import LLM

# Metadata of a setting that is a list of files which the task reads. Relative ones in a YAML file start at its folder.
# Their names are no part of a trial's id: `BaseTask.inputs` has to give a digest of what they hold.
INPUT_FILES = {"files": True}


def number(digits: int) -> Callable[[float], str]:
    """Writes a number with that many digits after the point and commas between thousands."""
    return lambda value: f"{value:,.{digits}f}"


def kib(value: float) -> str:
    return f"{value / 1024:,.1f}".removesuffix(".0")


def check_counts(config: Mapping[str, Any], *names: str, least: int = 1) -> None:
    """Checks settings of a task that are counts; one whose default is None may stay so.

    Raises:
      ConfigError: one is less than `least`.
    """
    settings = config["settings"]
    found = (
        checks.integer(f"settings.{name}", settings[name], least, optional=settings[name] is None) for name in names
    )
    checks.require(*found, error=ConfigError)


class TrialContext(Protocol):
    """What a running trial is given."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The trial's resolved configuration."""
        ...

    @property
    def seed(self) -> int: ...

    @property
    def llm(self) -> LLM:
        """The trial's engine, its pattern set; shared with trials that differ in nothing but the pattern."""
        ...

    def progress(self, fraction: float) -> None:
        """Says how much of the trial is done, 0 to 1."""
        ...

    def save(self, name: str, **arrays: np.ndarray) -> str:
        """Writes arrays to TRIAL.NAME.npz next to the records, and returns that file name, for a measurement."""
        ...


@dataclasses.dataclass
class NoSettings:
    """The settings of a task that has none."""


class BaseTask(abc.ABC):
    """One kind of measurement. A task gives Settings, run, summarise and columns, and what else it knows better.

    Adding one: a file with such a class and a line in TASKS, or `task: my_package.my_module:MyTask` in the YAML file.
    """

    Settings: type = NoSettings  # a dataclass; its fields are those of `settings` in the YAML file

    @abc.abstractmethod
    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        """Yields measurements, each written at once: plain values, with a "metric" that names what it is."""

    @abc.abstractmethod
    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """One trial's numbers, by the keys that columns use; what was not measured is absent."""

    @abc.abstractmethod
    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        """The columns to show for these rows; the CSV file has every summary key besides."""

    def sample(self, key: str, measurements: Sequence[Measurement]) -> Hashable | None:
        """What a trial's summary key was measured on, such as digests of texts.

        Trials of a row with equal samples are one measurement of that key; rows with the same samples are compared by
        their differences on each. None: every trial is a measurement of its own.
        """
        return None

    def max_model_len(self, settings: Any) -> int | None:
        """Tokens of the longest sequence that the settings need; None leaves it to the model."""
        return None

    def inputs(self, settings: Any) -> dict[str, str]:
        """Digests of what the task reads, so that changed inputs are another trial."""
        return {}

    def check(self, config: Mapping[str, Any]) -> None:  # noqa: B027  a task may have nothing to check
        """Raises ConfigError where settings and pattern cannot go together."""

    def headline(self, rows: Sequence[ResultRow]) -> Column | None:
        """The column that says most of a trial in one number: the first with a best value. None if there is none."""
        return next((column for column in self.columns(rows) if column.best), None)

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        """What a reader must know to compare the rows, a sentence each."""
        return []

    def reading(self, rows: Sequence[ResultRow]) -> str:
        """One sentence that the numbers say."""
        return ""

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws the rows into an empty figure of column width: lines against the grid's last key if that is a number,
        bars otherwise."""
        from ksana_jax.experiments.tasks.row_figure import draw_columns

        draw_columns(figure, rows, self.columns(rows))
