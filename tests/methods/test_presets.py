"""Default positions from which queries score sinks, and the forms in which a user may give an attention pattern."""

import re

import pytest

from ksana_jax import AttentionPattern
from ksana_jax.methods.presets import PRESETS, read_pattern, read_patterns


@pytest.mark.parametrize(
    ("given", "stands"),
    [
        ({}, "absolute"),
        ({"window": 8}, "absolute"),
        ({"num_sinks": 2}, "absolute"),
        ({"window": 8, "num_sinks": 2}, "cache"),
        ({"window": 8, "num_sinks": 2, "sink_position": None}, "cache"),
        ({"window": 8, "num_sinks": 2, "sink_position": "absolute"}, "absolute"),
        ({"window": 8, "num_sinks": 2, "sink_position": "ceiling"}, "ceiling"),
    ],
)
def test_sinks_of_a_window_are_seen_at_cache_positions_unless_told_otherwise(given, stands):
    pattern = AttentionPattern(**given)
    assert pattern.sink_position == stands
    assert pattern == AttentionPattern(**{**given, "sink_position": stands}), "the default is a value like any other"
    assert pattern.num_repositioned_sinks == (2 if stands != "absolute" else 0)


def test_a_pattern_is_named_by_what_was_chosen():
    assert str(AttentionPattern(window=8)) == "window=8"
    assert str(AttentionPattern(window=8, num_sinks=2)) == "window=8, num_sinks=2"
    assert str(AttentionPattern(window=8, num_sinks=2, sink_position="cache")) == "window=8, num_sinks=2"
    absolute = AttentionPattern(window=8, num_sinks=2, sink_position="absolute")
    assert str(absolute) == "window=8, num_sinks=2, sink_position=absolute"
    assert str(AttentionPattern()) == "full"


STREAMING = AttentionPattern(window=1020, num_sinks=4, sink_position="cache")


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ("full", AttentionPattern()),
        ("streaming_llm", STREAMING),
        ({"preset": "streaming_llm"}, STREAMING),
        ({"preset": "streaming_llm", "window": 112}, AttentionPattern(window=112, num_sinks=4, sink_position="cache")),
        ({"preset": "sliding_window", "window": 64, "num_sinks": 1}, AttentionPattern(window=64, num_sinks=1)),
        ({"preset": None, "window": 8}, AttentionPattern(window=8)),
        ({"window": 8, "stride": 2}, AttentionPattern(window=8, stride=2)),
        ({}, AttentionPattern()),
        (STREAMING, STREAMING),
    ],
)
def test_a_pattern_may_be_given_by_name_as_fields_or_as_itself(given, pattern):
    assert read_pattern(given) == pattern


def test_every_preset_is_a_pattern_with_room_for_its_sinks():
    patterns = [read_pattern(name) for name in PRESETS]
    assert len(set(patterns)) == len(PRESETS)
    assert [p.sink_position for p in patterns if p.num_sinks] == ["cache", "ceiling"]


def test_one_form_serves_all_layers_and_a_list_one_each():
    assert read_patterns("streaming_llm", 3) == (STREAMING,) * 3
    assert read_patterns(["full", {"window": 8}], 2) == (AttentionPattern(), AttentionPattern(window=8))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "sliding",
            "there is no attention pattern 'sliding'; the nearest of full, sliding_window, ",
        ),
        ("", "there is no attention pattern ''"),
        ({"preset": 5}, "there is no attention pattern 5"),
        ({"windw": 8}, "pattern has no field 'windw'; the nearest is 'window'"),
        ({3: 8}, "pattern has no field 3; the nearest is "),
        ({"window": "8"}, "AttentionPattern.window is '8', must be an integer from 1"),
        ({"preset": "streaming_llm", "window": None}, "sink_position 'cache' needs a window"),
        (
            lambda q, k: q == k,
            "pattern is of type function, must be an AttentionPattern, a dict of its fields, the name of",
        ),
        (64, "pattern is of type int, must be an AttentionPattern"),
        ([], "0 attention patterns were given, the model has 2 layers"),
        ([["full"]] * 2, "pattern is of type list, must be an AttentionPattern"),
        (["full", "fulll"], "there is no attention pattern 'fulll'; the nearest of"),
        (["full"] * 3, "3 attention patterns were given, the model has 2 layers"),
    ],
)
def test_what_is_no_pattern_is_refused_in_one_sentence(given, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read_patterns(given, 2)
    assert "\n" not in str(raised.value)
