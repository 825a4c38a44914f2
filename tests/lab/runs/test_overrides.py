"""Overrides and numbers as a person reads them: titles that they contradict, and numbers in another base."""

import json

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs import dotted
from ksana_jax.lab.runs.config import load, plan

pytestmark = pytest.mark.usefixtures("fake")


def small(model, **fields):
    return {"task": "fake", "model": model, **fields}


@pytest.mark.parametrize(
    ("overrides", "title"),
    [
        (["settings.x=5", "seeds=[1,2]"], "n with settings.x=5, seeds=[1,2]"),
        (["engine.block_size=8", "settings.x=1", "name=other"], "other with engine.block_size=8"),
        (["grid.engine.block_size=[4]"], "n with grid.engine.block_size=[4]"),
        ([f"fetch={'x' * 90}"], f"n with fetch={'x' * 70}..."),
        (["settings.x=1", "name=other"], "A mean of one"),
        (["settings.x=5", "title=Mine"], "Mine"),
        (["settings.x=5", 'title=""'], ""),
    ],
)
def test_a_title_of_the_file_does_not_stay_where_an_override_may_contradict_it(model, overrides, title):
    given = small(model, name="n", title="A mean of one", settings={"x": 1}, variants=[{"name": "a"}])
    made = plan(given, overrides)
    assert made.title == made.source["title"] == title
    assert plan(small(model, name="n"), ["settings.x=5"]).title == ""


@pytest.mark.parametrize("written", ["0100", "-010", "1:30", "1_0:30.5", "00"])
@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("settings.x", "%s", "settings.x"),
        ("grid.engine.block_size", "[8, %s]", "grid.engine.block_size"),
        ("variants", "[{name: 010, settings.x: %s}]", "variants.settings.x"),
    ],
)
def test_a_number_that_yaml_reads_in_another_base_is_refused(tmp_path, model, written, key, value, where):
    said = rf"{where} has {written}, which YAML reads as -?[\d.]+: write a number without leading zeros and colons"
    (path := tmp_path / "e.yaml").write_text(f"{json.dumps(small(model))[:-1]}, {key}: {value % written}}}")
    with pytest.raises(ConfigError, match=said):
        load(path)
    with pytest.raises(ConfigError, match=said):
        plan(small(model), [f"{key}={value % written}"])


@pytest.mark.parametrize(
    ("written", "value"),
    [("0", 0), ("0x10", 16), ("1_000", 1000), ("0.5", 0.5), ("'010'", "010"), ("1:30am", "1:30am")],
)
def test_other_numbers_and_texts_are_read_as_written(written, value):
    assert dotted.dotlist([f"a={written}"])["a"] == dotted.from_yaml(f"a: {written}")["a"] == value


def test_a_text_that_is_left_empty_is_the_default(model):
    fields = small(model, grid={"settings.x": [1, 2]}, pivot="settings.x")
    assert [plan(fields, given).source["pivot"] for given in ([], ["pivot="], ["pivot=null"])] == ["settings.x", "", ""]
