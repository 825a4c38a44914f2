"""The tasks on the real engine, with a model of one layer: it has to be compiled."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from ksana_jax.lab.runs import kept_figure, texts
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.tasks.perplexity import sample_positions
from tests.lab.runs.runs import Engines, reported

# Texts beyond the training context are what these experiments are for.
pytestmark = [pytest.mark.filterwarnings("ignore:max_model_len"), pytest.mark.usefixtures("few_shapes")]
ENGINE = {"block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 1}


@pytest.fixture(scope="module")
def measured(tmp_path_factory, one_layer):
    """Rows by label of a perplexity run over 256 tokens, and the engines that it built."""
    variants = [
        {"name": "full"},
        {"name": "sliding", "pattern.window": 32},
        {"name": "sinks", "pattern": {"window": 32, "num_sinks": 4, "sink_position": "cache"}},
        {"name": "ceiling", "pattern": {"window": 32, "num_sinks": 2, "sink_position": "ceiling"}},
        {"name": "recompute", "pattern.window": 32, "settings.method": "recompute"},
    ]
    settings = {"num_texts": 1, "num_tokens": 256, "bucket_tokens": 64, "sampled_per_bucket": 2}
    given = {"model": one_layer, "load_format": "dummy", "settings": settings, "variants": variants}
    given["engine"] = ENGINE | {"kept_tokens": True}
    engines = Engines()
    folder = tmp_path_factory.mktemp("out")
    made = reported(plan(given), folder, make_llm=engines)
    return {row.label: row for row in made.rows}, engines


def test_one_engine_serves_all_patterns_and_compiles_each_shape_once(measured):
    rows, engines = measured
    assert len(engines) == 1
    assert rows["full"].mean("num_compilations") > 0
    # A window needs other shapes than a growing table, but all windows the same ones.
    assert [rows[name].mean("num_compilations") for name in ("sinks", "ceiling")] == [0, 0]


def test_kept_tokens_are_a_column_and_saved_and_drawn(measured, tmp_path_factory):
    rows, _ = measured
    shares = {name: row.mean("kept") for name, row in rows.items()}
    assert shares == {"full": 1, "sliding": 32 / 256, "sinks": 36 / 256, "ceiling": 34 / 256, "recompute": None}
    name = next(m["file"] for m in rows["sliding"].trials[0] if m["metric"] == "kept")
    with np.load(next(tmp_path_factory.getbasetemp().glob(f"out*/{name}"))) as texts:
        [kept] = [texts[digest] for digest in texts.files]
    assert kept.shape[2] == 256 and kept[..., -32:].all() and not kept[..., :-32].any()
    figure = Figure()
    kept_figure.draw(figure, kept)
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), kept.mean(axis=1))
    figure = Figure()
    kept_figure.draw(figure, kept, heads=[0])
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), kept[:, 0])
    assert figure.axes[0].get_ylabel() == "layer, head 0"


def test_a_window_bounds_the_kv_that_is_held(measured):
    rows, (engine,) = measured
    held = {name: rows[name].mean("live_kv_bytes") / engine.block_bytes for name in ("full", "sliding", "sinks")}
    # 256 tokens in blocks of 16; the 31 before the next one are in two of them; sinks take one.
    assert held["full"] == 16
    assert held["sliding"] == 2
    assert held["sinks"] == held["sliding"] + 1


def test_perplexity_is_that_of_the_log_probabilities_of_one_request(measured):
    from ksana_jax import SamplingParams

    rows, (engine,) = measured
    (excerpt,) = texts.draw_excerpts([], engine.tokenizer, 1, texts.ExcerptSpec(256), 0)
    ids = excerpt.ids
    assert excerpt.name == next(m["text"] for m in rows["full"].trials[0] if m["metric"] == "nll")
    engine.set_pattern(None)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    (output,) = engine.generate({"prompt_token_ids": ids}, params)
    scores = np.array([output.prompt_logprobs[t][ids[t]].logprob for t in range(1, 256)])
    assert rows["full"].mean("ppl") == pytest.approx(math.exp(-scores.mean()), rel=1e-6)
    sample = sample_positions(256, 64, 2, [0, 0])
    assert rows["full"].mean("sampled_ppl") == pytest.approx(math.exp(-scores[sample - 1].mean()), rel=1e-6)
    assert set(rows["recompute"].values) >= {"sampled_ppl", "peak_kv_bytes", "tokens_per_s"}


def test_a_context_is_compressed_before_the_rest_is_scored(tmp_path, one_layer):
    kept = {"method": "window", "budget": 32, "prompts": "once"}
    settings = {"num_texts": 1, "num_tokens": 256, "bucket_tokens": 128, "context_tokens": 128}
    given = {"model": one_layer, "load_format": "dummy", "engine": ENGINE, "settings": settings}
    given |= {"variants": [{"name": "full"}, {"name": "compressed", "engine.kv_eviction": kept}]}
    rows = {row.label: row for row in reported(plan(given), tmp_path, make_llm=Engines()).rows}
    blocks = {name: row.mean("live_kv_bytes") / rows["full"].mean("live_kv_bytes") for name, row in rows.items()}
    assert blocks == {"full": 1, "compressed": (32 + 128) / 256}
    nll = {name: [m["sum"] for m in row.trials[0] if m["metric"] == "nll"] for name, row in rows.items()}
    assert nll["full"][0] == pytest.approx(nll["compressed"][0], rel=1e-5) and nll["full"][1] != nll["compressed"][1]


def test_generation_reports_time_and_blocks(tmp_path, one_layer):
    settings = {"num_prompts": 3, "prompt_tokens": 40, "output_tokens": 8}
    engine = {"block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    given = {"task": "generate", "model": one_layer, "load_format": "dummy", "engine": engine, "settings": settings}
    (row,) = reported(plan(given), tmp_path).rows
    assert row.mean("tokens_per_s") > 0 and row.mean("ttft_s") > 0 and row.mean("tpot_s") > 0
    kv = next(m for m in row.trials[0] if m["metric"] == "kv")
    # 47 tokens are computed of each of three requests: three blocks.
    assert kv["max_peak_blocks"] == 9
    assert kv["num_preemptions"] == 0


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("divergence", {"num_texts": 2, "prompt_tokens": 40, "output_tokens": 6}),
        ("recall", {"num_tokens": 300, "num_examples": 2}),
        ("ruler", {"tasks": ["fwe"], "num_tokens": 650, "num_examples": 2}),
    ],
)
def test_other_tasks_have_the_column_too(tmp_path, one_layer, task, settings):
    engine = ENGINE | {"kept_tokens": True}
    given = {"task": task, "model": one_layer, "load_format": "dummy", "engine": engine, "settings": settings}
    made = reported(plan(given | {"pattern": {"window": 32}}), tmp_path / "out")
    [kept] = [m for row in made.rows for m in row.trials[0] if m["metric"] == "kept"]
    with np.load(tmp_path / "out" / kept["file"]) as found:
        masks = [found[digest] for digest in found.files]
    assert len(masks) == 2 and all(mask[..., -32:].all() and not mask[..., :-32].any() for mask in masks)
    assert made.rows[0].mean("kept") == pytest.approx(np.mean([32 / mask.shape[-1] for mask in masks]))
    assert "tokens kept, %" in [column.title for column in made.columns]
