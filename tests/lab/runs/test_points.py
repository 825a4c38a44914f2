"""Rows of an experiment: variants at the points of a grid, and outside it."""

import re

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.config import plan

pytestmark = pytest.mark.usefixtures("fake")


def test_a_variant_outside_the_grid_is_one_row(model):
    base = {"task": "fake", "model": model, "grid": {"settings.x": [1, 2]}}
    made = plan({**base, "variants": [{"name": "a"}, {"name": "b", "grid": False, "settings.x": 7}], "baseline": "b"})
    assert [(row.label, row.point["settings.x"]) for row in made.rows] == [("a", 1), ("a", 2), ("b", None)]
    assert made.rows[2].trials[0].config["settings"]["x"] == 7 and made.rows[2].trials[0].label == "b"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"baseline": "ful"}, "baseline is 'ful', must be a variant's name; the nearest is 'full'"),
        ({"pivot": "settings.y"}, "pivot is 'settings.y', must be a key of the grid; the nearest is 'settings.x'"),
        ({"variants": [{"name": "full", "grid": "no"}]}, "variant 'full': grid is 'no', must be true or false"),
    ],
)
def test_rows_that_are_not_there_are_refused(model, fields, message):
    base = {"task": "fake", "model": model, "grid": {"settings.x": [1, 2]}, "variants": [{"name": "full"}]}
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan({**base, **fields})
