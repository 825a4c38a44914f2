"""The interface of tasks: settings, a run that yields measurements, and how they become a table and a figure."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.runs import text_files
from ksana_jax.lab.runs.tasks.results import Column, Measurement, Part, ResultRow
from ksana_jax.lab.runs.tasks.results import kib as kib  # for tasks outside the package
from ksana_jax.lab.runs.tasks.results import number as number

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    from ksana_jax import LLM

# Metadata of a setting that lists input files of the task. Paths in a YAML file are relative to its folder. File names
# are not part of a trial's id, so `BaseTask.inputs` must return a digest of their contents: it does for INPUT_TEXTS,
# whose files are texts as in `lab.runs.text_files`.
INPUT_FILES = {"files": True}
INPUT_TEXTS = {**INPUT_FILES, "texts": True}


def int_field(default: int | None, least: int = 1, most: int | None = None) -> Any:
    """Declares a setting that is an integer from `least` to `most`, or null if that is its default."""
    check = functools.partial(checks.integer, low=least, high=most, optional=default is None)
    return dataclasses.field(default=default, metadata={"check": check})


def float_field(default: float | None, **bounds: float) -> Any:
    """Declares a setting that is a number within bounds of `checks.number`, or null if that is its default."""
    check = functools.partial(checks.number, **bounds, optional=default is None)
    return dataclasses.field(default=default, metadata={"check": check})


def check_bounds(kind: type, settings: Mapping[str, Any]) -> None:
    """Checks settings by the bounds with which `int_field` and `float_field` declare them.

    Args:
      kind: the task's dataclass.

    Raises:
      ConfigError: a setting is out of its bounds.
    """
    bounded = {field.name: field.metadata["check"] for field in dataclasses.fields(kind) if "check" in field.metadata}
    checks.require(*(check(f"settings.{name}", settings[name]) for name, check in bounded.items()), error=ConfigError)


def asked_of(ids: Sequence[int], num_question: int, ask: str) -> dict[str, Sequence[int]]:
    """Returns a prompt for `LLM.generate` whose last num_question tokens ask about the rest.

    Args:
      ask: "with" gives all at once, "after" compresses the text before the question is read.
    """
    if ask == "with" or not num_question:
        return {"prompt_token_ids": ids}
    return {"prompt_token_ids": ids[:-num_question], "question_token_ids": ids[-num_question:]}


class TrialContext(Protocol):
    """The interface that a running trial gets from the runner."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The trial's resolved configuration."""
        ...

    @property
    def seed(self) -> int: ...

    @property
    def llm(self) -> LLM:
        """The trial's engine, with its pattern set; shared with trials that differ only in the pattern."""
        ...

    def progress(self, fraction: float) -> None:
        """Reports the fraction of the trial that is done, 0 to 1."""
        ...

    def save(self, name: str, **arrays: np.ndarray) -> str:
        """Writes arrays to TRIAL.NAME.npz next to the records; returns the file name, to include in a measurement."""
        ...


class Results(abc.ABC):
    """Turns one kind of measurements into a table and a figure. A task measures them too, or a benchmark of `bench`.

    Attributes:
      geometric: whether parts average as logarithms, as perplexities do; their changes are then ratios.
      samples: what the samples of the headline are called in notes.
      measures_speed: whether times and speeds belong in the table. Next to a quality, which is the same on every
        machine, they would show one machine's noise: then only records and CSV have them.
    """

    measures_speed: ClassVar[bool] = True
    geometric: ClassVar[bool] = False
    samples: ClassVar[str] = "seeds"

    @abc.abstractmethod
    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        """Computes one trial's numbers, by the keys that columns use; keys that were not measured are absent."""

    @abc.abstractmethod
    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        """Returns the columns to show for these rows; the CSV file has every summary key."""

    def sample(self, key: str, measurements: Sequence[Measurement]) -> Hashable | None:
        """Returns the sample on which a trial's summary key was measured as a whole, such as a workload and its seed.

        Trials of a row with equal samples count as one measurement of that key; rows with the same samples are compared
        by their differences on each. With None, every trial is a separate measurement, compared by seed.
        """
        return None

    def parts(self, measurements: Sequence[Measurement]) -> dict[str, dict[Hashable, Part]]:
        """Returns {summary key: {sample: its part}} for keys measured on several samples of a trial, such as texts.

        A row's number is then the weighted mean over the samples of all its trials, each counted once, and rows are
        compared by their differences on each.
        """
        return {}

    def headline(self, rows: Sequence[ResultRow]) -> Column | None:
        """Returns the column that best summarises a trial: by default the first with a best value; None if none has."""
        return next((column for column in self.columns(rows) if column.best), None)

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        """Returns notes that a reader needs to compare the rows."""
        return []

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        """Returns a one-sentence summary of the numbers."""
        return ""

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws the rows into an empty figure of column width: lines over the grid's last key if it is a number, bars
        otherwise."""
        from ksana_jax.lab.runs.tasks.row_figure import draw_columns

        draw_columns(figure, rows, self.columns(rows))


@dataclasses.dataclass
class NoSettings:
    """Settings of a task without settings."""


class BaseTask(Results):
    """One kind of measurement. Subclasses define Settings, run, summarise and columns; the rest has defaults.

    To add a task, write a class in a new file and an entry in TASKS, or name it in YAML: `task: my_module:MyTask`.
    """

    Settings: type = NoSettings  # a dataclass with the fields of `settings` in the YAML file

    @abc.abstractmethod
    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        """Yields measurements, each written at once: plain values, with a "metric" that names their kind."""

    def max_model_len(self, settings: Any) -> int | None:
        """Returns the tokens of the longest sequence that the settings need; None leaves it to the model."""
        return None

    def num_tokens(self, config: Mapping[str, Any]) -> int | None:
        """Returns about how many tokens a trial computes, to predict the duration of a run; None if unknown.

        Args:
          config: of the trial.
        """
        return None

    def num_samples(self, config: Mapping[str, Any]) -> int:
        """Returns on how many samples, such as texts, a trial measures its headline."""
        return 1

    def inputs(self, settings: Any) -> dict[str, str]:
        """Returns digests of the task's inputs, so that changed inputs make another trial."""
        names = [field.name for field in dataclasses.fields(settings) if field.metadata.get("texts")]
        return {name: text_files.digest(getattr(settings, name), f"settings.{name}") for name in names}

    def check(self, config: Mapping[str, Any]) -> None:
        """Checks the config beyond the bounds of its settings; raises ConfigError if it makes no trial."""


class AskingTask(BaseTask):
    """Base of tasks that ask questions: each gives a measurement "answer" with a "digest" of its text."""

    measures_speed = False
    samples = "questions"
