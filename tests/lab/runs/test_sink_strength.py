"""The task sink_strength: its numbers equal the trainer's, and its table and figure show them."""

import numpy as np
import pytest

from experiments.pretrained_sink_strength.task import SinkStrength
from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs import texts
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.models import tokenizer_of
from tests.lab.runs.runs import reported

SETTINGS = {"num_texts": 4, "num_tokens": 64, "num_first": 2}


def no_engine(*args, **settings):
    raise AssertionError("dense attention needs no engine")


@pytest.fixture(scope="module")
def measured(tmp_path_factory, one_layer):
    given = {
        "task": "experiments.pretrained_sink_strength.task:SinkStrength",
        "model": one_layer,
        "load_format": "dummy",
        "settings": SETTINGS,
        "seeds": [0, 1],
    }
    return reported(plan(given), tmp_path_factory.mktemp("out"), make_llm=no_engine)


def test_numbers_are_those_that_training_logs(measured, one_layer):
    from experiments.training.sinks import evaluate
    from ksana_jax.loading import load_model

    config, params = load_model(one_layer, load_format="dummy")
    excerpts = texts.draw_excerpts([], tokenizer_of(one_layer), 4, texts.ExcerptSpec(64), 0)
    inputs = np.array([e.ids for e in excerpts], np.int32)
    logged = evaluate(params, inputs, np.roll(inputs, -1, axis=1), config=config, batch_size=4)
    (row,) = measured.rows
    # The log has four digits.
    assert row.values["sink_1"][0] == pytest.approx(logged["sink_1"], abs=1e-4)
    assert row.values["received_layer_0"][0] == pytest.approx(logged["first_token_attention"][0], abs=1e-4)
    assert row.values["received"] == row.values["most_received"]  # there is one layer


def test_table_and_figure_show_every_layer_and_position(measured):
    from matplotlib.figure import Figure

    assert [c.title for c in measured.columns][:2] == ["Sink_1, %", "Sink_2, %"]
    assert any(
        "more than 0.3 of the attention, averaged over 64 tokens; uniform attention pays 0.074" in n
        for n in measured.notes
    )
    assert "Position 1 is BOS." in measured.notes
    figure = Figure()
    SinkStrength().draw(figure, measured.rows)
    above, below = figure.axes
    (row,) = measured.rows
    for axes, key in ((above, "received_layer_0"), (below, "value_norm_ratio_layer_0")):
        # Of two seeds: a point and its deviation; then the line of reference.
        point, *_ = axes.lines
        assert np.asarray(point.get_ydata()).tolist() == [row.mean(key)]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pattern": {"window": 8}}, "measures the model's own attention: leave pattern unset"),
        ({"settings": {"num_first": 65}}, r"settings\.num_first is 65, must be an integer from 1 to 64"),
        ({"settings": {"epsilon": 1.0}}, r"settings\.epsilon is 1\.0, must be a number from 0 and below 1"),
        ({"settings": {"num_tokens": 1}}, r"settings\.num_tokens is 1"),
        ({"settings": {"num_texts": 10**9}}, "but the texts have"),
    ],
)
def test_settings_that_cannot_work_are_refused(one_layer, changed, said):
    with pytest.raises(ConfigError, match=said):
        plan({"task": "experiments.pretrained_sink_strength.task:SinkStrength", "model": one_layer, **changed})
