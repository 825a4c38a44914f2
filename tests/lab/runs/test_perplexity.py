"""The perplexity task against an engine whose log-probabilities are known: -1 - 1 / (keys attended to)."""

import json
import math
import re

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.config import load, plan
from ksana_jax.lab.runs.report import report
from ksana_jax.lab.runs.run import run
from ksana_jax.lab.runs.significance import baseline_change
from ksana_jax.lab.runs.tasks.base import ResultRow
from ksana_jax.lab.runs.tasks.perplexity import sample_positions
from ksana_jax.lab.runs.tasks.perplexity_figure import _from_sample
from ksana_jax.lab.runs.tasks.perplexity_report import span
from ksana_jax.lab.runs.tasks.results import deviation
from tests.lab.runs.perplexity_runs import VARIANTS, row
from tests.lab.runs.perplexity_runs import experiment as experiment
from tests.lab.runs.perplexity_runs import measured as measured
from tests.lab.runs.runs import reported


def test_perplexity_of_each_span_of_positions_is_that_of_its_tokens(measured):
    _, made, _ = measured
    for label, window, sinks in (("full", 10**9, 0), ("sliding", 8, 0), ("sinks", 8, 2)):
        for low, high in ((0, 16), (16, 32), (32, 64), (64, 128)):
            seen = [min(t, window) + min(sinks, max(0, t - window)) for t in range(max(low, 1), high)]
            expected = math.exp(np.mean([1 + 1 / n for n in seen]))
            assert row(made, label).mean(f"ppl_{low}_{high}") == pytest.approx(expected, rel=1e-12)


def test_every_row_is_scored_on_the_sample_of_the_recomputed_one(measured):
    folder, made, _ = measured
    positions = {
        (m["bucket"], m["positions"], m["count"])
        for r in made.rows
        for m in r.trials[0]
        if m["metric"] == "nll" and m["subset"] == "sampled"
    }
    assert len(positions) == 7
    recompute, sliding = row(made, "recompute"), row(made, "sliding")
    assert recompute.mean("ppl_64_128") is None
    assert recompute.mean("sampled_ppl") == pytest.approx(sliding.mean("sampled_ppl"))
    assert any("the same 28 sampled positions in every row" in note for note in made.notes)
    assert not any("NOT COMPARABLE" in note for note in made.notes)
    assert "ppl* 16–127" in (folder / "table.md").read_text()


def test_texts_scored_side_by_side_have_the_same_perplexity_and_the_kv_of_one(experiment, make_llm, tmp_path, text):
    settings = {"texts": [text], "num_texts": 3, "num_tokens": 100}
    engine = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 2}
    alone, both = (
        reported(
            experiment(settings={**settings, "texts_at_once": count}, engine=engine, pattern={"window": 8}),
            tmp_path / str(count),
            make_llm=make_llm,
        )
        for count in (1, 2)
    )
    (one,), (two,) = alone.rows, both.rows
    for key in one.values.keys() - {"tokens_per_s"}:
        assert two.values[key] == one.values[key], key
    speeds = [m for m in two.trials[0] if m["metric"] == "speed"]
    assert [(m["num_texts"], m["num_scored"]) for m in speeds] == [(2, 198), (1, 99)]
    assert any(note.startswith("Live KV: held of one text after its last token") for note in both.notes)
    with pytest.raises(ConfigError, match=r"settings.texts_at_once is 3, engine.max_num_seqs is 2"):
        experiment(settings={**settings, "texts_at_once": 3}, engine=engine)


def test_all_rows_share_one_engine_and_none_is_timed_while_compiling(measured):
    _, made, engines = measured
    (engine,) = engines
    assert engine.given["max_repositioned_sinks"] == 2
    assert engine.given["max_model_len"] == 129
    assert [r.mean("compiled_while_timed") for r in made.rows] == [0, 0, 0, 0]
    # Steps of 16 tokens, then the 9 of a recomputed window; nothing for sliding or sinks.
    assert [r.mean("num_compilations") for r in made.rows] == [1, 0, 0, 1]


def test_the_sentence_says_what_the_numbers_say(measured):
    _, made, _ = measured
    assert made.conclusion == (
        "At positions 64 to 127 'sinks' has the lowest perplexity of the compressed rows, 3.00, against 2.75 of 'full' "
        "(+9.3 %; not resolved: one run each), with 3 KiB of KV, 9.4% of what 'full' holds; on the sampled positions "
        "'recompute' has 3.08 against its 3.00."
    )


@pytest.mark.parametrize(
    ("variants", "said"),
    [
        (
            VARIANTS[:2],
            "'sliding' has a perplexity of 3.08, against 2.75 of 'full' (+12.1 %; not resolved: one run each)",
        ),
        (VARIANTS[1:3], "'sinks' has the lowest perplexity, 3.00 (not resolved: one run each), with 3 KiB of KV."),
        (VARIANTS[:1], "'full' has a perplexity of 2.75, with 32 KiB of KV."),
        # A window that is another model's, or on other texts, says nothing about this one's.
        (
            [{"name": "full", "settings.num_tokens": 120}, VARIANTS[1]],
            "'sliding' has a perplexity of 3.08, with 2 KiB of KV.",
        ),
    ],
)
def test_the_sentence_compares_the_best_compressed_row_with_the_full_cache_of_the_same_task(
    experiment, make_llm, tmp_path, variants, said
):
    made = reported(experiment(variants=variants), tmp_path / "out", make_llm=make_llm)
    assert said in made.conclusion


def test_speed_is_in_the_records_and_in_no_table_of_a_quality(measured):
    folder, made, _ = measured
    assert not made.task.measures_speed and row(made, "full").mean("tokens_per_s") > 0
    for name in ("table.md", "table.tex"):
        assert "tokens/s" not in (folder / name).read_text()
    assert "tokens_per_s" in (folder / "table.csv").read_text()
    assert "times slower" not in made.conclusion and not any("tokens/s" in note for note in made.notes)


def test_the_report_is_made_again_from_the_records_to_the_byte(measured):
    folder, _, _ = measured
    names = ("table.md", "table.csv", "table.tex", "figure.png", "figure.pdf")
    before = {name: (folder / name).read_bytes() for name in names}
    for path in folder.iterdir():
        if path.name != "records.jsonl":
            path.unlink()
    report(folder)
    assert {name: (folder / name).read_bytes() for name in names} == before
    assert before["figure.png"].startswith(b"\x89PNG") and len(before["figure.png"]) > 10_000
    # fonttype 42: TrueType outlines, which journals take; Type 3 they do not.
    assert b"/CIDFontType2" in before["figure.pdf"] and b"/Type3" not in before["figure.pdf"]


def test_seeds_add_texts_of_which_each_counts_by_its_tokens(experiment, make_llm, tmp_path, text):
    shorter = tmp_path / "other.txt"
    shorter.write_text("abc" * 100)
    made = experiment(seeds=[0, 1, 2], settings={"texts": [text, str(shorter)], "num_texts": 1, "num_tokens": 64})
    (only,) = reported(made, tmp_path / "out", make_llm=make_llm).rows
    assert len(only.trials) == 3
    assert only.sd("ppl") is None and "±" not in (tmp_path / "out/table.md").read_text()
    assert set(only.weights["ppl"]) == {63} and len(set(only.samples["ppl"])) == len(only.values["ppl"])
    assert len(make_llm.instances) == 1


def test_seeds_that_scored_the_same_text_are_one_measurement(experiment, make_llm, tmp_path, text):
    made = experiment(
        seeds=[0, 1, 2],
        settings={"texts": [text], "num_texts": 1, "num_tokens": 256},
        variants=[{"name": "full"}, {"name": "sliding", "pattern.window": 8}],
    )
    made = reported(made, tmp_path / "out", make_llm=make_llm)
    assert [len(r.trials) for r in made.rows] == [3, 3]
    assert [len(r.values["ppl_64_128"]) for r in made.rows] == [1, 1]
    # Repeats of a speed are measurements.
    assert [len(r.values["tokens_per_s"]) for r in made.rows] == [3, 3]
    table = (tmp_path / "out/table.md").read_text()
    assert "± 0.00" not in table
    assert "2 of 3 seeds scored a text that another had scored: counted once." in made.notes
    assert "Not resolved: one run each. Only exact counts are bold." in made.notes
    assert "not resolved: one run each" in made.conclusion


def test_seeds_draw_disjoint_excerpts_of_one_text_while_it_holds_any(experiment, make_llm, tmp_path):
    numbers = tmp_path / "numbers.txt"
    numbers.write_text("".join(f"{n:04d}" for n in range(1000)))
    made = experiment(seeds=[0, 1, 2, 3], settings={"texts": [str(numbers)], "num_texts": 2, "num_tokens": 401})
    (row,) = reported(made, tmp_path / "out", make_llm=make_llm).rows
    names = [m["text"] for trial in row.trials for m in trial if m["metric"] == "speed"]
    assert len(set(names)) == 8 and names[0] == "numbers.txt" and "numbers.txt from token " in names[1]
    assert len(row.values["ppl"]) == 8
    assert not any("counted once" in note for note in report(tmp_path / "out").notes)


def test_rows_are_told_apart_by_their_differences_on_each_text(experiment, make_llm, tmp_path, monkeypatch):
    numbers = tmp_path / "numbers.txt"
    numbers.write_text("".join(f"{n:04d}" for n in range(1000)))
    scores = make_llm._scores

    def of_text(self, ids):
        # A text's own difficulty is ten times what the window costs.
        entries = scores(self, ids)
        for t, entry in enumerate(entries):
            if entry:
                entry[ids[t]] = entry[ids[t]].__class__(entry[ids[t]].logprob - sum(ids) % 97 / 30, 1)
        return entries

    monkeypatch.setattr(make_llm, "_scores", of_text)
    settings = {"texts": [str(numbers)], "num_texts": 1, "num_tokens": 256}
    variants = [{"name": "full"}, {"name": "sliding", "pattern.window": 8}]
    made = reported(
        experiment(seeds=[0, 1, 2, 3], settings=settings, variants=variants), tmp_path / "out", make_llm=make_llm
    )
    full, sliding = made.rows
    assert full.samples["ppl"] == sliding.samples["ppl"] and len(full.values["ppl"]) == 4
    change = baseline_change(sliding, "ppl")
    assert deviation(full.values["ppl"]) > 5 * (sliding.mean("ppl") - full.mean("ppl")) > 0 and change.mean > 0
    # On each text the window costs the same, to the last digits.
    assert [b / a for a, b in zip(full.values["ppl"], sliding.values["ppl"], strict=True)] == pytest.approx(
        [1 + change.mean] * 4
    )
    assert any("on the same texts" in note for note in made.notes)


def test_rows_on_different_positions_are_called_not_comparable(experiment, make_llm, tmp_path):
    made = experiment(variants=[{"name": "a"}, {"name": "b", "settings.num_tokens": 64}])
    run(made, tmp_path / "out", make_llm=make_llm)
    assert any("NOT COMPARABLE" in note for note in report(tmp_path / "out").notes)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"settings": {"method": "recompute", "sampled_per_bucket": 2}}, "needs pattern.window"),
        ({"settings": {"method": "recompute"}, "pattern": {"window": 8}}, "needs settings.sampled_per_bucket"),
        (
            {"settings": {"method": "recompute", "sampled_per_bucket": 2}, "pattern": {"window": 8, "num_sinks": 1}},
            "supports pattern.window and no other field",
        ),
        (
            {"settings": {"texts_at_once": 2}, "engine": {"kv_eviction": {"method": "oracle", "prompts": "streamed"}}},
            "settings.texts_at_once is 2, engine.kv_eviction.method 'oracle' knows one text at a time",
        ),
        (
            {"settings": {}, "engine": {"kv_selection": {"method": "quest"}}},
            "engine.kv_selection.prompts is 'whole', which selects only after a prompt and would not",
        ),
        (
            {"settings": {}, "engine": {"kv_eviction": {"method": "tova", "prompts": "once"}}},
            "prompts is 'once', which evicts only after a prompt .* or give settings.context_tokens",
        ),
        (
            {"settings": {"context_tokens": 64, "num_tokens": 64}},
            "context_tokens is 64, must be less than num_tokens 64",
        ),
        (
            {"settings": {"context_tokens": 8}, "engine": {"kv_eviction": {"method": "tova", "prompts": "streamed"}}},
            "context_tokens is given, but engine.kv_eviction.prompts is 'streamed', which evicts before and after it",
        ),
        ({"settings": {"stride": 65, "num_tokens": 64}}, "settings.stride is 65, must be an integer from 1 to 64"),
        (
            {"settings": {"stride": 8, "sampled_per_bucket": 1}},
            "settings.stride is given, but sampled positions may be in two overlapping excerpts",
        ),
        ({"settings": {"context_tokens": 0}}, "settings.context_tokens is 0, must be an integer from 1"),
        (
            {
                "settings": {"method": "recompute", "sampled_per_bucket": 2, "context_tokens": 8},
                "pattern": {"window": 8},
            },
            "settings.context_tokens is given, but settings.method 'recompute' compresses nothing",
        ),
        ({"settings": {"num_texts": 0}}, "settings.num_texts is 0, must be an integer from 1"),
        ({"settings": {"method": "guess"}}, "settings.method: Invalid value 'guess'"),
        ({"settings": {"texts": ["missing.txt"]}}, "missing.txt: no such text file"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_runs(model, text, fields, said):
    fields["settings"] = {"texts": [text], **fields["settings"]}
    with pytest.raises((ConfigError, FileNotFoundError), match=said):
        plan({"model": model, **fields})


def test_texts_that_are_too_short_are_counted(experiment, make_llm, tmp_path, text):
    made = experiment(settings={"texts": [text], "num_texts": 1, "num_tokens": 1000})
    outcome = run(made, tmp_path / "out", make_llm=make_llm)
    (error,) = outcome.failed.values()
    assert error == (
        "ConfigError: settings.num_texts is 1, but the texts have 0 excerpts of 1,000 tokens: 400 tokens in total "
        "without BOS, the longest 400; files: 1. Set settings.num_tokens=401"
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"settings": {"num_texts": 7, "num_tokens": 64}}, r"settings\.num_texts is 7, but the texts have 6 excerpts"),
        ({"task": "generate", "settings": {"num_prompts": 50}}, r"settings\.num_prompts is 50, but the texts have 3"),
        (
            {"task": "compare", "settings": {"num_sequences": 99, "apart": True}},
            r"num_sequences / settings\.width is 99",
        ),
    ],
)
def test_texts_that_are_too_few_are_refused_once_and_before_anything_runs(one_layer, text, fields, said):
    fields["settings"] = {"texts": [text], **fields["settings"]}
    with pytest.raises(ConfigError, match=said):
        plan({"model": one_layer, "load_format": "dummy", "seeds": [0, 1, 2], **fields})


def test_a_shipped_sweep_over_longer_texts_says_what_to_set(tmp_path):
    (tmp_path / "mine.txt").write_text("def f(x):\n    return x\n" * 100)
    pinned = [f"settings.texts=[{tmp_path / 'mine.txt'}]"]
    with pytest.raises(
        ConfigError, match=r"Set settings\.num_tokens=(\d+) and pattern\.window, 64 here, below"
    ) as said:
        load("sink_window", [*pinned, "settings.num_texts=30"])
    length = int(re.search(r"num_tokens=(\d+)", str(said.value))[1])
    fits = [*pinned, "settings.num_texts=30", "grid.pattern.window=[8,16]"]
    assert load("sink_window", [*fits, f"settings.num_tokens={length}"]).trials
    with pytest.raises(ConfigError, match=f"Set settings.num_tokens={length}$"):
        load("sink_window", [*fits, f"settings.num_tokens={length + 1}"])


def test_a_sample_is_spread_over_the_buckets_and_leaves_out_the_first():
    sample = sample_positions(100, 32, 5, [7, 0])
    assert [np.count_nonzero(sample // 32 == b) for b in range(4)] == [0, 5, 5, 4]
    assert len(set(sample.tolist())) == len(sample)
    assert sample.tolist() == sample_positions(100, 32, 5, [7, 0]).tolist()
    assert len(sample_positions(100, 32, 0, [0])) == 0


def test_spans_double():
    assert [span(b) for b in range(9)] == [(0, 1), (1, 2), (2, 4), (2, 4), (4, 8), (4, 8), (4, 8), (4, 8), (8, 16)]


def test_the_csv_has_full_precision(measured):
    folder, made, _ = measured
    header, first, *_ = (folder / "table.csv").read_text().splitlines()
    fields = dict(zip(header.split(","), first.split(","), strict=True))
    assert float(fields["ppl_64_128"]) == row(made, "full").mean("ppl_64_128")
    assert json.loads((folder / "records.jsonl").read_text().splitlines()[0])["kind"] == "plan"


def test_a_sampled_curve_is_the_nearest_row_plus_the_difference_on_the_sample():
    def row(name, **subsets):
        trial = [
            {"metric": "nll", "subset": s, "bucket": b, "sum": v * 2, "count": 2}
            for s, means in subsets.items()
            for b, v in enumerate(means)
        ]
        return ResultRow(name, {}, 1, [trial], {})

    near = row("near", all=[1.0, 2.0], sampled=[1.5, 1.0])
    far = row("far", all=[3.0, 4.0], sampled=[3.5, 3.0])
    sampled = row("sampled", sampled=[1.6, 1.2])
    assert _from_sample(sampled, [far, near, sampled]) == pytest.approx({0: 1.1, 1: 2.2})
    assert _from_sample(sampled, [sampled]) == pytest.approx({0: 1.6, 1: 1.2})


def test_the_note_says_whether_texts_begin_with_bos(experiment, make_llm, tmp_path, text):
    for bos in (True, False):
        settings = {"texts": [text], "num_texts": 1, "num_tokens": 64, "bos": bos}
        made = reported(experiment(settings=settings), tmp_path / str(bos), make_llm=make_llm)
        assert ("BOS first" in made.notes[1]) == bos
