"""Infinite numbers and NaN are written as valid JSON, and every table, figure and comparison shows them as what they
are."""

import csv
import dataclasses
import io
import itertools
import json
import math
from pathlib import Path

import fake_task
import numpy as np
import pytest
from fake_llm import FakeLLM
from hypothesis import given
from hypothesis import strategies as st

from ksana_jax.core.outputs import Logprob
from ksana_jax.core.own_code import names_code
from ksana_jax.lab.runs import comparison_tables, figures, plain_json, significance, tables
from ksana_jax.lab.runs.compare import compare
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.export import export
from ksana_jax.lab.runs.records import read
from ksana_jax.lab.runs.report import read_report, report_of_rows
from ksana_jax.lab.runs.tasks import TASKS, task_named
from ksana_jax.lab.runs.tasks.base import Column, ResultRow, number
from ksana_jax.lab.runs.tasks.results import deviation, mean
from ksana_jax.lab.runs.tasks.row_figure import draw_bars
from tests.lab.runs.runs import reported

INF, NAN = math.inf, math.nan
STUDIES = sorted(path.parent for path in (Path(__file__).parents[3] / "experiments").glob("*/run.json"))


def strictly(text):
    """Reads JSON as other languages do, without Infinity and NaN."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(plain)
def test_every_value_is_read_as_it_was_written(value):
    text = plain_json.dumps(value)
    strictly(text)
    assert repr(plain_json.loads(text)) == repr(value)
    assert "\n" not in text


def test_infinity_of_earlier_records_is_read():
    assert plain_json.loads('{"a": Infinity, "b": [-1e999]}') == {"a": INF, "b": [-INF]}


@pytest.mark.parametrize(
    ("values", "middle", "spread"),
    [
        ([1.0, 3.0], 2.0, math.sqrt(2)),
        ([INF, 1.0], INF, NAN),
        ([INF, INF], INF, 0.0),
        ([INF, -INF], NAN, NAN),
        ([1.0, NAN], NAN, NAN),
        ([1.5e308, 1.5e308], 1.5e308, 0.0),
        ([1.5e308, -1.5e308], 0.0, INF),
    ],
)
def test_means_and_deviations_of_numbers_that_are_not_finite(values, middle, spread):
    assert (mean(values), deviation(values)) == pytest.approx((middle, spread), nan_ok=True)


def row(label, *values, samples=()):
    return ResultRow(label, {}, len(values), [[]] * len(values), {"a": values}, {"a": samples} if samples else {})


LOWER = Column("a", "a", number(1), "min")


def test_rows_that_are_not_finite_lead_nothing_and_are_not_resolved():
    infinite, finite, unknown = row("i", INF, INF), row("f", 2.0, 2.1), row("n", NAN, 1.0)
    pairs = [(infinite, finite), (infinite, row("j", INF, INF)), (unknown, finite), (row("k", INF, 2.0), finite)]
    assert significance.differ(pairs, "a") == [False] * 4
    assert significance.leaders([unknown, infinite, finite], LOWER) == []
    assert significance.change(infinite, finite, "a").text(LOWER) == "∞"
    assert significance.change(infinite, row("j", INF, INF), "a").mean == 0
    assert significance.paired_t([INF, 1.0])[1:] == significance.paired_t([NAN, 1.0])[1:] == (None, None, None)


def test_every_table_shows_what_is_not_finite():
    rows = [row("a", INF, INF), row("b", NAN, 1.0), row("c", -INF), row("d", 1.0, 1.0), row("e", 1.0, INF)]
    cells = [line[-1] for line in tables.grid(rows, [LOWER])[1]]
    assert cells == ["∞", "NaN", "-∞", "1.0 ± 0.0", "∞"]
    # A column's own way of writing need not know them.
    strict = dataclasses.replace(LOWER, write=lambda value: str(int(value)))
    assert [line[-1] for line in tables.grid(rows, [strict])[1]] == ["∞", "NaN", "-∞", "1 ± 0", "∞"]
    latex = tables.latex("", tables.grid(rows, [LOWER]), [])
    assert r"a & $\infty$ \\" in latex and "b & NaN" in latex and latex.isascii()
    read_back = list(csv.DictReader(io.StringIO(tables.comma_separated(rows, [LOWER]))))
    assert [float(line["a"]) for line in read_back] == pytest.approx([INF, NAN, -INF, 1.0, INF], nan_ok=True)
    assert tables.terminal(*tables.grid(rows, [LOWER])).row_count == 5


class Measured(fake_task.Fake):
    """Infinity with the first seed, NaN with the second, then a number."""

    def run(self, trial):
        yield {"metric": "value", "value": [INF, NAN, 3.0][trial.seed] * trial.config["settings"]["x"]}


def test_what_a_trial_measures_is_stored_reported_and_compared(model, tmp_path):
    made = {}
    for name, seeds in (("a", [0]), ("b", [0, 1, 2])):
        task = f"{__name__}:Measured"
        given = plan({"task": task, "model": model, "grid": {"settings.x": [1, 2]}, "seeds": seeds})
        made[name] = reported(given, tmp_path / name)
    for line in (tmp_path / "b/records.jsonl").read_text().splitlines():
        strictly(line)
    values = [m["value"] for done in read(tmp_path / "b").done.values() for m in done]
    assert values == pytest.approx([INF, NAN, 3.0, INF, NAN, 6.0], nan_ok=True)
    assert (
        "| 1 | ∞ |" in (tmp_path / "a/table.md").read_text() and "| 1 | NaN |" in (tmp_path / "b/table.md").read_text()
    )
    assert (tmp_path / "a/figure.pdf").read_bytes().startswith(b"%PDF")
    exported = list(csv.DictReader(io.StringIO(export(tmp_path / "b"))))
    assert [float(line["mean"]) for line in exported] == pytest.approx(values, nan_ok=True)
    compared = compare(tmp_path / "a", tmp_path / "b")
    assert "∞" in comparison_tables.markdown(compared)
    found = compared.rows[0].change("mean")
    assert (found.mean, found.num_pairs, found.p) == (0.0, 1, None)  # both are infinite with the same seed
    strictly(plain_json.dumps(comparison_tables.plain(compared)))


class Certain(FakeLLM):
    """Gives one token of the text the probability 0."""

    def _scores(self, ids):
        entries = super()._scores(ids)
        if self._patterns[0].window is None:
            entries[40] = {ids[40]: Logprob(-INF, len(ids))}
        return entries


@pytest.mark.parametrize("num_rows", [1, 2])
def test_an_infinite_perplexity_is_shown_and_drawn_at_the_edge(model, text, tmp_path, num_rows):
    from matplotlib.figure import Figure

    settings = {"texts": [text], "num_texts": 1, "num_tokens": 128}
    variants = [{"name": "full"}, {"name": "window", "pattern.window": 8}][:num_rows]
    engine = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 1}
    given = {"model": model, "engine": engine, "settings": settings, "variants": variants}
    made = reported(plan({"task": "perplexity", **given}), tmp_path, make_llm=Certain)
    full, *others = made.rows
    assert full.mean("ppl_32_64") == INF and math.isfinite(full.mean("ppl_64_128"))
    assert all(math.isfinite(other.mean("ppl_32_64")) for other in others)
    assert "∞" in (tmp_path / "table.md").read_text()
    figure = Figure()
    made.task.draw(figure, made.rows)
    figures.finish(figure)
    above = figure.axes[0]
    [arrow] = [line for line in above.lines if line.get_marker() == "^"]
    assert np.asarray(arrow.get_xdata()).tolist() == [40] and np.asarray(arrow.get_ydata()).tolist() == [1.0]
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")


def test_a_perplexity_beyond_the_largest_number_is_infinite():
    from ksana_jax.lab.runs.tasks.perplexity_report import perplexity

    assert perplexity(709.0) == pytest.approx(math.exp(709.0)) and perplexity(710.0) == perplexity(INF) == INF
    assert math.isnan(perplexity(NAN))


def test_bars_that_are_not_finite_are_written():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw_bars(axes, [ResultRow("", {}, 1, [[]], {"a": [value]}) for value in (1.0, INF, NAN)], "a", "#000000")
    assert [text.get_text().strip() for text in axes.texts] == ["∞", "NaN"]
    assert len(axes.patches) == 3


def of_a_study():
    """A study of each task that has one: its rows of measured numbers."""
    found = {}
    for study in STUDIES:
        found.setdefault(json.loads((study / "run.json").read_text())["experiment"]["task"], study)
    return found


BY_TASK = of_a_study()


def handmade():
    """Rows of the tasks without a study."""
    score = {"metric": "score", "task": "t", "name": "acc", "value": 0.5, "higher_is_better": True, "samples": [0]}
    cost = {"metric": "cost", "seconds": 1.0, "block_bytes": 1024, "peak_blocks": 3}
    answer = {"metric": "answer", "task": "fwe", "digest": "d", "score": 0.5, "num_prompt_tokens": 8}
    held = {"metric": "kv", "held_kv_bytes": 1024}
    counts = dict.fromkeys(("num_output_tokens", "num_requests", "num_preemptions", "num_computed_tokens"), 8)
    counts |= dict.fromkeys(("mean_running", "num_steps", "compiled_while_timed", "mean_blocks", "block_bytes"), 4)
    times = {"seconds": 1.0, "ttft_s": 0.1, "tpot_s": 0.1, "hit_rate": 0.5, "mean_unshared": 8.0, "answers": ["a"]}
    sides = [{"metric": "run", "pair": 0, "side": side, **counts, **times} for side in ("without", "with")]
    asked = {"metric": "setting", "against": {"dtype": "f32"}, "apart": False}
    made = {"harness": [score, cost], "ruler": [answer, held]}
    made["compare"] = [asked, *sides]
    for name, trial in made.items():
        numbers = {key: [value] for key, value in task_named(name).summarise(trial).items()}
        yield name, [ResultRow(label, {}, 1, [trial], numbers) for label in "ab"]


HANDMADE = dict(handmade())


# Studies of tasks that are gone are shown by their records.
NAMES = sorted({*TASKS, *filter(names_code, BY_TASK)})


def test_every_task_is_among_these():
    assert {*BY_TASK, *HANDMADE} >= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_no_number_of_a_task_ends_its_report(name):
    task = task_named(name)
    measured = HANDMADE[name] if name in HANDMADE else read_report(BY_TASK[name]).rows

    def changed(row, bad, count):
        values = {key: [bad] * min(count, len(v)) + list(v[count:]) for key, v in row.values.items()}
        return dataclasses.replace(row, values=values)

    for bad, count in itertools.product((INF, -INF, NAN, 1e308, -1e308), (1, 1000)):
        for num_rows in (1, len(measured)):
            rows = [changed(row, bad, count) if i < num_rows else row for i, row in enumerate(measured)]
            made = report_of_rows("n", "t", task, rows, [], {}, [])
            assert tables.markdown("t", *made.grid, made.notes) and tables.latex("t", made.grid, made.notes)
            assert tables.comma_separated(rows, made.columns) and tables.terminal(*made.grid)
    # Rows in turn, so that a figure has all of them beside numbers.
    bads = itertools.cycle([INF, None, NAN, -INF])
    mixed = [row if bad is None else changed(row, bad, 1000) for row, bad in zip(measured, bads, strict=False)]
    assert figures.render(lambda figure: task.draw(figure, mixed), 4)["pdf"].startswith(b"%PDF")
