"""Two runs row by row: which rows belong together, what differs, a paired test, and what is refused."""

import json
import math

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs import comparison_tables, dotted
from ksana_jax.lab.runs.compare import compare, compare_rows
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.run import run


@pytest.fixture
def make_fake(fake, model, tmp_path):
    """Runs the fake task, whose value is 10 x + y (lines - 1) / 2 + seed, into a folder of that name."""

    def make(folder, **fields):
        run(plan({"task": "fake", "model": model, "seeds": [0, 1, 2], **fields}), tmp_path / folder)
        return tmp_path / folder

    return make


def lines(made):
    """The table's lines without heads, bold cells in asterisks."""
    _, cells, bold, _ = comparison_tables.grid(made)
    return [[f"*{c}*" if b else c for c, b in zip(*row, strict=True)] for row in zip(cells, bold, strict=True)]


def test_rows_of_equal_settings_are_paired_by_seed(make_fake):
    grid = {"settings.x": [1, 2]}
    made = compare(make_fake("a", grid=grid), make_fake("b", grid=grid, settings={"y": 0.25}))
    # The seeds add 0, 1 and 2 to both, so every difference is -0.25 although the deviations are 1. Three differences
    # without a deviation have the p of their signs, twice by Holm's correction for two rows.
    mean = [row for row in lines(made) if row[1] == "mean"]
    assert mean == [
        ["x 1", "mean", "11.500 ± 1.000", "11.250 ± 1.000", "−0.250", "3", "0.500"],
        ["x 2", "mean", "21.500 ± 1.000", "21.250 ± 1.000", "−0.250", "3", "0.500"],
    ]
    assert comparison_tables.notes(made)[0] == "b against a: settings.y 0.5 → 0.25."


def test_seeds_that_only_one_run_has_are_left_out(make_fake):
    made = compare(make_fake("a"), make_fake("b", seeds=[1, 2, 7], settings={"x": 2}))
    assert lines(made)[0][2:] == ["11.500 ± 1.000", "23.833 ± 3.215", "+10.000", "2", "0.500"]


def test_one_seed_is_not_resolved(make_fake):
    made = compare(make_fake("a", seeds=[0]), make_fake("b", seeds=[0], settings={"x": 2}))
    assert lines(made)[0][1:] == ["mean", "10.500", "20.500", "+10.000", "1", "not resolved"]
    assert "One pair gives no standard deviation: not resolved." in comparison_tables.notes(made)


def test_rows_are_joined_with_the_nearest_ones_only(make_fake):
    a = make_fake("a", grid={"settings.x": [1, 2, 3]})
    b = make_fake("b", grid={"settings.x": [2, 1, 5, 7]}, settings={"y": 0.25})
    made = compare(a, b)
    assert [(row.a and row.a.name, row.b and row.b.name) for row in made.rows] == [
        ("x 1", "x 1"),
        ("x 2", "x 2"),
        ("x 3", None),
        (None, "x 5"),
        (None, "x 7"),
    ]
    assert [row[2:] for row in lines(made) if row[:2] == ["x 3", "mean"]] == [["31.500 ± 1.000", "—", "—", "0", "—"]]
    said = comparison_tables.notes(made)
    assert "Only in a, or without one nearest row in the other: x 3." in said
    assert "Only in b, or without one nearest row in the other: x 5; x 7." in said


def test_a_single_row_is_the_baseline_of_all(make_fake):
    made = compare(make_fake("a", variants=[{"name": "base"}]), make_fake("b", grid={"settings.x": [2, 3]}))
    assert [row.name for row in made.rows] == ["base | x 2", "base | x 3"]
    assert [row.differs for row in made.rows] == [{"settings.x": (1, 2)}, {"settings.x": (1, 3)}]
    assert "base | x 3: settings.x 1 → 3." in comparison_tables.notes(made)


def test_rows_without_a_finished_trial_are_named(make_fake):
    made = compare(make_fake("a", grid={"settings.x": [1, 2]}), make_fake("b", grid={"settings.x": [1, 2]}))
    assert comparison_tables.notes(made)[0] == "b against a: the same settings."
    failing = make_fake("c", grid={"settings.x": [1, 2]}, settings={"fail_at": 2})
    made = compare(make_fake("d", grid={"settings.x": [1, 2]}), failing)
    assert "c has no finished trial of: x 2." in comparison_tables.notes(made)


def test_texts_pair_perplexities_and_other_texts_are_refused(make_run, tmp_path, text):
    a = make_run("a", pattern={"window": 4})
    b = make_run("b", pattern={"window": 4, "num_sinks": 1, "sink_position": "absolute"})
    made = compare(a, b)
    (ppl,) = (row for row in lines(made) if row[1] == "ppl 32–63")
    # A sink is one more key that a query attends to, on which the fake model's predictions depend.
    assert ppl[-3].startswith("−") and ppl[-3].endswith(" %") and ppl[-2] == "2"
    (row,) = made.rows
    assert row.differs == {"pattern.num_sinks": (0, 1)}
    assert any(line[1] == "live KV, KiB" and line[-1] == "exact" for line in lines(made))
    (tmp_path / "other.txt").write_text("9876543210" * 40)
    other = make_run("c", settings={"texts": [str(tmp_path / "other.txt")]})
    with pytest.raises(ConfigError, match=r"a and c scored different texts or positions \(2 and 2 draws, 0 in common"):
        compare(a, other)


def test_rows_of_one_run_are_compared_with_one_of_them(make_fake, run_ksana):
    folder = make_fake("a", grid={"settings.x": [1, 2]}, seeds=[*range(8)])
    made = compare_rows(folder, "x 1", ["x 2"])
    assert lines(made)[0][2:] == ["*14.000 ± 2.449*", "24.000 ± 2.449", "+10.000", "8", "0.008"]
    assert made.rows[0].differs == {"settings.x": (1, 2)}
    code, out, _ = run_ksana("compare", folder, "--against", "x 1")
    assert code == 0 and out.splitlines()[0] == "Each row against x 1"
    with pytest.raises(ConfigError, match=r"no finished row 'x 3', the nearest is 'x [12]'"):
        compare_rows(folder, "x 1", ["x 3"])
    for given in ([folder], [folder, "--row", "x 1"], [folder, folder, "--against", "x 1"]):
        code, _, err = run_ksana("compare", *given)
        assert code and "give two runs, or one run and a row of it" in err


def test_rows_over_a_grid_are_compared_at_the_same_point_with_defaults_of_methods(make_fake):
    def variant(name, **fields):
        return {"name": name, "engine.kv_eviction": {"method": name, "budget": 64}, **fields}

    variants = [variant("snapkv"), variant("knorm", **{"settings.y": 0.25}), {"name": "full", "grid": False}]
    folder = make_fake("a", variants=variants, grid={"settings.x": [1, 2]}, seeds=[*range(8)])
    made = compare_rows(folder, "snapkv")
    # The single row is compared with both; four tests are corrected together.
    assert [(line[0], line[-1]) for line in lines(made)] == [
        ("knorm, x 1", "0.031"),
        ("knorm, x 2", "0.031"),
        ("snapkv, x 1 | full", "1.000"),
        ("snapkv, x 2 | full", "0.031"),
    ]
    name = "engine.kv_eviction"
    said = f"knorm, x 1; knorm, x 2: {name}.recent 32 → 0, {name}.method snapkv → knorm, settings.y 0.5 → 0.25."
    assert comparison_tables.notes(made)[0] == said


def test_a_difference_in_all_of_many_seeds_is_better(make_fake):
    seeds = [*range(8)]
    made = compare(make_fake("a", seeds=seeds), make_fake("b", seeds=seeds, settings={"y": 0.25}))
    assert [side.startswith("*") for side in lines(made)[0][2:4]] == [False, True]


def test_the_command_writes_markdown_and_json(make_fake, tmp_path, run_ksana):
    a, b = make_fake("a"), make_fake("b", settings={"y": 0.25})
    code, out, _ = run_ksana("compare", a, b, "--out", tmp_path / "c", "--json")
    *shown, line = out.splitlines()
    assert code == 0 and shown[0] == "b against a"
    said = json.loads(line)
    assert said == json.loads((tmp_path / "c" / "compare.json").read_text())
    (row,) = said["rows"]
    assert row["differs"] == {"settings.y": [0.5, 0.25]}
    assert row["numbers"]["mean"] == {
        "title": "mean",
        "a": 11.5,
        "b": 11.25,
        "num_pairs": 3,
        "relative": False,
        "mean": -0.25,
        "low": None,
        "high": None,
        "p": 0.25,
        "better": None,
    }
    table = (tmp_path / "c" / "compare.md").read_text()
    assert "| this configuration | mean | 11.500 ± 1.000 | 11.250 ± 1.000 | −0.250 | 3 | 0.250 |" in table
    assert r"variant & number & a & b & change & pairs & p \\" in (tmp_path / "c" / "compare.tex").read_text()
    assert not (a / "table.md").exists()


def test_settings_that_differ_only_in_the_order_of_their_fields_are_equal():
    one = {"layer_patterns": [{"window": 4, "num_sinks": 2}], "x": math.nan, "y": 1}
    other = {"layer_patterns": [{"num_sinks": 2, "window": 4}], "x": math.nan, "y": 2}
    assert dotted.differing(one, other) == {"y": (1, 2)}
