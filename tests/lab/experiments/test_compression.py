"""The rows that count as full cache, and the one that a compressed row is compared with."""

import pytest

from ksana_jax.lab.experiments.config import plan
from ksana_jax.lab.experiments.identity import defining
from ksana_jax.lab.experiments.tasks.base import ResultRow
from ksana_jax.lab.experiments.tasks.compression import foresees, full_row, is_compressed, kv_said

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
    assert [foresees(row) for row in rows] == [True, False, False]
    assert not foresees(row(model))


def test_the_share_of_the_full_cache_is_said_where_both_were_measured(model):
    full, window = row(model, "full", 4096.0), row(model, "w", 1024.0, **WINDOW)
    assert kv_said(window, full) == ", with 1 KiB of KV, 25.0% of what 'full' holds"
    assert kv_said(window) == ", with 1 KiB of KV"
    assert kv_said(ResultRow("x", {}, 1, [[]], {}), full) == ""
