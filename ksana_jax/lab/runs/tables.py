"""Formats result rows as Markdown, CSV, LaTeX (booktabs) and terminal tables. Knows numbers, not their meaning.

Labels are user text: each format escapes markup in them, and a line break becomes a space.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ksana_jax.lab.runs.significance import baseline_change, holm, leaders, shows_changes
from ksana_jax.lab.runs.tasks.results import MISSING, Column, ResultRow, deviation, mean


class Grid(NamedTuple):
    """A table as text: heads, cells, which cells are bold, and the number of its last columns that are set to the
    right."""

    heads: list[str]
    cells: list[list[str]]
    bold: list[list[bool]]
    num_right: int


def grid(rows: Sequence[ResultRow], columns: Sequence[Column]) -> Grid:
    """Returns rows and columns as text; see `significance.leaders` for what is bold."""
    labelled = any(r.label for r in rows)
    keys = list(rows[0].point) if rows else []
    shown = _shown(rows, columns)
    heads = ["row"] * labelled + [k.rpartition(".")[2] for k in keys] + [title for title, _, _ in shown]
    cells, bold = [], []
    for row in rows:
        left = [row.label] * labelled + [MISSING if row.point[k] is None else str(row.point[k]) for k in keys]
        cells.append([_line(text) for text in left] + [cell(row) for _, cell, _ in shown])
        bold.append([False] * len(left) + [any(row is best for best in leading) for _, _, leading in shown])
    return Grid(heads, cells, bold, len(shown))


def _shown(
    rows: Sequence[ResultRow], columns: Sequence[Column]
) -> list[tuple[str, Callable[[ResultRow], str], list[ResultRow]]]:
    """Returns for each column as shown its title, the text of a row's cell, and the rows in bold."""
    shown = []
    for column in columns:
        shown.append((column.title, functools.partial(number_text, column=column), leaders(rows, column)))
        if column.change and (changed := [row for row in rows if row.baseline is not None]):
            shown.append((column.change, functools.partial(change_text, column=column), leaders(changed, column)))
    return shown


def number_text(row: ResultRow, column: Column) -> str:
    """Formats a row's number: its mean, ± the standard deviation over trials where it has one."""
    if column.key in row.weights and (middle := row.mean(column.key)) is not None:
        return column.text(middle)
    return with_deviation(row.values.get(column.key, ()), column)


def change_text(row: ResultRow, column: Column) -> str:
    """Formats the change of a row's number against its baseline, with its interval."""
    found = baseline_change(row, column.key)
    return MISSING if found is None else found.text(column)


def pivoted(rows: Sequence[ResultRow], column: Column, key: str) -> Grid:
    """Returns the table of one number, with a column for each value of a key of the grid.

    A cell is the change in % against the baseline where there is one, and the number otherwise. Rows outside the grid
    have a cell in the column of the value that their settings give, or without one the same cell in all columns.
    """
    changes = shows_changes(rows, column)
    shown = [row for row in rows if not changes or row.baseline is not None]
    values = list(dict.fromkeys(row.point[key] for row in shown if row.point[key] is not None))
    others = [k for k in (shown[0].point if shown else ()) if k != key]
    heads = ["row", *(k.rpartition(".")[2] for k in others), *(f"{key.rpartition('.')[2]} {value}" for value in values)]
    best = {id(row) for row in leaders(shown, column)}
    lines: dict[tuple[str, ...], dict[Any, ResultRow]] = {}
    for row in shown:
        name = (row.label, *(MISSING if row.point[k] is None else str(row.point[k]) for k in others))
        lines.setdefault(name, {})[row.value(key)] = row
    cells, bold = [], []
    for name, found in lines.items():
        row_of = [found.get(value, found.get(None)) for value in values]
        text = change_text if changes else number_text
        cells.append([*map(_line, name), *(MISSING if row is None else text(row, column) for row in row_of)])
        bold.append([False] * len(name) + [id(row) in best for row in row_of])
    return Grid(heads, cells, bold, len(values))


def _line(text: str) -> str:
    return " ".join(text.split())


def with_deviation(values: Sequence[float], column: Column) -> str:
    """Formats mean ± standard deviation of a column's values; a dash if there are none. A mean that is not finite has
    no deviation."""
    if not values:
        return MISSING
    shown = column.text(middle := mean(values))
    if len(values) == 1 or not math.isfinite(middle):
        return shown
    sd = deviation(values)
    return shown if column.exact and sd == 0 else f"{shown} ± {column.text(sd)}"


def markdown(
    title: str,
    heads: Sequence[str],
    cells: Sequence[Sequence[str]],
    bold: Sequence[Sequence[bool]],
    num_right: int,
    notes: Sequence[str],
) -> str:
    """Returns a table of texts; its last num_right columns are set to the right."""
    num_left = len(heads) - num_right
    lines = [f"## {_line(title)}", ""] if title else []
    lines += ["| " + " | ".join(head.replace("|", "\\|") for head in heads) + " |"]
    lines += ["|" + "|".join([" --- "] * num_left + [" ---: "] * num_right) + "|"]
    for texts, bolds in zip(cells, bold, strict=True):
        marked = [f"**{t}**" if b else t.replace("|", "\\|") for t, b in zip(texts, bolds, strict=True)]
        lines.append("| " + " | ".join(marked) + " |")
    return "\n".join([*lines, "", *(f"{_line(note)}  " for note in notes)]).rstrip() + "\n"


def latex(title: str, made: Grid, notes: Sequence[str], name: str = "", head: str = "row") -> str:
    """Returns a LaTeX table environment, which needs only the booktabs package and LaTeX of 2020 or later.

    Intervals are small. They stand below their numbers, or the table spans two columns of a page, if it is too wide.

    Args:
      name: name of the run; \\ref{tab:NAME} refers to the table. head: what the rows are.
    """
    heads, cells, bold, num_right = made
    num_left = len(heads) - num_right
    fitting = [(k, s) for k, chars in _WIDTHS.items() for s in (False, True) if _width(made, s) <= chars]
    kind, stacked = (fitting or [("table*", True)])[0]
    lines = [r"% \usepackage{booktabs}", rf"\begin{{{kind}}}", r"\centering", r"\small", r"\setlength{\tabcolsep}{3pt}"]
    lines += [rf"\begin{{tabular}}{{@{{}}{'l' * num_left}{'r' * num_right}@{{}}}}", r"\toprule"]
    lines += [" & ".join(_tex(head if h == "row" else h) for h in heads) + r" \\", r"\midrule"]
    for texts, bolds in zip(cells, bold, strict=True):
        split = [text.partition(" [") if at >= num_left else (text, "", "") for at, text in enumerate(texts)]
        small = [rf" {{\scriptsize [{_tex(interval)}}}" if opening else "" for _, opening, interval in split]
        shown = [_tex(number) + part * (not stacked) for (number, _, _), part in zip(split, small, strict=True)]
        marked = [rf"\textbf{{{text}}}" if b else text for text, b in zip(shown, bolds, strict=True)]
        lines.append(" & ".join(marked) + r" \\")
        lines += [" &".join(small) + r" \\[2pt]"] * (stacked and any(small))
    caption = " ".join([title.rstrip(".") + "."] * bool(title) + list(notes))
    lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{_tex(_line(caption))}}}"]
    # Characters that \label cannot contain, such as # and spaces, become hyphens.
    lines += [rf"\label{{tab:{re.sub(r'[^A-Za-z0-9_.:+-]+', '-', name)}}}"] * bool(name) + [rf"\end{{{kind}}}"]
    lines[1:1] = [macro for name, macro in _DEFINED.items() if any(name in line for line in lines)]
    return "\n".join(lines) + "\n"


# Characters of \small in a column of 3.25 inches, and in two of them.
_WIDTHS = {"table": 50, "table*": 105}


def _width(made: Grid, stacked: bool) -> float:
    """Returns the width of a table in characters of \\small. stacked: whether intervals stand below numbers."""

    def width(text: str, at: int) -> float:
        number, _, interval = text.partition(" [") if at >= len(made.heads) - made.num_right else (text, "", "")
        return (max if stacked else lambda *both: sum(both))(len(number), 0.8 * len(interval))

    columns = [max(width(line[at], at) for line in (made.heads, *made.cells)) for at in range(len(made.heads))]
    return sum(columns) + 1.3 * (len(columns) - 1)


_TEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\texttt{\char34}",
    "`": r"\textasciigrave{}",
    "—": "---",
    "–": "--",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "→": r"$\to$",
    "←": r"$\leftarrow$",
    "≈": r"$\approx$",
    "∞": r"$\infty$",
    "−": "$-$",
    "·": r"$\cdot$",
    "…": r"\ldots{}",
    "µ": r"$\mu$",
    "\N{NO-BREAK SPACE}": "~",
}


# Letters that are in T1 fonts but not in OT1, the default of pdfLaTeX; its kernel declares both encodings.
_ONLY_IN_T1 = re.compile("[«»ÐÞðþĄąĐđĘęĮįŊŋŲų]+")
# Characters that pdfLaTeX lacks without further packages.
_LACKING = re.compile("[^ -~¡-ĥĨ-ķĹ-ľŁ-ňŊ-ťŨ-ž‘’“”†‡•€]+")
# Macros by name; \Umathchar is defined by XeLaTeX and LuaLaTeX.
_DEFINED = {
    r"\latinletters": r"\providecommand{\latinletters}[1]"
    r"{\ifdefined\Umathchar#1\else{\fontencoding{T1}\selectfont#1}\fi}",
    r"\otherscript": "% Other scripts need XeLaTeX or LuaLaTeX with a font that has them; pdfLaTeX shows their codes.\n"
    r"\providecommand{\otherscript}[2]{\ifdefined\Umathchar#1\else\texttt{#2}\fi}",
}


def _tex(text: str) -> str:
    text = unicodedata.normalize("NFC", text)  # pdfLaTeX has é, but no combining accent
    parts = [_TEX.get(char, char) for char in text]
    # Doubled, these characters are ligatures: -- is a dash, '' a closing quote.
    shown = "".join(
        part + r"\kern0pt" * (part[-1] in "-'," and part[-1] == after[0])
        for part, after in zip(parts, [*parts[1:], " "], strict=False)
    )
    shown = _ONLY_IN_T1.sub(r"\\latinletters{\g<0>}", _LACKING.sub(_other_script, shown))
    return "{}" * shown.startswith(("[", "*")) + shown  # after \\ and rules, these begin an argument


def _other_script(found: re.Match[str]) -> str:
    shown = re.sub("[\x00-\x1f\x7f-\x9f\ufffd-\uffff]", "", found[0])  # which end a run of some LaTeX
    return rf"\otherscript{{{shown}}}{{{' '.join(f'U+{ord(char):04X}' for char in found[0])}}}"


def csv_text(value: Any) -> Any:
    """Returns a value for a CSV file: text on one line, with an apostrophe before text that is like a formula.

    That is text that begins with = + - or @ (OWASP, "CSV Injection"). Numbers stay numbers.
    """
    if not isinstance(value, str):
        return value
    text = _line(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def comma_separated(rows: Sequence[ResultRow], columns: Sequence[Column]) -> str:
    """Returns CSV in full precision: label, grid, then mean and standard deviation of every summary key, shown or not.

    A key with a column of changes has its change, the ends of its 95 % interval, and its p-value after Holm's
    correction over the rows: KEY_change, KEY_low, KEY_high, KEY_p. Changes of perplexity are ratios minus 1.
    Labels and grid values that look like formulas are quoted; see `csv_text`.
    """
    shown = [c.key for c in columns]
    keys = shown + sorted({k for r in rows for k in r.values} - set(shown))
    points = list(rows[0].point) if rows else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    changed = {c.key: _changes(rows, c.key) for c in columns if c.change}
    heads = [(k, f"{k}_sd", *(f"{k}_{name}" for name in ("change", "low", "high", "p") if k in changed)) for k in keys]
    writer.writerow(["row", *points, "seeds", *itertools.chain(*heads)])
    for place, row in enumerate(rows):
        numbers = [v for k in keys for v in (row.mean(k), row.sd(k), *(changed[k][place] if k in changed else ()))]
        left = [csv_text(value) for value in (row.label, *row.point.values())]
        writer.writerow([*left, len(row.trials), *("" if v is None else repr(v) for v in numbers)])
    return text.getvalue()


def _changes(rows: Sequence[ResultRow], key: str) -> list[tuple[float | None, ...]]:
    """Returns for each row the change against its baseline, its interval, and p after Holm's correction."""
    found = [baseline_change(row, key) for row in rows]
    ps = holm([None if c is None else c.p for c in found])
    return [(None,) * 4 if c is None else (c.mean, c.low, c.high, p) for c, p in zip(found, ps, strict=True)]


def terminal(heads: Sequence[str], cells: Sequence[Sequence[str]], bold: Sequence[Sequence[bool]], num_right: int):
    """Returns a table of texts for a rich console; heads are split over two lines if possible."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(escape(head.replace(" ", "\n", 1)), justify="left" if i < len(heads) - num_right else "right")
    for texts, bolds in zip(cells, bold, strict=True):
        table.add_row(*(f"[bold]{escape(t)}[/bold]" if b else escape(t) for t, b in zip(texts, bolds, strict=True)))
    return table
