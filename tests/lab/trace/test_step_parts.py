"""Time by part of the network in each kind of step: divided among steps, averaged, and compared between two traces."""

import json

import numpy as np
import pytest
from scipy import stats

from ksana_jax import SamplingParams
from ksana_jax.lab import recording
from ksana_jax.lab.runs.comparison_tables import notes
from ksana_jax.lab.trace import step_parts, tracing
from ksana_jax.lab.trace.parts import Operation
from ksana_jax.lab.trace.steps import StepTrace
from tests.engine.small import make_llm

RNG = np.random.default_rng(2)


def test_operations_belong_to_the_call_that_began_last_before_them():
    steps = [StepTrace(n, 1, 1) for n in range(5)]
    ran = [
        (Operation("a", "m", 1, "x", begin, begin + 5), part, seconds)
        for begin, part, seconds in [(3, "mlp", 9), (10, "mlp", 1), (15, "qkv", 4), (29, "mlp", 2), (30, "qkv", 8)]
    ]
    # The last call did not end under the profiler, and an operation ran before the first.
    step_parts.divide(ran, {0: steps[:1], 1: steps[1:3], 2: steps[3:4]}, {0: 10, 1: 15, 2: 25, 3: 30})
    assert [step.parts for step in steps] == [{"mlp": 1}, {"qkv": 2}, {"qkv": 2}, {"mlp": 2}, None]


def made(number, parts, num_chunks=0, num_decodes=2, drafts=0, attended=7):
    counts = {"num_tokens": 2, "num_sampled": 2, "num_attended": attended, "num_draft_tokens": drafts}
    return {"event": "step", "step": number, "num_chunks": num_chunks, "num_decodes": num_decodes} | counts | parts


def steps_of(scale):
    decodes = [made(n, {"parts": {"mlp": scale * x, "logits": y}}) for n, (x, y) in enumerate(RNG.random((9, 2)))]
    return [*decodes, made(9, {"parts": {"qkv": 0.5}}, 1, 0), made(10, {}), made(11, {"parts": {"mlp": 1.0}}, 1, 1)]


def test_a_table_has_means_and_their_intervals():
    steps = steps_of(1)
    grid = step_parts.table([*steps, made(12, {"parts": {"mlp": 1.0}}, drafts=3)])
    kinds = ["decode, ms (9)", "prefill, ms (1)", "prefill and decode, ms (1)", "verification, ms (1)"]
    assert grid.heads == ["part", *kinds]
    assert [line[0] for line in grid.cells] == ["qkv", "mlp", "logits", "all parts"]
    values = 1000 * np.array([step["parts"]["mlp"] for step in steps[:9]])
    low, high = stats.t.interval(0.95, 8, values.mean(), stats.sem(values))
    assert grid.cells[1][1:3] == [f"{values.mean():,.3f} [{low:,.3f}, {high:,.3f}]", "0.000"]
    assert step_parts.table([]).cells == [] == step_parts.table(steps[10:11]).cells


def test_two_traces_are_compared_by_steps_that_compute_the_same(tmp_path):
    left, right = steps_of(1), steps_of(3)
    right[4]["num_attended"] = 8
    facts = {"commit": "c" * 40, "dirty": True, "packages": {"ksana-jax": "0.1", "jax": "0.10"}, "python": "3.11"}
    facts |= {"device": "cpu", "cpu": "A", "instructions": "avx2", "cores": 2}
    sides = []
    for name, steps in (("a", left), ("b", right)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trace.json").write_text(json.dumps({"environment": facts, "load": 0.25}))
        header = {"config": {"dtype": "f32", "name": name}}
        sides.append(recording.Recording(tmp_path / name / "engine-1" / "recording.jsonl", header, steps))
    made = step_parts.comparison(*sides)
    assert [column.key for column in made.columns] == ["qkv", "mlp", "logits", "all parts"]
    some = [n for n in range(9) if n != 4]
    for part in ("mlp", "logits"):
        a, b = ([s[n]["parts"][part] for n in some] for s in (left, right))
        change = made.rows[0].change(part)
        assert made.rows[0].name == "decode" and change.num_pairs == 8
        assert change.mean == pytest.approx(np.subtract(b, a).mean())
        assert change.p == pytest.approx(stats.ttest_rel(b, a).pvalue)
    said = " ".join(notes(made))
    assert "b: commit cccccccccccc, changed; ksana-jax 0.1, jax 0.10, Python 3.11; cpu, A (avx2)" in said
    assert "other programs used 25% of 2 cores" in said and "name a \N{RIGHTWARDS ARROW} b" in said


@pytest.mark.cpu("a profile of another device has other lines")
def test_a_trace_has_the_table_and_the_circumstances_and_is_compared(tmp_path, run_ksana):
    asked = SamplingParams(max_tokens=12, temperature=0, detokenize=False, ignore_eos=True)
    for name in ("a", "b"):
        with tracing(tmp_path / name, profile_steps=8):
            make_llm(programs={}).generate([[5] * 20, [7] * 9], asked)  # parts are those of compiled texts
    trace = json.loads((tmp_path / "a" / "trace.json").read_text())
    steps = [step for step in recording.read(tmp_path / "a").steps if step.get("parts")]
    # One was submitted before the profiler started.
    assert 6 < len(steps) <= 8 and "decode" in step_parts.by_kind(steps)
    assert all({"qkv", "attention", "mlp", "logits", "sampling"} <= step["parts"].keys() for step in steps)
    [engine] = trace["engines"]
    assert sum(engine["profiled_s"].values()) >= sum(sum(step["parts"].values()) for step in steps) > 0
    page, tex = ((tmp_path / "a" / name).read_text() for name in ("index.html", "engine-1/parts.tex"))
    assert "Parts of the network by kind of step" in page and engine["parts"]["cells"][-1][1] in page
    assert r"\begin{tabular}" in tex and "commit" in tex and "jax" in tex and "other programs used" in tex
    assert trace["load"] is None or 0 <= trace["load"] <= 1
    code, shown, _ = run_ksana("compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "c", "--json")
    assert code == 0 and "a: commit" in shown and "paired t-test" in shown
    rows = json.loads(shown.splitlines()[-1])["rows"]
    assert rows[0]["row"] == "decode" and rows[0]["numbers"]["mlp"]["num_pairs"] > 4
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"parts.md", "parts.tex", "parts.json"}
