"""Runs of the perplexity task on a fake engine, as fixtures: import `experiment` and `measured` where they are used."""

import pytest
from fake_llm import fake_recompute_score

from ksana_jax.lab.runs.config import plan
from tests.lab.runs.runs import reported

VARIANTS = [
    {"name": "full"},
    {"name": "sliding", "pattern.window": 8},
    {"name": "sinks", "pattern": {"window": 8, "num_sinks": 2, "sink_position": "cache"}},
    {"name": "recompute", "pattern.window": 8, "settings.method": "recompute"},
]


@pytest.fixture
def experiment(model, text):
    def make(**fields):
        engine = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 1}
        settings = {"texts": [text], "num_texts": 1, "num_tokens": 128, "sampled_per_bucket": 4}
        return plan({"name": "small", "model": model, "engine": engine, "settings": settings, **fields})

    return make


@pytest.fixture
def measured(experiment, make_llm, tmp_path, monkeypatch):
    """Folder, report and fake engines of a run over VARIANTS."""
    from ksana_jax.engine import recompute

    monkeypatch.setattr(recompute, "score", fake_recompute_score)
    made = reported(experiment(variants=VARIANTS), tmp_path / "out", make_llm=make_llm)
    return tmp_path / "out", made, make_llm.instances


def row(made, label):
    return next(r for r in made.rows if r.label == label)
