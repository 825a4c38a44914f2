"""`ksana bench NAME`: runs a benchmark, prints its table, and writes records, tables and figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ksana_jax.core.files import require_folder, write_atomic
from ksana_jax.lab.bench.core import Bench, run
from ksana_jax.lab.runs import plain_json
from ksana_jax.lab.runs.records import Records
from ksana_jax.lab.runs.report import Report, draw, report_of_rows, result_rows, write_tables


def run_and_show(bench: Bench, *, repeats: int, out: Path | None, as_json: bool) -> Report:
    """Runs a benchmark and prints its table.

    Args:
      out: folder for records.jsonl, table.md, table.csv, table.tex and the figure; existing ones are replaced.
      as_json: also print one line of JSON: every number of every row, the notes and the environment.
    """
    from rich.console import Console
    from rich.markup import escape

    from ksana_jax.lab.runs.command import show

    require_folder("--out", out)  # before the time that measuring takes
    records, text = run(bench, repeats)
    made = report_of(bench, records)
    show(made)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / "records.jsonl", text)
        files = ["records.jsonl", *write_tables(made, out), *draw(made, out)]
        Console(highlight=False).print(f"{escape(str(out))}: {', '.join(files)}")
    if as_json:
        print(plain_json.dumps(plain(made, records)))
    return made


def report_of(bench: Bench, records: Records) -> Report:
    assert records.plan is not None
    rows = result_rows(records, bench)
    return report_of_rows(records.plan["name"], records.plan["title"], bench, rows, [], {}, [])


def plain(made: Report, records: Records) -> dict[str, Any]:
    """Returns a report as JSON values: `results` has for each row its label, its point and its numbers."""
    labelled = any(row.label for row in made.rows)
    results = [
        {**({"label": row.label} if labelled else {}), **row.point, **{key: row.mean(key) for key in row.values}}
        for row in made.rows
    ]
    environment = next((start["environment"] for start in records.starts.values()), {})
    return {
        "name": made.name,
        "title": made.title,
        "results": results,
        "conclusion": made.conclusion,
        "notes": made.notes,
        "environment": environment,
    }
