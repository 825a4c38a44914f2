"""Patterns as experiments give them: presets, fields, and one for each layer."""

import re

import pytest

from ksana_jax import AttentionPattern
from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.patterns import patterns_of

pytestmark = pytest.mark.usefixtures("fake")


def small(model, **fields):
    return {"task": "fake", "model": model, **fields}


def test_a_preset_is_given_by_name_and_other_fields_replace_its_numbers(model):
    made = plan(small(model, pattern="streaming_llm", grid={"pattern.window": [8, 16]}))
    patterns = [patterns_of(t.config) for t in made.trials]
    assert patterns == [[AttentionPattern(window=w, num_sinks=4, sink_position="cache")] for w in (8, 16)]
    rows = plan(small(model, grid={"pattern": ["full", "streaming_llm"]})).rows
    assert [row.trials[0].label for row in rows] == ["pattern=full", "pattern=streaming_llm"]
    layers = {"0-1": {"window": 8}, "3": "full"}
    [row] = plan(small("ksana-tiny", grid={"pattern": [layers]})).rows
    assert row.trials[0].label == "pattern={0-1: {window: 8}, '3': full}"
    assert made.max_repositioned_sinks(made.trials[0]) == 4


def test_a_trial_does_not_depend_on_the_form_in_which_its_pattern_was_given(model):
    forms = [
        {"pattern": {"window": 8, "num_sinks": 4}},
        {"pattern": {"preset": "streaming_llm", "window": 8}},
        {"pattern": {"window": 8, "num_sinks": 4, "sink_position": "cache"}},
    ]
    assert len({plan(small(model, **form)).trials[0].id for form in forms}) == 1
    layers = [{"layer_patterns": [form["pattern"]] * 4} for form in forms]
    layers.append({"pattern": {"0-2": forms[0]["pattern"], 3: forms[1]["pattern"]}})
    assert len({plan(small("ksana-tiny", **form)).trials[0].id for form in layers}) == 1
    with pytest.raises(ConfigError, match=r"pattern names layers, which does not go with layer_patterns"):
        plan(small("ksana-tiny", pattern={"0-3": "full"}, layer_patterns=[{}] * 4))


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("streaming", "there is no attention pattern 'streaming'; the nearest of"),
        ([8], "pattern is of type list"),
        ({"preset": "full", "window": -1}, "AttentionPattern.window is -1"),
    ],
)
def test_what_is_no_pattern_is_refused_before_any_trial(model, pattern, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        plan(small(model, pattern=pattern))
