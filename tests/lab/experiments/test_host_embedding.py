"""The host_embedding task on the real engine, with a model of two narrow layers."""

import dataclasses

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.experiments.config import plan
from ksana_jax.lab.experiments.tasks import host_embedding
from ksana_jax.models.params import num_params
from tests.lab.experiments.runs import reported
from tests.loading.models_on_disk import TINY, write_config
from tests.runner.planner.models import STEP

pytestmark = pytest.mark.usefixtures("few_shapes")

# The embedding takes 256 * 32 * 4 = 32 KiB, as much as four blocks of 16 * 2 * 2 * 4 * 8 * 4 = 8 KiB.
MODEL = dataclasses.replace(TINY, vocab_size=256, d_model=32, num_kv_heads=4, d_ff=48)


def given(tmp_path, **changes):
    write_config(tmp_path / "model", MODEL)
    model = str(tmp_path / "model")
    settings = {
        "num_requests": 5,
        "prompt_tokens": 16,
        "output_tokens": 14,
        "planned_model": model,
        "planned_device": "1GiB",
        "planned_dtype": "f32",
        "planned_context": 32,
    }
    engine = {"num_blocks": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "query_tile": 16}
    engine["operators"] = {"linear": "xla"}  # others fill small matrices up
    base = {"task": "host_embedding", "model": model, "load_format": "dummy", "engine": engine, "settings": settings}
    return base | changes


def test_the_embeddings_bytes_become_blocks_and_more_rows_run_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(host_embedding, "_step", lambda *_: STEP)  # nothing is compiled for the plan
    made = reported(plan(given(tmp_path)), tmp_path / "out")
    (row,) = made.rows
    assert (row.mean("measured_blocks_without"), row.mean("measured_blocks_with")) == (4, 8)
    # Two rows of two blocks each fit beforehand, four afterwards.
    assert row.mean("mean_running_with") > 1.3 * row.mean("mean_running_without")
    assert row.mean("num_steps_with") < row.mean("num_steps_without")
    assert row.mean("measured_share") == row.mean("planned_share") == 256 * 32 / num_params(MODEL)
    assert row.mean("planned_blocks_with") > row.mean("planned_blocks_without")
    assert "% blocks" in made.conclusion and "KsanaLLM's article" in " ".join(made.notes)
    assert (tmp_path / "out" / "figure.png").stat().st_size > 1000


def test_the_engine_given_has_its_embedding_on_the_device(tmp_path):
    for changed in ({"embedding_device": "host", "num_blocks": 4}, {"num_blocks": None}):
        with pytest.raises(ConfigError, match="num_blocks must be set, and engine"):
            plan(given(tmp_path, engine=changed))
    with pytest.raises(ConfigError, match="device is 'gtx', must be one of"):
        plan(given(tmp_path, settings={"planned_device": "gtx", "planned_model": str(tmp_path / "model")}))
