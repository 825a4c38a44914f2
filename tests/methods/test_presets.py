"""Default positions from which queries score sinks, and the forms in which a user may give an attention pattern."""

import dataclasses
import re

import numpy as np
import pytest

from ksana_jax import AttentionPattern
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.patterns import FULL
from ksana_jax.core.statistics import Statistics
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


LAYERS = {n: ModelConfig(num_layers=n, num_kv_heads=1) for n in (2, 3)}
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
    assert [p.sink_position for p in patterns if p.num_sinks] == ["cache", "ceiling", "absolute"]


def test_one_form_serves_all_layers_and_a_list_one_each():
    assert read_patterns("streaming_llm", LAYERS[3]) == (STREAMING,) * 3
    assert read_patterns(["full", {"window": 8}], LAYERS[2]) == (AttentionPattern(), AttentionPattern(window=8))


def test_ranges_name_layers_and_the_others_keep_their_own():
    own = ModelConfig(num_layers=5, pattern=tuple(AttentionPattern(window=w) for w in (1, 2, 3, 4, 5)))
    found = read_patterns({"1-2": "full", "4": {"window": 8}}, own)
    assert [pattern.window for pattern in found] == [1, None, None, 4, 8]
    for given in ({"3-5": "full"}, {"2-1": "full"}, {"0-2": "full", "2": "full"}):
        with pytest.raises(ConfigError, match=r"^pattern has the layers '\S+', must be some of 0 to 4, once each$"):
            read_patterns(given, own)
    with pytest.raises(ConfigError, match="pattern has no field '0-2'"):
        read_patterns({"0-2": "full", "window": 8}, own)


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
        ({3.5: 8}, "pattern has no field 3.5; the nearest is "),
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
        read_patterns(given, LAYERS[2])
    assert "\n" not in str(raised.value)


def _file(folder, **given):
    fields = {"kind": "duoattention", "scores": [[0.1, 0.9], [0.3, 0.2]]} | given
    path, scores = folder / "scores.npz", np.array(fields["scores"])
    Statistics(fields["kind"], "a model", "a text", "its hash", 0, {}, {"scores": scores}).write(path)
    return str(path)


NEAR = AttentionPattern(window=8)
OF_HEADS = ModelConfig(num_layers=2, num_heads=4, num_kv_heads=2)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ([[1], []], (NEAR, FULL, NEAR, NEAR)),
        ([[1, 0], [1]], (FULL, FULL, NEAR, FULL)),
        ({"statistics": None, "share": 0.25}, (NEAR, FULL, NEAR, NEAR)),
        ({"statistics": None, "share": 0.5}, (NEAR, FULL, FULL, NEAR)),
        ({"statistics": None, "share": 0.5, "lowest": True}, (FULL, NEAR, NEAR, FULL)),
        # All heads of each layer are alike: one pattern per layer.
        ([[0, 1], []], (FULL, NEAR)),
        ({"share": 0}, (NEAR, NEAR)),
        ({"share": 1}, (FULL, FULL)),
    ],
)
def test_full_heads_keep_the_models_own_pattern(heads, expected, tmp_path):
    if isinstance(heads, dict) and "statistics" in heads:
        heads |= {"statistics": _file(tmp_path)}
    assert read_patterns({"window": 8, "full_heads": heads}, OF_HEADS) == expected
    assert read_patterns(list(expected), OF_HEADS) == expected


def test_layers_with_windows_of_their_own_keep_them_in_all_heads():
    sliding = AttentionPattern(window=3)
    model = dataclasses.replace(OF_HEADS, pattern=(sliding, FULL))
    assert read_patterns({"window": 8, "full_heads": [[], [0]]}, model) == (sliding, sliding, FULL, NEAR)


def test_a_seed_draws_a_share_of_the_heads():
    model = ModelConfig(num_layers=4, num_kv_heads=8)
    drawn = [read_patterns({"window": 8, "full_heads": {"share": 0.5, "seed": seed}}, model) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and [p.count(FULL) for p in drawn] == [16] * 3


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([[0]], "must be a list with the kv heads of each of 2 layers, or {share: 0.5, statistics: heads.npz}"),
        ("scores.json", "must be a list with the kv heads of each of 2 layers"),
        ([[0], [2]], "pattern.full_heads has [2], must be a list of kv heads 0 to 1"),
        ([[0], 1], "pattern.full_heads has 1, must be a list of kv heads 0 to 1"),
        ({"shar": 0.5}, "pattern.full_heads has no field 'shar', only share, statistics, lowest, seed"),
        ({"seed": -1}, "full_heads.seed is -1, must be an integer from 0"),
        ({"share": 1.5}, "full_heads.share is 1.5, must be a number from 0 to 1"),
        ({"share": 0.5, "statistics": "/nowhere.npz"}, "statistics /nowhere.npz: no such file; ksana calibrate"),
        ({"share": 0.5, "kind": "qfilter"}, "are for qfilter, and duoattention is needed"),
        ({"share": 0.5, "scores": [[1.0, 2.0]]}, "have scores [1, 2], the model has 2 layers of 2 kv heads"),
    ],
)
def test_heads_that_a_model_does_not_have_are_refused_in_one_sentence(heads, message, tmp_path):
    if isinstance(heads, dict) and heads.keys() & {"kind", "scores"}:
        heads = {"share": heads.pop("share"), "statistics": _file(tmp_path, **heads)}
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        read_patterns({"window": 8, "full_heads": heads}, OF_HEADS)
    assert "\n" not in str(raised.value)


def test_one_of_a_list_of_patterns_names_no_heads():
    with pytest.raises(ConfigError, match="one of a list of patterns has none"):
        read_patterns(["full", {"window": 8, "full_heads": [[0], []]}], OF_HEADS)
