"""`ksana_jax.run`: runs an experiment from Python and returns its result, which a notebook shows."""

from __future__ import annotations

import base64
import dataclasses
import importlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import name_of, trusting
from ksana_jax.lab.runs import comparison_tables, config, figures, records, tables
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
      overrides: {dotted key: value}, such as {"engine.block_size": 8}.
      out: output folder; None takes runs/NAME.
      debug: raise the error of a trial; otherwise it is recorded, and the other trials continue.
      fields: overrides of keys without a dot, such as seeds=[0, 1].

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
        plan = config.load(experiment, changes)
    folder, trusted = Path(out or f"runs/{plan.name}"), own_names(plan)
    outcome = execute(plan, folder, debug=debug, yes=True)
    return Result(folder, outcome.failed, report(folder, trusted), trusted)


class Markdown(str):
    """A text that a notebook shows as Markdown."""

    def __repr__(self) -> str:
        return str(self)

    _repr_markdown_ = __repr__


@dataclasses.dataclass(frozen=True, repr=False)
class Result:
    """The result of an experiment; a notebook shows its table and figure.

    folder: has the records, and the table and the figure as files. failed: {label and seed: error}.
    """

    folder: Path
    failed: dict[str, str]
    report: Report
    trusted: Collection[str]

    @property
    def table(self) -> Any:
        """table.csv as a DataFrame, with every number in full precision; without pandas, the table as text."""
        try:
            return importlib.import_module("pandas").read_csv(self.folder / "table.csv")
        except ImportError:
            return Markdown(tables.markdown("", *self.report.grid, ()))

    @property
    def records(self) -> list[dict[str, Any]]:
        """The start record of each finished trial (label, seed, config, environment, ...) with its `measurements`."""
        with trusting(self.trusted):
            found = records.read(self.folder)
        assert found.plan is not None
        trials = dict.fromkeys(trial for row in found.plan["rows"] for trial in row["trials"] if trial in found.done)
        return [{**found.starts[trial], "measurements": found.done[trial]} for trial in trials]

    @property
    def figure(self) -> Figure:
        """The figure, drawn anew, to change and save; the folder has figure.png and figure.pdf."""
        importlib.import_module("matplotlib.pyplot")  # notebooks show figures once it is imported
        with figures.drawn(lambda figure: self.report.task.draw(figure, self.report.rows), FIGURE_INCHES) as figure:
            return figure

    def compare(self, a: str, b: str) -> Markdown:
        """Compares row b with row a, by their names in the table, as `ksana compare` does."""
        return Markdown(comparison_tables.markdown(compare_rows(self.folder, a, b, self.trusted)))

    def __repr__(self) -> str:
        failed = "".join(f"\nfailed: {label}: {error}\n" for label, error in self.failed.items())
        return (self.folder / "table.md").read_text(encoding="utf-8") + failed

    def _repr_markdown_(self) -> str:
        image = self.folder / "figure.png"
        content = base64.b64encode(image.read_bytes()).decode() if image.exists() else ""
        return repr(self) + f"\n![figure](data:image/png;base64,{content})\n" * bool(content)


def _json(value: Any) -> str:
    return json.dumps(value, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Returns what YAML has for a value that JSON lacks."""
    if isinstance(value, (range, os.PathLike)):
        return list(value) if isinstance(value, range) else str(value)
    if callable(value):
        return name_of(value)
    raise ConfigError(f"{value!r:.80} is of type {type(value).__name__}: an experiment has values as in YAML")
