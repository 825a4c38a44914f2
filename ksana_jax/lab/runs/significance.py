"""Tests differences between rows: one test for tables, figures, sentences and `ksana compare`.

Two rows are compared by a two-sided paired t-test (Student 1908) over the samples that both measured, such as texts, or
else over seeds; where several tests decide about one thing, their p-values are corrected by Holm (1979). Perplexities
are compared as log-likelihoods per token: each text counts by its tokens, and the change is a ratio. Texts of different
lengths are weighted as in the ratio estimator of survey sampling (Cochran 1977, section 6), which for equal ones is the
plain t-test. Knows values and samples, no tasks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Sequence

from ksana_jax.lab.runs.tasks.results import Column, Repeat, ResultRow, not_finite, ranked

LEVEL = 0.05
PER_CENT = 95  # of the intervals


@dataclasses.dataclass(frozen=True)
class Change:
    """The change of one row's number against another's.

    mean: difference; where `relative`, the ratio minus 1. low, high: its 95 % interval. p: of the hypothesis that there
    is no change. None for fewer than two pairs, and where values are not finite.
    """

    num_pairs: int
    relative: bool
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None

    def text(self, column: Column) -> str:
        """Formats it, in % or in the column's unit: "+3.2 [−1.0, +7.6]"."""
        numbers = [value for value in (self.mean, self.low, self.high) if value is not None]
        digits = 2 if max(map(abs, numbers)) < 0.01 else 1
        write = (lambda x: f"{100 * x:,.{0 if abs(x) >= 10 else digits}f}") if self.relative else column.write
        shown = [_signed(value, write) for value in numbers]
        return shown[0] if len(shown) == 1 else f"{shown[0]} [{shown[1]}, {shown[2]}]"


def _signed(value: float, write: Callable[[float], str]) -> str:
    if not math.isfinite(value):
        return not_finite(value)
    text = write(value)
    zero = not any(digit in "123456789" for digit in text)
    text = text.lstrip("+-")
    return text if zero else f"{'−' if value < 0 else '+'}{text}"


def change(row: ResultRow, base: ResultRow, key: str) -> Change | None:
    """Returns the change of a row's number against another row's; None if they have no sample in common."""
    mine, theirs = _by_sample(row, key), _by_sample(base, key)
    common = [sample for sample in mine if sample in theirs]
    if not common:
        return None
    relative = row.geometric and key in row.weights
    weights = [mine[sample][1] for sample in common]
    pairs = [(mine[sample][0], theirs[sample][0]) for sample in common]
    if relative:
        pairs = [(_log(a), _log(b)) for a, b in pairs]
    found = paired_t([difference(a, b) for a, b in pairs], weights)
    if not relative:
        return Change(len(common), relative, *found)
    return Change(len(common), relative, *(None if x is None else _ratio(x) for x in found[:3]), found[3])  # pyright: ignore


def _by_sample(row: ResultRow, key: str) -> dict[Hashable, tuple[float, float]]:
    """Returns {sample: (value, weight)}; of values that name no sample, by place."""
    values = row.values.get(key, ())
    samples = row.samples.get(key) or [Repeat(place) for place in range(len(values))]
    weights = row.weights.get(key) or [1.0] * len(values)
    return dict(zip(samples, zip(values, weights, strict=True), strict=True))


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _ratio(log: float) -> float:
    return math.expm1(log) if log < 700 else math.inf


def difference(a: float, b: float) -> float:
    """Returns a - b; 0 for two equal infinities."""
    return 0.0 if a == b else a - b


def paired_t(
    differences: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[float, float | None, float | None, float | None]:
    """Returns the weighted mean of differences, the ends of its 95 % interval, and the p-value that it is 0.

    Only the mean for fewer than two differences, and if some are not finite. Differences that are all equal have no
    deviation and no interval: p is then that of the exact test of their signs, 2 / 2^count, or 1 if they are 0.
    """
    count = len(differences)
    weights = weights or [1.0] * count
    share = [weight / math.fsum(weights) for weight in weights]
    middle = sum(w * x for w, x in zip(share, differences, strict=True))
    if count < 2 or not math.isfinite(middle):
        return middle, None, None, None
    if max(differences) == min(differences):
        return middle, None, None, 1.0 if differences[0] == 0 else 2.0 ** (1 - count)
    error = math.hypot(*(w * (x - middle) for w, x in zip(share, differences, strict=True)))
    error *= math.sqrt(count / (count - 1))
    from scipy.special import stdtr  # half a second, which most commands save

    half = half_width(count) * error
    return middle, middle - half, middle + half, float(2 * stdtr(count - 1, -abs(middle) / error))


def half_width(count: int) -> float:
    """Returns half of the width of the interval of a mean of some differences, in standard errors."""
    from scipy.special import stdtrit

    return float(stdtrit(count - 1, 0.5 + PER_CENT / 200))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Returns p-values corrected for their number (Holm 1979); those that are None are not counted."""
    order = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    least = 0.0
    for rank, (p, place) in enumerate(order):
        least = max(least, min(1.0, p * (len(order) - rank)))
        corrected[place] = least
    return corrected


def differ(pairs: Sequence[tuple[ResultRow, ResultRow]], key: str) -> list[bool]:
    """Returns for each pair of rows whether their numbers differ, tested together."""
    changes = [change(a, b, key) for a, b in pairs]
    return [p is not None and p < LEVEL for p in holm([None if c is None else c.p for c in changes])]


def tied(best: ResultRow, rows: Iterable[ResultRow], key: str) -> list[ResultRow]:
    """Returns the other rows that a row is not shown to be better or worse than."""
    others = [row for row in rows if row is not best and row.mean(key) is not None]
    return [row for row, other in zip(others, differ([(best, r) for r in others], key), strict=True) if not other]


def leaders(rows: Sequence[ResultRow], column: Column) -> list[ResultRow]:
    """Returns the rows whose numbers are set in bold: better than all others or, where variants go over a grid, than
    all others at the same point. Exact counts are compared as displayed.

    Rows with NaN, and of simulated memory, are left out.
    """
    found = (_leader(group, column) for group in (_by_point(rows) if _compete_by_point(rows) else [rows]))
    return [row for row in found if row is not None]


def _by_point(rows: Sequence[ResultRow]) -> list[list[ResultRow]]:
    groups: dict[str, list[ResultRow]] = {}
    for row in rows:
        groups.setdefault(repr(row.point), []).append(row)
    return list(groups.values())


def _compete_by_point(rows: Sequence[ResultRow]) -> bool:
    """True if several variants are at one of several points."""
    groups = _by_point(rows)
    return len(groups) > 1 and any(len(group) > 1 for group in groups)


def _leader(rows: Sequence[ResultRow], column: Column) -> ResultRow | None:
    measured = [r for r in ranked(rows) if (value := r.mean(column.key)) is not None and not math.isnan(value)]
    if column.best is None or len(measured) < 2:
        return None
    best = (min if column.best == "min" else max)(measured, key=lambda r: r.mean(column.key) or 0.0)
    if column.exact:
        texts = [column.text(r.mean(column.key) or 0.0) for r in measured if r is not best]
        return None if column.text(best.mean(column.key) or 0.0) in texts else best
    return None if tied(best, measured, column.key) else best


def notes(rows: Sequence[ResultRow], columns: Sequence[Column], samples: str, bold: bool) -> list[str]:
    """Explains changes, intervals and bold numbers.

    Args:
      columns: of the table. samples: what the samples are called, such as "texts". bold: whether a number is.
    """
    said = []
    for column in columns:
        found = [c for row in rows if (c := baseline_change(row, column.key)) is not None] if column.change else []
        if not found:
            continue
        bases = list({id(row.baseline): row.baseline for row in rows if row.baseline is not None}.values())
        against = "each row's full cache"
        if len(bases) == 1 and (value := bases[0].mean(column.key)) is not None:
            against = f"{bases[0].name} ({column.title.partition(' ')[0].rstrip(',')} {column.text(value)})"
        counts = sorted({c.num_pairs for c in found})
        count = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        said.append(f"{column.change.capitalize()}: against {against} on the same {samples}")
        said[-1] += (
            f", with the {PER_CENT} % confidence interval over {count} {samples} in brackets (paired t)."
            if counts[-1] > 1
            else f"; an interval needs two {samples} or more."
        )
    compared = [c for c in columns if c.best and not c.exact and sum(r.mean(c.key) is not None for r in rows) > 1]
    if compared and all(len(row.values.get(c.key, ())) < 2 for c in compared for row in rows):
        return [*said, "Not resolved: one run each." + " Only exact counts are bold." * bold]
    same = f" of the same {_keys(rows)}" if _compete_by_point(rows) else ""
    test = f"paired t-test, p < {LEVEL:g} after Holm's correction" + "; counts: any difference" * any(
        column.exact for column in columns
    )
    return [*said, *[f"Bold: better than every other row{same} ({test})."] * (bold and bool(compared))]


def _keys(rows: Sequence[ResultRow]) -> str:
    return " and ".join(key.rpartition(".")[2] for key in rows[0].point)


def baseline_change(row: ResultRow, key: str) -> Change | None:
    """Returns the change of a row's number against its baseline; None without one."""
    return None if row.baseline is None else change(row, row.baseline, key)


def shows_changes(rows: Sequence[ResultRow], column: Column) -> bool:
    """True if one number of a row is best shown as its change in % against a baseline."""
    return column.change.endswith("%") and any(baseline_change(row, column.key) for row in rows)


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Returns the 95 % interval of a mean of scores from 0 to 1.

    Wilson's interval (1927) for scores of 0 or 1; others vary less, so the interval is too wide for them.
    """
    z = 1.959964
    centre, spread = mean + z * z / (2 * count), z * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    return (centre - spread) / (1 + z * z / count), (centre + spread) / (1 + z * z / count)


def caveat(a: ResultRow, b: ResultRow, key: str) -> str:
    """Returns the caveat for a sentence that compares two rows; empty if they differ."""
    found = change(a, b, key)
    if found is None or found.p is None:
        return "not resolved: one run each"
    return "" if found.p < LEVEL else f"not resolved: p = {found.p:.2f}"


def others(count: int) -> str:
    """Counts other rows in words: "1 other", "2 others"."""
    return f"{count} other" + "s" * (count != 1)
