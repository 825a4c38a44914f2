"""The rows that count as full cache, and the one that a compressed row is compared with."""

import dataclasses

import pytest

from ksana_jax.lab.runs import noise, tables
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.identity import defining
from ksana_jax.lab.runs.tasks.base import ResultRow
from ksana_jax.lab.runs.tasks.compression import best_and_full, full_row, is_compressed, kv_said, marked, simulated_note
from ksana_jax.lab.runs.tasks.perplexity_report import PerplexityResults
from ksana_jax.lab.runs.tasks.results import extremes

WINDOW = {"pattern": {"window": 8}}


def row(model, label="", live_kv_bytes=0.0, **fields):
    (trial,) = plan({"task": "generate", "model": model, **fields}).trials
    return ResultRow(label, {}, 1, [[]], {"live_kv_bytes": [live_kv_bytes]}, config=defining(trial.config))


@pytest.mark.parametrize(
    ("fields", "compressed"),
    [
        ({}, False),
        ({"pattern": "full"}, False),
        ({"pattern": {"num_sinks": 4}}, False),  # without a window, everything is seen
        ({"engine": {"kv_cache_dtype": "float32"}}, False),
        ({"engine": {"dtype": "bf16"}}, False),
        ({"engine": {"dtype": "bf16", "kv_cache_dtype": "bf16"}}, False),
        ({"engine": {"kv_eviction": {"method": "h2o", "budget": 1.0}}}, False),
        (WINDOW, True),
        ({"pattern": "streaming_llm"}, True),
        ({"engine": {"kv_cache_dtype": "bf16"}}, True),
        ({"engine": {"kv_cache_dtype": {"k": "kivi2", "v": "kivi4"}}}, True),
        ({"engine": {"kv_eviction": {"method": "h2o"}}}, True),
        ({"engine": {"kv_eviction": {"method": "h2o", "budget": 64}}}, True),
        ({"engine": {"kv_eviction": {"method": "h2o", "budget": 1.0, "layers": "pyramid"}}}, True),
    ],
)
def test_a_row_is_compressed_if_it_drops_tokens_or_stores_fewer_bits(model, fields, compressed):
    assert is_compressed(row(model, **fields)) == compressed


def test_one_layer_with_a_window_is_compressed():
    full, mixed = (row("ksana-tiny", layer_patterns=[{}, {}, {}, last]) for last in ({}, {"window": 8}))
    assert [is_compressed(r) for r in (full, mixed)] == [False, True]


def test_a_compressed_row_is_compared_with_the_full_row_of_its_model_and_task(model):
    wide, plain = row(model, "bf16", engine={"dtype": "bf16"}), row(model, "f32")
    other = row("ksana-tiny", "other model")
    longer = row(model, "longer", settings={"prompt_tokens": 64})
    rows = [other, longer, wide, plain]
    assert full_row(row(model, **WINDOW), rows) is plain
    assert full_row(row(model, engine={"dtype": "bf16"}, **WINDOW), rows) is wide
    assert full_row(row("ksana-tiny", **WINDOW), rows) is other
    assert full_row(row(model, settings={"prompt_tokens": 65}, **WINDOW), rows) is None
    # Of rows whose settings are not known, none is the full cache.
    assert full_row(row(model, **WINDOW), [ResultRow("unknown", {}, 1, [[]], {})]) is None


def test_a_method_that_must_know_the_text_is_told_from_one_that_can_serve(model):
    methods = [{"method": "oracle"}, {"method": "h2o"}, {"method": "no_longer_there:At"}]
    rows = [ResultRow("", {}, 1, [[]], {}, config={"engine": {"kv_eviction": method}}) for method in methods]
    assert [marked(row, {}).foresees for row in rows] == [True, False, False]
    assert marked(rows[2], {"foresees": True}).foresees  # as its records say
    assert not marked(row(model), {}).foresees


def test_the_share_of_the_full_cache_is_said_where_both_were_measured(model):
    full, window = row(model, "full", 4096.0), row(model, "w", 1024.0, **WINDOW)
    assert kv_said(window, full) == ", with 1 KiB of KV, 25.0% of what 'full' holds"
    assert kv_said(window) == ", with 1 KiB of KV"
    assert kv_said(ResultRow("x", {}, 1, [[]], {}), full) == ""


@pytest.mark.parametrize(
    "setting", [{"method": "adakv", "of": {"method": "knorm"}}, {"method": "h2o", "memory": "simulated"}]
)
def test_simulated_memory_shares_no_column_of_bytes_and_no_rank(model, setting):
    def measured(label, ppl, **fields):
        made = row(model, label, 1024.0, task="perplexity", settings={"num_tokens": 16, "context_tokens": 8}, **fields)
        values = {f"{kind}_kv_bytes": [1024.0] for kind in ("live", "peak")} | {
            "ppl_0_16": ppl,
            "kv_token_bytes": [8.0],
        }
        return marked(dataclasses.replace(made, values=values, trials=[[]]), {})

    full, freed = measured("full", [4.0, 4.1]), measured("freed", [5.0, 5.1], engine={"kv_eviction": {"method": "h2o"}})
    better = measured("better", [4.5, 4.6], engine={"kv_eviction": setting})
    better.values["simulated_kv_bytes"] = [512.0]  # type: ignore[index]
    rows = [better, freed, full]
    assert better.label == better.name == "better (simulated memory)"
    columns = PerplexityResults().columns(rows)
    heads, texts, bold = tables.grid(rows, columns)
    of_bytes = [i for i, head in enumerate(heads) if "KV" in head and "simulated" not in head]
    assert of_bytes and all(texts[0][i] == tables.MISSING for i in of_bytes)
    simulated = heads.index("simulated KV, KiB")
    assert [line[simulated] for line in texts] == ["0.5", tables.MISSING, tables.MISSING]
    assert not any(bold[0]) and better not in [r for c in columns for r in noise.leaders(rows, c)]
    assert best_and_full(rows, lambda r: r.mean("ppl_0_16")) == (freed, full)
    assert [r.label for _, r in extremes([better, freed], "ppl_0_16")] == ["freed", "freed"]
    assert (
        "better" not in PerplexityResults().conclusion(rows) and simulated_note(rows) and not simulated_note(rows[1:])
    )
    assert kv_said(better, full) == ", with simulated memory"
    # Among themselves they are compared.
    assert best_and_full([better], lambda r: r.mean("ppl_0_16"))[0] is better
