"""Tabulates the reports of the prefix cache in a stored log of requests, see `core.prefix_report`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.files import open_to_read
from ksana_jax.core.prefix_report import PrefixReport, read_sentence
from ksana_jax.lab import recording

_POSITION = re.compile(r"at token ([\d,]+): (.+)")


def misses(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the causes in a log or a recording, and the positions at which most prompts differ from earlier ones.

    Each has its number of requests, of their prompt tokens and of computed ones, and the reason of the last request;
    those with most computed tokens come first.

    Raises:
      ConfigError: there are no reports.
    """
    found = list(filter(None, map(read_sentence, _lines(path))))
    if not found:
        raise ConfigError(
            f"{path} has no reports of the prefix cache: log with `ksana -v serve MODEL 2> FILE`, or set "
            "enable_prefix_caching and prefix_report_blocks in `ksana trace run --record`"
        )
    positions = [(at[1], *report[1:3], at[2]) for report in found if (at := _POSITION.search(report[3])) is not None]
    return {"cause": _grouped(found), "position": _grouped(positions)[:10]}


def _grouped(reports: Iterable[tuple[str, int, int, str]]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for group, num_cached, num_tokens, reason in reports:
        row = rows.setdefault(group, {"of": group, "requests": 0, "tokens": 0, "computed": 0})
        row["requests"] += 1
        row["tokens"] += num_tokens
        row["computed"] += num_tokens - num_cached
        row["last"] = reason
    return sorted(rows.values(), key=lambda row: -row["computed"])


def _lines(path: Path) -> Iterator[str]:
    """Yields the lines of a log, or the reports of a recording as such lines."""
    if path.is_dir() or recording.is_recording(path):
        reports = (event.get("prefix_report") for event in recording.read(path).events)
        yield from (str(PrefixReport(**report)) for report in reports if report)
    else:
        with open_to_read(path) as lines:
            yield from (line.decode(errors="replace") for line in lines)


def show_misses(path: Path, as_json: bool) -> None:
    """Prints the tables of `misses`."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    found = misses(path)
    for title, rows in found.items():
        table = Table(title, *(name for name in rows[0] if name != "of") if rows else (), box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(f"{value:,}" if isinstance(value, int) else escape(value) for value in row.values()))
        if rows:
            Console(highlight=False).print(table)
    if as_json:
        print(json.dumps(found))
