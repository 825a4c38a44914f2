"""The style of figures: lines that differ, units of bytes, axes that fit what is drawn."""

from matplotlib.figure import Figure

from ksana_jax.experiments import figures


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
