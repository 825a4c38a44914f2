"""The style of figures: lines that differ, units of bytes, axes that fit what is drawn."""

import logging

from matplotlib import font_manager
from matplotlib.figure import Figure

from ksana_jax.lab.runs import figure_fonts, figures
from ksana_jax.lab.runs.tasks.results import Column, ResultRow, kib, number, percent
from ksana_jax.lab.runs.tasks.row_figure import draw_columns


def test_the_first_lines_have_colours_of_their_own_and_none_of_36_is_like_another():
    styles = [figures.line_style(index) for index in range(36)]
    assert len({style["color"] for style in styles[:9]}) == 9
    assert len({tuple(style.items()) for style in styles}) == 36


def test_bytes_have_four_digits_at_most_before_the_next_unit():
    assert figures.byte_unit(0) == figures.byte_unit(8 * 2**20 - 1) == (2**10, "KiB")
    assert figures.byte_unit(8 * 2**20) == (2**20, "MiB")


def test_a_logarithmic_axis_without_a_positive_value_becomes_linear():
    above, below = Figure().subplots(2)
    for axes, y in ((above, [1.0, 2.0]), (below, [float("inf")] * 2)):
        axes.plot([1, 2], y)
        axes.set_yscale("log")
    figures.finish(above.figure)
    assert (above.get_yscale(), below.get_yscale()) == ("log", "linear")


def labelled(axes) -> None:
    axes.plot([1, 2], [1, 2], label="日本 é")
    axes.set_title("窓\n日")
    axes.set_yticks([1, 2], ["字", "plain"])
    axes.legend()


def with_fonts(monkeypatch, *names: str) -> None:
    found = [entry for entry in font_manager.fontManager.ttflist if entry.name in names]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", found)


def test_characters_without_a_font_are_shown_as_codes(caplog, monkeypatch):
    with_fonts(monkeypatch, "DejaVu Sans")
    labelled(axes := Figure(layout="constrained").subplots())
    with caplog.at_level(logging.WARNING):
        assert not figure_fonts.fit(axes.figure)
    assert "no installed font has 字 日 本 窓: the figure shows codes" in caplog.text
    axes.figure.draw_without_rendering()  # would warn of glyphs that are missing
    assert axes.get_title() == r"\u7a93" + "\n" + r"\u65e5"
    assert [text.get_text() for text in axes.get_yticklabels()] == [r"\u5b57", "plain"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [r"\u65e5\u672c é"]


def test_an_installed_font_that_has_a_character_is_used(monkeypatch):
    with_fonts(monkeypatch, "DejaVu Sans", "STIXGeneral")  # of matplotlib too, in the place of an installed one
    axes = Figure().subplots()
    axes.set_title("x \u1d8a")
    assert figure_fonts.fit(axes.figure) and axes.get_title() == "x \u1d8a"
    assert axes.title.get_fontfamily() == ["DejaVu Sans", "STIXGeneral"]


def test_a_figure_that_matplotlibs_own_font_can_write_is_left_alone():
    axes = Figure().subplots()
    axes.set_title("é Ж −1")
    before = axes.title.get_fontfamily()
    assert not figure_fonts.fit(axes.figure) and axes.title.get_fontfamily() == before


def test_bars_are_as_long_as_the_table_says():
    columns = [
        Column("share", "share, %", percent(), "max"),
        Column("bytes", "KV, KiB", kib, "min"),
        Column("ppl", "ppl", number(2), "min"),
    ]
    values = {"share": [0.25, 0.75], "bytes": [2048.0], "ppl": [9.5]}
    figure = Figure()
    draw_columns(figure, [ResultRow("row", {}, 2, [[{}], [{}]], values)], columns)
    assert [axes.patches[0].get_width() for axes in figure.axes] == [50.0, 2.0, 9.5]
    assert [axes.get_xlabel() for axes in figure.axes] == ["share, %", "KV, KiB", "ppl"]


def test_long_labels_take_fewer_columns_and_many_make_the_figure_taller():
    def drawn(label: str, count: int) -> tuple[int, float]:
        axes = Figure(figsize=(figures.COLUMN_INCHES, 2), layout="constrained").subplots()
        for nth in range(count):
            axes.plot([1, 2], label=f"{label} {nth}")
        figures.legend(axes.figure, axes)
        [made] = axes.figure.legends
        assert made.get_window_extent().width <= axes.figure.bbox.width
        return made._ncols, axes.figure.get_figheight()

    assert drawn("short", 8) == (2, 2)
    assert drawn("about the half of a column", 3) == (1, 2)
    columns, height = drawn("short", 20)
    assert columns == 2 and height > 2.5


def test_a_legend_has_the_labels_of_a_user_that_begin_with_an_underscore():
    axes = Figure().subplots()
    named = ["_baseline", "__init__ window", "_childlike", "plain"]
    axes.plot([1, 2], label=named[0])
    axes.errorbar([1, 2], [1, 2], [1, 1], label=named[1])
    axes.bar([1, 2], [1, 2], label=named[2])
    axes.axhline(1)
    axes.errorbar([1, 2], [1, 2], [1, 1])
    axes.plot([1], [1], label="_nolegend_")
    axes.fill_between([1, 2], [1, 2], label=named[3])
    figures.legend(axes.figure, axes)
    assert {text.get_text().lstrip("\u200b") for text in axes.figure.legends[0].get_texts()} == {*named}
