"""Several runs in one table, as CSV with a row a trial, and token by token."""

import csv
import io
import shutil

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.combine import combine
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.export import export
from ksana_jax.lab.runs.run import run


def test_runs_on_the_same_texts_stand_in_one_table(make_run, tmp_path, text, run_ksana):
    a = make_run("a", variants=[{"name": "full"}])
    copied = tmp_path / "other name.txt"
    shutil.copy(text, copied)
    b = make_run("b", settings={"texts": [str(copied)]}, grid={"pattern.window": [4, 8]})
    made = combine([a, b])
    assert [(row.label, row.point) for row in made.rows] == [
        ("a: full", {"pattern.window": None}),
        ("b", {"pattern.window": 4}),
        ("b", {"pattern.window": 8}),
    ]
    full, narrow, wide = (row.mean("ppl_32_64") for row in made.rows)
    assert full < wide < narrow
    assert [row.name for row in made.rows] == ["a: full", "b, window 4", "b, window 8"]
    # They scored the same texts, called differently.
    assert made.rows[0].samples["ppl"] == made.rows[1].samples["ppl"]
    assert not any("NOT COMPARABLE" in note for note in made.notes)
    code, shown, _ = run_ksana("report", a, b, "--out", tmp_path / "both")
    assert code == 0 and "a: full" in shown
    assert {"table.md", "table.csv", "table.tex", "figure.png"} <= {p.name for p in (tmp_path / "both").iterdir()}
    assert not (a / "table.md").exists()


def test_runs_on_other_texts_of_the_same_name_are_refused(make_run, tmp_path):
    folders = []
    for name, content in (("a", "0123456789"), ("b", "9876543210")):
        path = tmp_path / name / "x.txt"
        path.parent.mkdir()
        path.write_text(content * 40)
        folders.append(make_run(f"run {name}", settings={"texts": [str(path)]}))
    with pytest.raises(ConfigError, match=r"run a and run b scored different texts or positions \(2 and 2 draws, 0 in"):
        combine(folders)


def test_runs_of_other_lengths_and_seeds_are_refused(make_run):
    a = make_run("a")
    with pytest.raises(ConfigError, match=r"scored different texts or positions \(2 and 2 draws, 0 in common\)"):
        combine([a, make_run("b", settings={"num_tokens": 63})])
    with pytest.raises(ConfigError, match=r"\(2 and 1 draws, 1 in common\)"):
        combine([a, make_run("c", seeds=[0])])
    with pytest.raises(ConfigError, match="a folder is named twice"):
        combine([a, a.parent / "a" / "."])


def test_runs_of_different_tasks_are_refused(make_run, fake, model, tmp_path):
    run(plan({"task": "fake", "model": model}), tmp_path / "fake")
    with pytest.raises(ConfigError, match="a is of task Perplexity, fake of Fake"):
        combine([make_run("a"), tmp_path / "fake"])


def test_an_export_has_a_row_for_each_finished_trial(make_run, run_ksana):
    folder = make_run("a", grid={"pattern.window": [4, 8]}, variants=[{"name": "=x"}])
    rows = list(csv.DictReader(io.StringIO(export(folder))))
    assert [(r["row"], r["pattern.window"], r["seed"]) for r in rows] == [
        ("'=x", w, s) for w in ("4", "8") for s in ("0", "1")
    ]
    assert len({r["trial"] for r in rows}) == 4
    (first, *_) = combine([folder, make_run("b")]).rows
    assert {float(r["ppl_32_64"]) for r in rows[:2]} == set(first.values["ppl_32_64"])
    assert all(float(r["tokens_per_s"]) > 0 for r in rows)
    assert run_ksana("report", folder, "--csv")[:2] == (0, export(folder))


def test_an_export_leaves_out_what_is_not_finished(make_run):
    folder = make_run("a")
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join(lines[:-2]))
    assert [r["seed"] for r in csv.DictReader(io.StringIO(export(folder)))] == ["0"]


def test_saved_tokens_are_those_that_the_perplexity_is_made_of(make_run):
    folder = make_run("a", settings={"save_tokens": True, "num_texts": 2}, seeds=[0])
    (row,) = combine([folder, make_run("b", settings={"num_texts": 2}, seeds=[0])]).rows[:1]
    name = next(m["file"] for m in row.trials[0] if m["metric"] == "tokens")
    with np.load(folder / name) as saved:
        tokens = {key: saved[key] for key in saved.files}
    assert set(tokens) == {"text_digest", "position", "token_id", "logprob"}
    assert {len(column) for column in tokens.values()} == {2 * 63}
    assert tokens["position"].tolist() == [*range(1, 64)] * 2
    digests = {m["text_digest"] for m in row.trials[0] if m["metric"] == "nll"}
    assert set(tokens["text_digest"].tolist()) == digests and len(digests) == 2
    assert np.exp(-tokens["logprob"].mean()) == pytest.approx(row.mean("ppl"), rel=1e-12)
    # The tokenizer of these tests has bytes.
    assert bytes(tokens["token_id"][:10].tolist()) == b"0123456789"


def test_a_recomputed_row_saves_its_sample(make_run, monkeypatch):
    from fake_llm import fake_recompute_score

    from ksana_jax.engine import recompute

    monkeypatch.setattr(recompute, "score", fake_recompute_score)
    settings = {"save_tokens": True, "method": "recompute", "sampled_per_bucket": 2}
    folder = make_run("a", settings=settings, pattern={"window": 8}, seeds=[0])
    (path,) = folder.glob("*.tokens.npz")
    with np.load(path) as saved:
        assert len(saved["position"]) == 6 and saved["position"].min() >= 16


def test_tokens_are_not_kept_unless_asked_for(make_run):
    assert not list(make_run("a").glob("*.npz"))
