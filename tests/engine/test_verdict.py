"""prefer: implementations that an engine takes by a verdict, and its message without one. No step runs."""

import dataclasses
import json
import logging
import re

import pytest

from ksana_jax.core.config import ConfigError, EngineConfig
from ksana_jax.engine import verdict
from ksana_jax.engine.settings import engine_config
from ksana_jax.engine.verdict import Measured, Pair, Verdict, command, conditions_of, is_longer, read_verdict
from ksana_jax.ops.norm import choose_norm
from tests.engine.small import SMALL, make_llm, model

XLA, MIXED = Pair("xla", "xla"), Pair("native", "mixed")


def measured(pair: Pair, agreed: list[int], tokens_per_s: float) -> Measured:
    return Measured(*pair, tuple(agreed), 1e-3, 1e-2, tokens_per_s)  # pyright: ignore[reportCallIssue]


def of(*found: Measured, **settings) -> Verdict:
    """A verdict for the tiny model with some settings."""
    conditions = conditions_of(model()[0], engine_config(SMALL | settings))
    return Verdict(conditions, "tiny", "the reference", sum(found[0].agreed) if found else 0, None, found)


@pytest.fixture(autouse=True)
def two_pairs(monkeypatch, tmp_path):
    """Whatever serves on this machine: two pairs, and a cache directory without verdicts."""

    def serving(model, config, layout):
        asked = config.operators.attention, config.operators.linear
        return [p for p in (MIXED, XLA) if all(a in ("auto", b) for a, b in zip(asked, p, strict=True))]

    monkeypatch.setattr(verdict, "serving_pairs", serving)
    monkeypatch.setattr(verdict, "verdict_folder", lambda: tmp_path / "verdicts")


def test_the_longest_agreement_is_chosen_before_speed():
    chosen, reason = of(measured(XLA, [32] * 8, 10.0), measured(MIXED, [8, 9, 7, 8] * 2, 99.0)).choose([MIXED, XLA])
    assert chosen == XLA
    assert reason == "agrees with the reference for 256 of 256 tokens, longer than any other (64)"


def test_of_those_that_agree_as_long_the_fastest_is_chosen():
    found = of(measured(XLA, [32, 32, 32, 32], 10.0), measured(MIXED, [32, 32, 8, 32], 99.0))
    chosen, reason = found.choose([XLA, MIXED])
    assert chosen == MIXED
    assert reason == (
        "agrees with the reference for 104 of 128 tokens (attention xla, products xla for 128: not resolved), "
        "and is the fastest of 2 that agree as long"
    )
    busy = dataclasses.replace(found, others_busy=0.42)
    said = busy.choose([XLA, MIXED])[1].removeprefix(reason)
    assert said == ", measured while other programs took 42% of the processors' time"
    assert "other programs" not in busy.choose([XLA])[1]


def test_what_does_not_serve_is_not_chosen():
    found = of(measured(XLA, [1, 1], 1.0), measured(MIXED, [9, 9], 9.0))
    assert found.choose([XLA])[0] == XLA
    assert found.choose([XLA])[1] == "agrees with the reference for 2 of 2 tokens"
    only, reason = of(measured(XLA, [9], 1.0)).choose([MIXED, XLA])
    assert only == XLA and reason.endswith("for 9 of 9 tokens, the only one measured of 2 that may serve")
    with pytest.raises(ConfigError, match=r"measured were: attention xla, products xla; .*was not: attention native"):
        of(measured(XLA, [9], 1.0)).choose([MIXED])


def test_one_agrees_longer_beyond_two_standard_errors():
    # Differences of 1, 3: mean 2, standard error 1. Of 1, 4: mean 2.5, standard error 1.5.
    assert not is_longer([9, 9], [8, 6]) and not is_longer([9, 9], [8, 5])
    assert is_longer([9, 9, 9], [8, 7, 6])  # mean 2, standard error 0.58
    assert is_longer([9, 9], [7, 7]) and is_longer([9], [8]) and not is_longer([9, 9], [9, 9])


def test_a_verdict_is_read_as_it_was_written(tmp_path):
    found = of(measured(XLA, [3, 4], 1.5))
    found.write(path := tmp_path / "new" / "verdict.json")
    assert read_verdict(path) == found
    for text in ("{", "[]", '{"measured": [{}]}', json.dumps({**json.loads(path.read_text()), "more": 1})):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is not a verdict of `ksana align --choose`"):
            read_verdict(path)


@pytest.mark.parametrize("place", ["the cache directory", "a file"])
def test_an_engine_takes_what_the_verdict_says_and_logs_why(tmp_path, caplog, place):
    found = of(measured(MIXED, [2] * 8, 99.0), measured(XLA, [32] * 8, 10.0))
    path = verdict.default_path(found.conditions) if place != "a file" else tmp_path / "mine.json"
    found.write(path)
    with caplog.at_level(logging.INFO, logger="ksana_jax"):
        llm = make_llm(operators={"prefer": "agreement" if place != "a file" else str(path)}, programs={})
    assert llm.runner.implementation.name == "xla"
    assert (llm.config.operators.attention, llm.config.operators.linear) == XLA
    assert f"{XLA}: agrees with the reference for 256 of 16 tokens, longer than any other (16) ({path})" in caplog.text


def test_an_engine_without_a_verdict_names_the_command_that_makes_one(tmp_path):
    with pytest.raises(ConfigError, match=r"prefer 'agreement': there is no verdict .*`ksana align - --choose --model"):
        make_llm(operators={"prefer": "agreement"})
    path = tmp_path / "mine.json"
    with pytest.raises(ConfigError, match=rf"no verdict at {path}; .*dtype=bf16 --choose.* --out {path}` makes"):
        make_llm(operators={"prefer": str(path)}, dtype="bf16")
    # One of each is asked for: nothing is left to choose.
    assert make_llm(operators={"prefer": "agreement", "attention": "xla", "linear": "xla"}, programs={})


@pytest.mark.parametrize(("name", "value"), [("jax", "0.1"), ("device", "gpu"), ("dtype", "bf16"), ("C++", "other")])
def test_a_verdict_of_other_conditions_is_refused(tmp_path, name, value):
    found = of(measured(XLA, [9], 1.0), measured(MIXED, [9], 1.0))
    conditions = found.conditions | {name: value}
    dataclasses.replace(found, conditions=conditions).write(path := tmp_path / "mine.json")
    with pytest.raises(ConfigError, match=rf"measured with {re.escape(name)} {value}, this engine has .*makes one"):
        make_llm(operators={"prefer": str(path)})


def test_conditions_are_those_that_change_numbers():
    first = of().conditions
    for changed in ({"dtype": "bf16"}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}):
        assert of(**changed).conditions != first
    assert of(block_size=8, max_num_seqs=9).conditions == first
    other = dataclasses.replace(model()[0], num_layers=1)
    assert conditions_of(other, EngineConfig()) != conditions_of(model()[0], EngineConfig())


def test_verdicts_of_this_device_and_version_are_listed():
    mine = of(measured(XLA, [9], 1.0))
    mine.write(verdict.default_path(mine.conditions))
    foreign = dataclasses.replace(mine, conditions=mine.conditions | {"jaxlib": "0.1"})
    foreign.write(verdict.default_path(foreign.conditions))
    (verdict.verdict_folder() / "broken.json").write_text("{")
    assert verdict.verdicts_here() == [mine]


def test_where_no_verdicts_can_be_kept_there_are_none(monkeypatch):
    def no_home():
        raise FileNotFoundError("the user has no home directory")

    monkeypatch.setattr(verdict, "verdict_folder", no_home)
    assert verdict.verdicts_here() == []


def test_the_command_asks_for_the_engine_s_settings():
    asked = EngineConfig(dtype="bf16", kv_cache_dtype={"k": "kivi4", "v": "int8"}, kv_full_precision_layers=(0, 1))
    import shlex

    from ksana_jax.lab.align.command import side_settings

    words = shlex.split(command(asked))
    assert words[:2] == ["ksana", "align"] and words[3:] == ["--choose", "--model", "MODEL"]
    assert EngineConfig(**side_settings(words[2], "")[1]) == asked


def test_settings_that_leave_nothing_to_choose_or_mean_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"prefer is 'accuracy', must be speed, agreement or the path of a \.json"):
        EngineConfig(operators={"prefer": "accuracy"})
    with pytest.raises(ConfigError, match=r"does not go with operators\.prefer 'agreement': there is one"):
        EngineConfig(operators={"prefer": "agreement"}, numerics="invariant")
    with pytest.raises(ConfigError, match="operators has no key 'atention', the nearest is 'attention'"):
        EngineConfig(operators={"atention": "xla"})
    with pytest.raises(ConfigError, match="operators is 'xla', must be a mapping"):
        EngineConfig(operators="xla")
    with pytest.raises(ValueError, match=r"operators\.norm 'native': norms are mine; native norms are rms or"):
        choose_norm("cpu", "float32", ("mine",), "native")
