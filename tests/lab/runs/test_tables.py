"""Tables as text: bold for the best, a dash for missing values, nothing that breaks LaTeX."""

import csv
import dataclasses
import io
import re
import shutil
import subprocess

import pytest
from matplotlib.text import Text

from ksana_jax.lab.runs import figures, significance, tables
from ksana_jax.lab.runs.report import kind_of
from ksana_jax.lab.runs.tasks import change_figure
from ksana_jax.lab.runs.tasks.base import Column, ResultRow, number

COLUMNS = [Column("a", "A_1 %", number(1), "min"), Column("b", "B", number(0), "max", exact=True)]


def rows():
    return [
        ResultRow("x & y", {"pattern.window": None}, 3, [[], []], {"a": [1.0, 1.1, 1.2], "b": [1000.0, 1000.0]}),
        ResultRow("z|w", {"pattern.window": 8}, 3, [[]], {"a": [3.0, 3.2, 3.4]}),
        ResultRow("v", {"pattern.window": 9}, 3, [[]], {"a": [1.6, 1.7, 1.9], "b": [2000.0]}),
    ]


def test_markdown_marks_the_best_and_the_missing():
    assert tables.markdown("T", *tables.grid(rows(), COLUMNS), ["One note."]).splitlines() == [
        "## T",
        "",
        "| row | window | A_1 % | B |",
        "| --- | --- | ---: | ---: |",
        "| x & y | — | **1.1 ± 0.1** | 1,000 |",
        "| z\\|w | 8 | 3.2 ± 0.2 | — |",
        "| v | 9 | 1.7 ± 0.2 | **2,000** |",
        "",
        "One note.",
    ]


def test_latex_escapes_and_uses_booktabs():
    text = tables.latex("T_1", tables.grid(rows(), COLUMNS), ["50 % – best."])
    assert r"\toprule" in text and r"\midrule" in text and r"\bottomrule" in text
    assert r"x \& y & --- & \textbf{1.1 $\pm$ 0.1} & 1,000 \\" in text
    assert r"row & window & A\_1 \% & B \\" in text
    assert r"\caption{T\_1. 50 \% -- best.}" in text
    assert text.isascii()


def test_latex_shows_other_scripts_where_it_can_and_codes_where_it_cannot():
    row = ResultRow("窓 é Ж🚀\x07", {}, 1, (), {})
    text = tables.latex("“T” 日本", tables.grid([row], COLUMNS), [])
    assert r"\otherscript{窓}{U+7A93} é \otherscript{Ж🚀}{U+0416 U+1F680 U+0007} & " in text
    assert r"\caption{“T” \otherscript{日本}{U+65E5 U+672C}.}" in text
    definition = r"\providecommand{\otherscript}[2]{\ifdefined\Umathchar#1\else\texttt{#2}\fi}"
    assert text.count(definition) == 1 and text.index(definition) < text.index(r"\begin{table}")
    assert "otherscript" not in tables.latex("T", tables.grid([ResultRow("é", {}, 1, (), {})], COLUMNS), [])


def test_latex_has_a_label_and_no_character_that_pdflatex_lacks():
    row = ResultRow("8 → 4 ≈ ∞ …", {}, 1, [[]], {"a": [1.0]})
    text = tables.latex("T", tables.grid([row], COLUMNS), ["x · y"], "my run #2")
    assert r"8 $\to$ 4 $\approx$ $\infty$ \ldots{}" in text and r"x $\cdot$ y" in text
    assert r"\label{tab:my-run-2}" in text
    assert text.isascii()
    # A label after its caption has the table's number.
    assert text.index(r"\caption") < text.index(r"\label") < text.index(r"\end{table}")
    assert r"\label" not in tables.latex("", tables.grid([row], COLUMNS), [])


HOSTILE = ["a | b\nc", "$\\frac{1}{$ x", "=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "a\n\n\\input{/etc/passwd}"]
LABELS = {
    "[0, 1]": "{}[0, 1]",
    "*full [x]": "{}*full [x]",
    "<eos> | >= 2": r"\textless{}eos\textgreater{} \textbar{} \textgreater{}= 2",
    '"x" `y`': r"\texttt{\char34}x\texttt{\char34} \textasciigrave{}y\textasciigrave{}",
    "--kv ,,a": r"-\kern0pt-kv ,\kern0pt,a",
    "-–": r"-\kern0pt--",
    "cafe\N{COMBINING ACUTE ACCENT}": "café",
    "«ą» ħ": r"\latinletters{«ą»} \otherscript{ħ}{U+0127}",
}
LATIN = [chr(code) for code in range(0xA0, 0x180)]


def test_latex_shows_what_would_be_a_command_a_ligature_or_another_glyph():
    rows = [ResultRow(label, {}, 1, (), {}) for label in LABELS]
    text = tables.latex("", tables.grid(rows, [Column("a", "<b>", number(1))]), [])
    lines = text.splitlines()
    first = lines.index(r"\midrule") + 1
    assert [line.partition(" & ")[0] for line in lines[first : first + len(LABELS)]] == list(LABELS.values())
    assert r"row & \textless{}b\textgreater{} \\" in lines
    assert text.count(r"\providecommand{\latinletters}") == text.count(r"\providecommand{\otherscript}") == 1


def set_by_latex(folder, labels: list[str], *options: str) -> None:
    """Sets two tables of some labels, as rows, heads, notes and titles, and their list; an error of LaTeX raises."""
    made = [ResultRow(label, {"settings.x": label}, 1, (), {"a": [1.0]}) for label in labels]
    for name in "ab":
        columns = [Column("a", labels[0] + labels[-1], number(1), "min"), *COLUMNS]
        text = tables.latex(" ".join(labels), tables.grid(made, columns), labels, name)
        (folder / f"{name}.tex").write_text(text, "utf-8")
    (folder / "paper.tex").write_text(
        r"\documentclass{article}\usepackage{booktabs}\begin{document}\input{a}\clearpage\input{b}\listoftables"
        r"\end{document}"
    )
    for _ in range(2):  # the second time with a list of tables
        command = ["pdflatex", "-halt-on-error", *options, "paper.tex"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
        assert not done.returncode, done.stdout[-2000:]


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs pdflatex")
@pytest.mark.parametrize("labels", [LATIN, [char * 2 for char in LATIN], [f"[{char}" for char in LATIN]])
def test_pdflatex_sets_all_latin_letters_and_symbols(labels, tmp_path):
    for first in range(0, len(labels), 40):
        set_by_latex(tmp_path, labels[first : first + 40], "-draftmode")


@pytest.mark.skipif(not (shutil.which("pdflatex") and shutil.which("pdftotext")), reason="needs pdflatex, pdftotext")
def test_pdflatex_shows_labels_as_they_are(tmp_path):
    labels = [label for label in [*LABELS, *HOSTILE, "\\\\[1em]", "\\midrule", "{}"] if label.isascii()]
    set_by_latex(tmp_path, labels)
    shown = subprocess.run(["pdftotext", "paper.pdf", "-"], cwd=tmp_path, capture_output=True, text=True).stdout
    titles = [" ".join(" ".join(labels).split()), *labels]
    for text in ["".join(text.split()) for text in titles]:
        assert "".join(shown.split()).count(text) >= 2, text


def test_csv_has_means_deviations_and_counts():
    lines = tables.comma_separated(rows(), COLUMNS).splitlines()
    assert lines[0] == "row,pattern.window,seeds,a,a_sd,b,b_sd"
    assert lines[1].startswith("x & y,,2,1.0999999999999999,0.0999") and lines[1].endswith(",1000.0,0.0")
    assert lines[2].startswith("z|w,8,1,3.1999999999999997,0.19") and lines[2].endswith(",,")


def test_a_column_where_all_agree_has_no_best():
    same = [ResultRow("a", {}, 1, [[]], {"a": [1.0]}), ResultRow("b", {}, 1, [[]], {"a": [1.0]})]
    assert "**" not in tables.markdown("", *tables.grid(same, COLUMNS), [])


def test_a_table_without_rows_is_empty_rather_than_an_error():
    assert tables.markdown("", *tables.grid([], COLUMNS), []).splitlines()[0] == "| A_1 % | B |"
    assert tables.comma_separated([], COLUMNS)


@pytest.fixture
def hostile():
    return [ResultRow(label, {"settings.x": label}, 1, [[]], {"a": [-1.0]}) for label in HOSTILE]


def test_a_label_stays_in_its_cell_of_every_table(hostile):
    markdown = tables.markdown("two\nlines", *tables.grid(hostile, COLUMNS), ["a\nnote"]).splitlines()
    assert markdown[0] == "## two lines"
    assert len(markdown) == 2 + 2 + len(HOSTILE) + 2
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 5 for line in markdown[2 : 4 + len(HOSTILE)])
    latex = tables.latex("two\n\nlines", tables.grid(hostile, COLUMNS), ["a\n\nnote"])
    assert "\n\n" not in latex and r"\input" not in latex and r"\$\textbackslash{}frac\{1\}\{\$ x" in latex


def test_a_label_in_csv_is_no_formula_and_a_number_stays_a_number(hostile):
    lines = tables.comma_separated(hostile, COLUMNS).splitlines()
    for label, cells in zip(HOSTILE, csv.reader(lines[1:]), strict=True):
        line = " ".join(label.split())
        assert cells[0] == cells[1] == (f"'{line}" if line[0] in "=+-@" else line)
        assert cells[3] == "-1.0"
    (numbers,) = tables.comma_separated([ResultRow("", {"settings.x": -1}, 1, [[]], {})], COLUMNS).splitlines()[1:]
    assert numbers.startswith(",-1,")


@pytest.mark.parametrize("label", [label for label in HOSTILE if label[0] not in "\t\r"])  # no font draws those
def test_a_label_is_drawn_as_it_is(label):
    def draw(figure):
        axes = figure.subplots()
        axes.bar([label], [1], label=label)
        axes.set_title(label)
        figure.legend()
        drawn.extend(text for text in figure.findobj(Text) if text.get_text() == label)

    drawn = []
    assert figures.render(draw, 2)["pdf"].startswith(b"%PDF")
    assert drawn and not any(text.get_parse_math() for text in drawn)


LOSS = Column("a", "ppl", number(2), "min", change="loss, %")


def budgets() -> list[ResultRow]:
    """Two methods at two budgets and a row outside the grid, against the full cache."""

    def row(label, budget, *values, baseline=None):
        given = {"samples": {"a": "xyz"}, "weights": {"a": [9.0, 9.0, 9.0]}, "geometric": True, "baseline": baseline}
        return ResultRow(label, {"kv.budget": budget}, 3, [[]], {"a": values}, **given)

    full = row("full", None, 2.0, 4.0, 8.0)
    rows = [
        row(label, b, 2.0 + 2 * x / b, 4.1 + x / b, 8.2 + x / b) for label, x in (("A", 1), ("B", 9)) for b in (2, 4)
    ]
    return [full, *(dataclasses.replace(r, baseline=full) for r in [*rows, row("int8", None, 2.01, 4.0, 8.0)])]


def test_a_pivot_has_a_column_for_each_value_of_the_key():
    made = tables.pivoted(budgets(), LOSS, "kv.budget")
    assert made.heads == ["row", "budget 2", "budget 4"] and made.num_right == 2
    assert [line[0] for line in made.cells] == ["A", "B", "int8"]
    first, _, outside = made.cells
    assert first[1].startswith("+23.3 [") and outside[1] == outside[2] == "+0.17 [−0.55, +0.89]"
    # Without a baseline, the numbers themselves.
    plain = [dataclasses.replace(row, baseline=None) for row in budgets()]
    assert tables.pivoted(plain, LOSS, "kv.budget").cells[0] == ["full", "4.00", "4.00"]
    # Three columns fit a column of the page with their intervals below; more take the page.
    beside, below = r"+23.3 {\scriptsize [", r" & {\scriptsize ["
    for more, kind, expected in (([], "table", beside), (["c"], "table", below), (["c", "d"], "table*", beside)):
        count = len(more) + 2
        wide = tables.Grid([*made.heads, *more], *([[*r, *r[1:]][: count + 1] for r in x] for x in made[1:3]), count)
        assert rf"\begin{{{kind}}}" in (text := tables.latex("", wide, [])) and expected in text
    cells = [["sinks + window", *["+12.3 [+10.1, +14.5]"] * 3]] * 3
    text = tables.latex("", tables.Grid(["row", *"abc"], cells, [[False] * 4] * 3, 3), [], head="method")
    assert r"\begin{table}" in text and r"method & a & b & c \\" in text


def test_the_head_of_labels_says_what_differs_between_rows():
    def named(**engine):
        return ResultRow("x", {}, 1, (), {}, config={"engine": engine, "model": "a"})

    assert kind_of([named(), named(kv_eviction={"method": "h2o"}, kv_cache_dtype="int8")]) == "method"
    assert kind_of([named(), named(kv_cache_dtype="int8")]) == "codec" and kind_of([named(), named()]) == "variant"


def test_csv_has_changes_intervals_and_corrected_p_values():
    lines = list(csv.DictReader(io.StringIO(tables.comma_separated(budgets(), [LOSS]))))
    assert [bool(line["a_change"]) for line in lines] == [False] + [True] * 5
    single = significance.baseline_change(budgets()[5], "a").p
    assert float(lines[5]["a_low"]) < float(lines[5]["a_change"]) < float(lines[5]["a_high"])
    assert float(lines[5]["a_p"]) >= single


def test_losses_are_drawn_as_labelled_lines_or_points_with_intervals():
    def drawn(draw, rows):
        kept = []
        figures.render(lambda figure: (draw(figure, rows, LOSS), kept.append(figure)), 3.9)
        (axes,) = kept[0].axes
        return axes

    axes = drawn(change_figure.draw_lines, [r for r in budgets() if r.point["kv.budget"]])
    labels = {text.get_text() for text in axes.texts}
    assert labels == {"A", "B"} and axes.get_xlabel() == "KV budget (tokens)"
    assert axes.get_ylabel() == "loss, %, logarithmic" and len(axes.containers) == 2
    many = [dataclasses.replace(r, label=f"{r.label}{i}") for i in range(5) for r in budgets() if r.point["kv.budget"]]
    axes = drawn(change_figure.draw_lines, many)
    assert len(axes.texts) == len(axes.containers) == change_figure.MAX_LABELS
    held = [
        dataclasses.replace(r, values={**r.values, "live_kv_bytes": [64.0 * i]}) for i, r in enumerate(budgets(), 1)
    ]
    held = [dataclasses.replace(r, baseline=r.baseline and held[0]) for r in held]
    axes = drawn(change_figure.draw_points, held)
    assert [text.get_text() for text in axes.texts] == [row.name for row in held[1:]]


def test_labels_that_overlap_stand_above_each_other_in_order():
    assert figures.stacked([(0, 0, 9), (0, 20, 9)]) == [0, 20]
    assert figures.stacked([(0, 1, 9), (0, 0, 9), (0, 2, 9), (5, 2, 9), (20, 1, 9)]) == [7, 0, 14, 21, 1]
