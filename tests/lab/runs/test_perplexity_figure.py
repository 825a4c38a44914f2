"""The figure of the perplexity task: points over bytes, lines over the grid's last key."""

from ksana_jax.lab.runs.report import report
from ksana_jax.lab.runs.run import run
from ksana_jax.lab.runs.tasks.perplexity import Perplexity
from tests.lab.runs.perplexity_runs import experiment as experiment
from tests.lab.runs.perplexity_runs import measured as measured
from tests.lab.runs.runs import reported


def test_named_variants_over_numbers_are_lines(experiment, make_llm, tmp_path):
    from matplotlib.figure import Figure

    variants = [{"name": "window"}, {"name": "dilated", "pattern.stride": 2}]
    given = {"variants": variants, "grid": {"pattern.window": [8, 16, 32]}}
    made = reported(experiment(**given), tmp_path / "out", make_llm=make_llm)
    figure = Figure()
    Perplexity().draw(figure, made.rows)
    (axes,) = figure.axes
    assert [list(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) > 2] == [[8, 16, 32]] * 2
    assert axes.get_xlabel() == "window (tokens)" and axes.get_ylabel() == "perplexity* at positions 16–127"


def test_named_variants_on_short_texts_are_drawn_over_their_bytes(experiment, make_llm, tmp_path, text):
    from matplotlib.figure import Figure

    settings = {"texts": [text], "num_texts": 1, "num_tokens": 15}
    variants = [{"name": "blocks of 4"}, {"name": "blocks of 8", "engine.block_size": 8}]
    made = reported(experiment(settings=settings, variants=variants), tmp_path / "out", make_llm=make_llm)
    figure = Figure()
    Perplexity().draw(figure, made.rows)
    (axes,) = figure.axes
    drawn = [(text.get_text(), text.xy[0]) for text in axes.texts]
    assert drawn == [("blocks of 4", 4096), ("blocks of 8", 2048)]  # the fake engine's blocks have 1 KiB each
    assert "KV bytes/token" in (tmp_path / "out/table.md").read_text()
    assert [row.mean("kv_token_bytes") for row in made.rows] == [256, 128]


def test_named_variants_of_weights_are_drawn_over_the_bytes_of_these(experiment, make_llm, tmp_path, text):
    from matplotlib.figure import Figure

    settings = {"texts": [text], "num_texts": 1, "num_tokens": 15}
    variants = [{"name": "f32"}, {"name": "int8", "engine.quantization": "int8"}]
    made = reported(experiment(settings=settings, variants=variants), tmp_path / "out", make_llm=make_llm)
    figure = Figure()
    Perplexity().draw(figure, made.rows)
    (axes,) = figure.axes
    assert [(text.get_text(), text.xy[0]) for text in axes.texts] == [("f32", 8192), ("int8", 2048)]
    assert axes.get_xlabel() == "weights (KiB)" and "weights, KiB" in (tmp_path / "out/table.md").read_text()


def test_a_pivot_without_any_of_its_columns_is_a_plain_table(experiment, make_llm, tmp_path, text):
    from matplotlib.figure import Figure

    settings = {"texts": [text], "num_texts": 1, "num_tokens": 15}
    given = {"variants": [{"name": "full", "grid": False}], "grid": {"pattern.window": [4, 8]}}
    made = reported(experiment(settings=settings, pivot="pattern.window", **given), tmp_path / "out", make_llm=make_llm)
    assert "| full | — |" in made.markdown and made.grid.num_right > 1
    figure = Figure()
    Perplexity().draw(figure, made.rows)
    assert [(len(line.get_xdata()), line.get_marker()) for axes in figure.axes for line in axes.lines] == [(1, "o")] * 2


def test_a_window_that_holds_nothing_between_steps_is_drawn(experiment, make_llm, tmp_path):
    (row,) = reported(experiment(pattern={"window": 1}), tmp_path / "out", make_llm=make_llm).rows
    assert row.mean("live_kv_bytes") == 0


def test_a_grid_of_numbers_is_drawn_against_its_last_key(experiment, make_llm, tmp_path):
    from matplotlib.figure import Figure

    made = experiment(grid={"pattern.window": [4, 8], "pattern.num_sinks": [0, 1, 2]})
    run(made, tmp_path / "out", make_llm=make_llm)
    figure = Figure()
    Perplexity().draw(figure, report(tmp_path / "out").rows)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "attention sinks (tokens)" and axes.get_ylabel() == "perplexity* at positions 16–127"
    assert [text.get_text() for text in axes.texts] == ["window 8", "window 4"]
