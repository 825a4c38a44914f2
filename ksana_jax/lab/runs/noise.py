"""Decides which differences between rows exceed the noise. Knows values and their samples, no tasks.

The rule for tables and sentences: two rows differ if their means are more than two standard deviations apart. If both
measured the same samples (texts), the deviation is taken over their differences on each sample, which removes variation
between samples; otherwise it is pooled over both rows. A single value has no deviation, so nothing is resolved. A row
whose values are all infinite differs from one with finite values; NaN differs from nothing.

Two whole runs are compared by a paired t-test instead (`paired_p`), row by row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ksana_jax.lab.runs.tasks.results import Column, ResultRow, deviation, mean, ranked

NUM_DEVIATIONS = 2
SIGNIFICANT = 0.05  # level of the paired test


def differ(a: ResultRow, b: ResultRow, key: str) -> bool:
    """True if the means of two rows differ by more than the noise."""
    if differences := paired_differences(a, b, key):
        return abs(mean(differences)) > NUM_DEVIATIONS * deviation(differences)
    mine, theirs = a.sd(key), b.sd(key)
    if mine is None or theirs is None:
        return False
    pooled = math.hypot(mine, theirs) / math.sqrt(2)
    return abs(difference(a.mean(key) or 0.0, b.mean(key) or 0.0)) > NUM_DEVIATIONS * pooled


def difference(a: float, b: float) -> float:
    """Returns a - b; 0 for two equal infinities."""
    return 0.0 if a == b else a - b


def paired_differences(a: ResultRow, b: ResultRow, key: str) -> list[float]:
    """Returns a's values minus b's on the same samples; empty unless both have the same two or more samples."""
    mine, theirs = (dict(zip(r.samples.get(key, ()), r.values.get(key, ()), strict=False)) for r in (a, b))
    if len(mine) < 2 or None in mine or mine.keys() != theirs.keys():
        return []
    return [difference(mine[sample], theirs[sample]) for sample in mine]


def paired_p(differences: Sequence[float]) -> float | None:
    """Returns the two-sided p-value of a paired t-test (Student 1908) that the mean difference is 0.

    None for fewer than two differences, and if their deviation is not finite. Differences that are all equal have no
    deviation: p is 1 if they are 0, else 0.
    """
    count = len(differences)
    if count < 2 or not math.isfinite(spread := deviation(differences)):
        return None
    if spread == 0:
        return 1.0 if differences[0] == 0 else 0.0
    from scipy.special import stdtr  # half a second, which most commands save

    return float(2 * stdtr(count - 1, -abs(mean(differences)) / (spread / math.sqrt(count))))


def leaders(rows: Sequence[ResultRow], column: Column) -> list[ResultRow]:
    """Returns the rows whose value is set in bold: the best and any displayed equally, if all others differ from it.

    For exact counts, any displayed difference suffices. Rows with NaN, and of simulated memory, are left out.
    """
    measured = [r for r in ranked(rows) if (value := r.mean(column.key)) is not None and not math.isnan(value)]
    if column.best is None or not measured:
        return []
    first = (min if column.best == "min" else max)(measured, key=lambda r: r.mean(column.key) or 0.0)

    def written(row: ResultRow) -> str:
        return column.text(row.mean(column.key) or 0.0)

    others = [r for r in measured if written(r) != written(first)]
    if not others or not (column.exact or all(differ(first, r, column.key) for r in others)):
        return []
    return [r for r in measured if written(r) == written(first)]


def notes(rows: Sequence[ResultRow], columns: Iterable[Column]) -> list[str]:
    """Explains the table's bold numbers."""
    compared = [c for c in columns if c.best and not c.exact]
    measured = {c.key: [r for r in rows if r.mean(c.key) is not None] for c in compared}
    several = [key for key, found in measured.items() if len(found) > 1]
    if not several:
        return []
    single = [key for key in several if all(len(r.values[key]) == 1 for r in measured[key])]
    if len(single) == len(several):
        return ["Not resolved: one run each. Only exact counts are bold."]
    said = f"Bold: best by more than {NUM_DEVIATIONS} standard deviations"
    pairs = ((a, b, key) for key in several for a in measured[key] for b in measured[key] if a is not b)
    if any(paired_differences(*pair) for pair in pairs):
        said += "; if rows scored the same texts, of their differences on each text"
    titles = [c.title for c in compared if c.key in single]
    return [said + ".", *[f"Not resolved, one run each: {'; '.join(titles)}."] * bool(titles)]


def caveat(a: ResultRow, b: ResultRow, key: str) -> str:
    """Returns the caveat for a sentence that compares two rows; empty if they differ beyond the noise."""
    if differ(a, b, key):
        return ""
    if min(len(r.values.get(key, ())) for r in (a, b)) < 2:
        return "not resolved: one run each"
    return f"not resolved: within {NUM_DEVIATIONS} standard deviations"


def others(count: int) -> str:
    """Counts other rows in words: "1 other", "2 others"."""
    return f"{count} other" + "s" * (count != 1)
