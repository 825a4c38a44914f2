"""Exports a run as one table with a row per trial, for programs such as pandas, R or a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection
from pathlib import Path

from ksana_jax.core.plugins import trusting
from ksana_jax.lab.runs.report import done_of, read_planned, results_of, summary
from ksana_jax.lab.runs.tables import csv_text


def export(folder: Path, trusted: Collection[str] | None = ()) -> str:
    """Returns CSV text: row label, the grid's columns, seed, trial id and every summary number, in full precision.

    Only finished trials, in the plan's order; numbers that a trial lacks are empty. trusted: see `report`.

    Raises:
      FileNotFoundError: the folder has no records.
      ConfigError: the records contain no plan, or are not valid records.
    """
    found = []
    with trusting(trusted):
        records, plan = read_planned(folder)
        task = results_of(records, plan)
        for row in plan["rows"]:
            for trial in done_of(row, records):
                left = [row["label"], *row["point"].values(), records.starts[trial].get("seed"), trial]
                found.append((left, dict(summary(task, plan["task"], trial, records).numbers)))
    point = list(plan["rows"][0]["point"]) if plan["rows"] else []
    keys = list(dict.fromkeys(key for _, numbers in found for key in numbers))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", *point, "seed", "trial", *keys])
    for left, numbers in found:
        writer.writerow([*map(csv_text, left), *(repr(numbers[k]) if k in numbers else "" for k in keys)])
    return text.getvalue()
