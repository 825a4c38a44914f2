"""`ksana_jax.run`: runs an experiment from Python and returns its result, which a notebook shows."""

from __future__ import annotations

import base64
import dataclasses
import importlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import name_of
from ksana_jax.lab.runs import comparison_tables, config, figures, tables
from ksana_jax.lab.runs.command import execute
from ksana_jax.lab.runs.compare import compare_rows
from ksana_jax.lab.runs.report import FIGURE_INCHES, Report, report
from ksana_jax.lab.runs.run import own_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run(
    experiment: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    debug: bool = False,
    **fields: Any,
) -> Result:
    """Runs or resumes an experiment, as `ksana run` does, with progress on standard error.

    Args:
      experiment: a YAML file, the name of a shipped experiment, or the fields of a file as a dict. Values are those of
        YAML; a class or function stands for its "module:name".
      overrides: {dotted key: value}, such as {"engine.block_size": 8}. fields: of keys without a dot, as seeds=[0, 1].
      out: output folder; None takes runs/NAME.
      debug: raise the error of a trial; otherwise it is recorded, and the other trials continue.

    Returns:
      A result that a notebook shows, with `table`, `records`, `figure`, `folder`, `failed` and `compare`.

    Raises:
      FileNotFoundError: there is no such file, model or text.
      ConfigError: a key is unknown, or a value has the wrong type or is out of range.
    """
    changes = [f"{key}={_json(value)}" for key, value in {**(overrides or {}), **fields}.items()]
    if isinstance(experiment, Mapping):
        plan = config.plan(json.loads(_json(experiment)), changes)
    else:
        plan = config.load(Path(experiment), changes)
    folder = Path(out or f"runs/{plan.name}")
    outcome = execute(plan, folder, debug=debug, yes=True)
    made, image = report(folder, own_names(plan)), folder / "figure.png"
    return Result(folder, outcome.failed, made, image.read_bytes() if image.exists() else b"")


class Markdown(str):
    """A text that a notebook shows as Markdown."""

    def __repr__(self) -> str:
        return str(self)

    _repr_markdown_ = __repr__


@dataclasses.dataclass(frozen=True, repr=False)
class Result:
    """The result of an experiment; a notebook shows its table and figure.

    folder: has the records, and the table and the figure as files. failed: {label and seed: error}. image: a PNG.
    """

    folder: Path
    failed: dict[str, str]
    report: Report
    image: bytes = b""

    @property
    def table(self) -> Any:
        """The numbers of table.csv as a DataFrame, in full precision; without pandas, the table as text."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            return Markdown(tables.markdown("", *self.report.grid, ()))
        return pandas.read_csv(io.StringIO(tables.comma_separated(self.report.rows, self.report.columns)))

    @property
    def records(self) -> list[dict[str, Any]]:
        """The start record of each finished trial (label, seed, config, environment, ...) with its `measurements`."""
        measured = (measurements for row in self.report.rows for measurements in row.trials)
        return [{**start, "measurements": m} for start, m in zip(self.report.starts, measured, strict=True)]

    @property
    def figure(self) -> Figure:
        """A new drawing of the figure, to change and save; figure.png and figure.pdf are in the folder."""
        importlib.import_module("matplotlib.pyplot")  # notebooks show figures once it is imported
        found: list[Figure] = []

        def draw(figure: Figure) -> None:
            self.report.task.draw(figure, self.report.rows)
            found.append(figure)

        figures.render(draw, FIGURE_INCHES)
        return found[0]

    def compare(self, against: str, *rows: str) -> Markdown:
        """Compares rows, or all, with one by their names in the table, as `ksana compare --against` does."""
        return Markdown(comparison_tables.markdown(compare_rows(self.folder, against, rows)))

    def __repr__(self) -> str:
        return self.report.markdown + "".join(f"\nfailed: {label}: {why}\n" for label, why in self.failed.items())

    def _repr_markdown_(self) -> str:
        image = base64.b64encode(self.image).decode()
        return repr(self) + f"\n![figure](data:image/png;base64,{image})\n" * bool(image)


def _json(value: Any) -> str:
    return json.dumps(value, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Returns what YAML has for a value that JSON lacks."""
    if isinstance(value, (range, os.PathLike)):
        return list(value) if isinstance(value, range) else str(value)
    if callable(value):
        return name_of(value)
    raise ConfigError(f"{value!r:.80} is of type {type(value).__name__}: an experiment has values as in YAML")
