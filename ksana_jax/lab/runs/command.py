"""`ksana run`, `report` and `compare`: runs an experiment, writes and prints its report, and compares results."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ksana_jax.core.compilation_cache import cache_use
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.files import write_atomic
from ksana_jax.lab.runs import comparison_tables, plain_json, progress, tables
from ksana_jax.lab.runs.combine import combine
from ksana_jax.lab.runs.compare import Comparison, compare, compare_rows
from ksana_jax.lab.runs.config import Plan, load
from ksana_jax.lab.runs.outlook import memory, outlook
from ksana_jax.lab.runs.records import WHOLE, Shard
from ksana_jax.lab.runs.report import Report, draw, read_report, write_tables
from ksana_jax.lab.runs.run import Outcome, own_names, run

if TYPE_CHECKING:
    from ksana_jax.lab.runs.on_ray import OnRay

_WIDEST = 1000  # characters


def run_and_report(
    file: Path,
    overrides: Sequence[str],
    out: Path | None,
    shard: str = "1/1",
    debug: bool = False,
    on_ray: OnRay | None = None,
    yes: bool = False,
    dry_run: bool = False,
) -> int:
    """Runs the remaining trials of an experiment and shows the report of all finished trials.

    Args:
      out: output folder; None takes runs/NAME.
      on_ray: the cluster that runs the trials; None is this process.
      dry_run: only say what would run.
      yes: do not ask on a terminal whether to continue a run of more than an hour.

    Returns:
      Exit code: 0, or 1 if trials failed or the user declined to continue.
    """
    part, plan = Shard.parse(shard), load(file, overrides)
    folder, errors = out or Path("runs") / plan.name, Console(stderr=True, highlight=False)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, must be a folder")
    if dry_run:
        for line in (*outlook(plan, folder, part), *memory(plan, part)):
            errors.print(line, markup=False)
        return 0
    try:
        outcome = execute(plan, folder, part, debug, on_ray, yes)
    except progress.Declined:
        errors.print("stopped; the same command continues from here")
        return 1
    report_and_show([folder], trusted=own_names(plan))
    for label, error in outcome.failed.items():
        errors.print(f"failed: {escape(label)}: {escape(error)}")
    return 1 if outcome.failed else 0


def execute(
    plan: Plan, folder: Path, part: Shard = WHOLE, debug: bool = False, on_ray: OnRay | None = None, yes: bool = False
) -> Outcome:
    """Runs the remaining trials of an experiment and shows progress; arguments as `run_and_report`.

    Raises:
      progress.Declined: the user declined to continue.
    """
    errors = Console(stderr=True, highlight=False)
    for line in outlook(plan, folder, part):
        errors.print(line, markup=False)
    elsewhere = contextlib.nullcontext() if on_ray is None else on_ray.executor(plan, debug)
    with elsewhere as executor, cache_use() as use, progress.shown(errors, yes) as callbacks:
        outcome = run(plan, folder, part, debug=debug, executor=executor, **callbacks)
    if use.asked:
        cached = "; the others came from the cache" * (use.compiled < use.asked)
        errors.print(f"compiled {use.compiled} of {use.asked} functions{cached}")
    return outcome


def report_and_show(folders: Sequence[Path], out: Path | None = None, trusted: Collection[str] | None = ()) -> None:
    """Prints the report of a folder, or of several side by side, and writes tables and figure.

    Args:
      out: folder for tables and figure; None takes the run's folder, and writes nothing for several folders.
      trusted: see `report`.
    """
    one = len(folders) == 1
    made = read_report(folders[0], trusted) if one else combine(folders, trusted)
    out = folders[0] if one and out is None else out
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    # The table is on disk and on the terminal before the figure is drawn.
    files = write_tables(made, out) if out is not None else []
    show(made)
    if out is not None:
        kept = ("records.jsonl", "run.json") if out == folders[0] else ()
        files += draw(made, out) + [name for name in kept if (out / name).exists()]
        Console(highlight=False).print(f"{escape(str(out))}: {', '.join(files)}")


def compare_and_show(
    a: Path,
    b: Path | None,
    against: str = "",
    rows: Sequence[str] = (),
    out: Path | None = None,
    as_json: bool = False,
    trusted: Collection[str] | None = (),
) -> None:
    """Prints run B against run A, row by row; or, without B, rows of A, by default all, against one of them.

    Args:
      trusted: see `report`. others: of `show_comparison`.
    """
    made = compare_rows(a, against, rows, trusted) if b is None else compare(a, b, trusted)
    show_comparison(made, out, as_json)


def show_comparison(made: Comparison, out: Path | None, as_json: bool, name: str = "compare") -> None:
    """Prints a comparison.

    Args:
      out: folder for NAME.md, NAME.tex and NAME.json; None writes nothing.
      as_json: also print one line of JSON, with every number of the summaries.
    """
    line = plain_json.dumps(comparison_tables.plain(made))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / f"{name}.md", comparison_tables.markdown(made))
        write_atomic(out / f"{name}.tex", comparison_tables.latex(made, out.resolve().name))
        write_atomic(out / f"{name}.json", line + "\n")
    _print(made.title, comparison_tables.terminal(made), "", comparison_tables.notes(made))
    if out is not None:
        Console(highlight=False).print(f"{escape(str(out))}: {name}.md, {name}.tex, {name}.json")
    if as_json:
        print(line)


def show(made: Report) -> None:
    """Prints table, conclusion and notes."""
    _print(made.title, tables.terminal(*made.grid), made.conclusion, made.notes)


def _print(title: str, table: Table, conclusion: str, notes: Sequence[str]) -> None:
    Console(highlight=False).print(f"[italic]{escape(title)}[/italic]")
    # A narrow terminal wraps the table's lines, because squeezed numbers are unreadable.
    console = Console(highlight=False)
    console.width = max(console.width, _WIDEST)
    width = console.measure(table).maximum
    Console(highlight=False, width=width).print(table)
    console = Console(highlight=False)
    if conclusion:
        console.print(f"[bold]{escape(conclusion)}[/bold]")
    for note in notes:
        console.print(f"[dim]{escape(note)}[/dim]")
