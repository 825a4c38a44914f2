"""Formats result rows as Markdown, CSV, LaTeX (booktabs) and terminal tables. Knows numbers, not their meaning.

Labels are user text: each format escapes markup in them, and a line break becomes a space.
"""

from __future__ import annotations

import csv
import io
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from ksana_jax.lab.runs import noise
from ksana_jax.lab.runs.tasks.results import MISSING, Column, ResultRow, deviation, mean


def grid(rows: Sequence[ResultRow], columns: Sequence[Column]) -> tuple[list[str], list[list[str]], list[list[bool]]]:
    """Returns the table as text: heads, cells, and which cells are best beyond the noise; see `noise.leaders`."""
    labelled = any(r.label for r in rows)
    keys = list(rows[0].point) if rows else []
    heads = ["row"] * labelled + [k.rpartition(".")[2] for k in keys] + [c.title for c in columns]
    cells, bold = [], []
    leading = [{id(row) for row in noise.leaders(rows, column)} for column in columns]
    for row in rows:
        left = [row.label] * labelled + [MISSING if row.point[k] is None else str(row.point[k]) for k in keys]
        left = [_line(text) for text in left]
        cells.append(left + [with_deviation(row.values.get(c.key, ()), c) for c in columns])
        bold.append([False] * len(left) + [id(row) in best for best in leading])
    return heads, cells, bold


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


def markdown(title: str, rows: Sequence[ResultRow], columns: Sequence[Column], notes: Sequence[str]) -> str:
    return markdown_grid(title, *grid(rows, columns), len(columns), notes)


def markdown_grid(
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


def latex(
    title: str, rows: Sequence[ResultRow], columns: Sequence[Column], notes: Sequence[str], name: str = ""
) -> str:
    """Returns a LaTeX table environment, which needs only the booktabs package and LaTeX of 2020 or later.

    Args:
      name: name of the run; \\ref{tab:NAME} refers to the table.
    """
    heads, cells, bold = grid(rows, columns)
    num_left = len(heads) - len(columns)
    lines = [r"% \usepackage{booktabs}", r"\begin{table}", r"\centering", r"\small"]
    lines += [rf"\begin{{tabular}}{{{'l' * num_left}{'r' * len(columns)}}}", r"\toprule"]
    lines += [" & ".join(_tex(h) for h in heads) + r" \\", r"\midrule"]
    for texts, bolds in zip(cells, bold, strict=True):
        marked = [rf"\textbf{{{_tex(t)}}}" if b else _tex(t) for t, b in zip(texts, bolds, strict=True)]
        lines.append(" & ".join(marked) + r" \\")
    caption = " ".join([title.rstrip(".") + "."] * bool(title) + list(notes))
    lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{_tex(_line(caption))}}}"]
    # Characters that \label cannot contain, such as # and spaces, become hyphens.
    lines += [rf"\label{{tab:{re.sub(r'[^A-Za-z0-9_.:+-]+', '-', name)}}}"] * bool(name) + [r"\end{table}"]
    lines[1:1] = [macro for name, macro in _DEFINED.items() if any(name in line for line in lines)]
    return "\n".join(lines) + "\n"


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

    Labels and grid values that look like formulas are quoted; see `csv_text`.
    """
    shown = [c.key for c in columns]
    keys = shown + sorted({k for r in rows for k in r.values} - set(shown))
    points = list(rows[0].point) if rows else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", *points, "seeds", *(name for k in keys for name in (k, f"{k}_sd"))])
    for row in rows:
        numbers = [v for k in keys for v in (row.mean(k), row.sd(k))]
        left = [csv_text(value) for value in (row.label, *row.point.values())]
        writer.writerow([*left, len(row.trials), *("" if v is None else repr(v) for v in numbers)])
    return text.getvalue()


def terminal(rows: Sequence[ResultRow], columns: Sequence[Column]):
    """Returns the table for a rich console; heads are split over two lines if possible."""
    return terminal_grid(*grid(rows, columns), len(columns))


def terminal_grid(heads: Sequence[str], cells: Sequence[Sequence[str]], bold: Sequence[Sequence[bool]], num_right: int):
    """Does `terminal` for a table of texts, whose last num_right columns are set to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(escape(head.replace(" ", "\n", 1)), justify="left" if i < len(heads) - num_right else "right")
    for texts, bolds in zip(cells, bold, strict=True):
        table.add_row(*(f"[bold]{escape(t)}[/bold]" if b else escape(t) for t, b in zip(texts, bolds, strict=True)))
    return table
