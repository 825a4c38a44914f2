"""Tables as text: bold for the best, a dash for what is missing, nothing that LaTeX would stumble over."""

from experiments import tables
from experiments.tasks.base import Column, ResultRow, number

COLUMNS = [Column("a", "A_1 %", number(1), "min"), Column("b", "B", number(0), "max")]


def rows():
    return [
        ResultRow("x & y", {"pattern.window": None}, 2, [[], []], {"a": [1.0, 2.0], "b": [1000.0]}),
        ResultRow("z|w", {"pattern.window": 8}, 2, [[]], {"a": [3.0]}),
        ResultRow("v", {"pattern.window": 9}, 2, [[]], {"a": [1.5], "b": [2000.0]}),
    ]


def test_markdown_marks_the_best_and_the_missing():
    assert tables.markdown("T", rows(), COLUMNS, ["One note."]).splitlines() == [
        "## T",
        "",
        "| row | window | A_1 % | B |",
        "| --- | --- | ---: | ---: |",
        "| x & y | — | **1.5 ± 0.7** | 1,000 |",
        "| z\\|w | 8 | 3.0 | — |",
        "| v | 9 | **1.5** | **2,000** |",
        "",
        "One note.",
    ]


def test_latex_escapes_and_uses_booktabs():
    text = tables.latex("T_1", rows(), COLUMNS, ["50 % – best."])
    assert r"\toprule" in text and r"\midrule" in text and r"\bottomrule" in text
    assert r"x \& y & --- & \textbf{1.5 $\pm$ 0.7} & 1,000 \\" in text
    assert r"row & window & A\_1 \% & B \\" in text
    assert r"\caption{T\_1. 50 \% -- best.}" in text
    assert text.isascii()


def test_csv_has_means_deviations_and_counts():
    lines = tables.comma_separated(rows(), COLUMNS).splitlines()
    assert lines[0] == "row,pattern.window,seeds,a,a_sd,b,b_sd"
    assert lines[1] == "x & y,,2,1.5,0.7071067811865476,1000.0,"
    assert lines[2] == "z|w,8,1,3.0,,,"


def test_a_column_where_all_agree_has_no_best():
    same = [ResultRow("a", {}, 1, [[]], {"a": [1.0]}), ResultRow("b", {}, 1, [[]], {"a": [1.0]})]
    assert "**" not in tables.markdown("", same, COLUMNS, [])


def test_a_table_without_rows_is_empty_rather_than_an_error():
    assert tables.markdown("", [], COLUMNS, []).splitlines()[0] == "| A_1 % | B |"
    assert tables.comma_separated([], COLUMNS)
