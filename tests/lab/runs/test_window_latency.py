"""The task window_latency against an engine that counts its blocks; its times are what a clock of the test says."""

from types import SimpleNamespace

import pytest

from experiments.latency_memory_window import task as window_latency
from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.config import plan
from tests.lab.runs.runs import reported


def experiment(model, **fields):
    engine = {"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 1, "max_model_len": 256}
    given = {
        "task": "experiments.latency_memory_window.task:WindowLatency",
        "model": model,
        "engine": engine,
        "settings": {"num_streamed": 8},
    }
    return plan({**given, "pattern": {"num_sinks": 4}, "grid": {"pattern.window": [8, 16]}, "seeds": [0, 1], **fields})


def test_both_sides_of_a_row_are_measured_on_one_engine(model, make_llm, tmp_path, monkeypatch):
    # Two calls of the clock for each recomputation of two tokens: 3 s per token.
    ticks = iter(range(0, 1000, 6))
    monkeypatch.setattr(window_latency, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    made = reported(experiment(model), tmp_path / "out", make_llm=make_llm)
    assert len(make_llm.instances) == 1
    for row, window in zip(made.rows, (8, 16), strict=True):
        assert row.mean("recomputed_s") == 3 and row.mean("compiled_while_timed") == 0
        assert row.mean("speedup") == pytest.approx(3 / (row.mean("streamed_s") or 0))
        assert row.mean("recomputed_kv_bytes") == window // 4 * 1024
        # Sinks, the window, and the next block.
        assert row.mean("streamed_kv_bytes") == (1 + window // 4 + 1) * 1024
    sides = [[m["side"] for m in trial] for trial in made.rows[0].trials]
    assert sides == [["streamed", "recomputed"], ["recomputed", "streamed"]]
    assert (tmp_path / "out/figure.pdf").stat().st_size > 0


def test_a_pattern_without_a_window_is_refused(model):
    with pytest.raises(ConfigError, match=r"needs pattern\.window"):
        experiment(model, pattern=None, grid={})
