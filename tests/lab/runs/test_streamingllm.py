"""The study of StreamingLLM's table 2 needs only the name of a model: here tiny ones of its families."""

import shutil

import numpy as np
import pytest

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import NO_ROPE, RopeConfig
from ksana_jax.core.shipped import experiment_path
from ksana_jax.core.sources import model_path
from ksana_jax.lab.runs.config import load
from ksana_jax.loading import export_hf, load_config
from ksana_jax.models.families.mpt import alibi_slopes
from ksana_jax.models.params import init_params
from tests.lab.runs.runs import Engines, reported

SHAPE = {"d_model": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "d_ff": 64, "mlp": "gelu"}
BIASES = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)
FAMILIES = {
    "mpt": {"norm": "layer_no_bias", "rope": NO_ROPE, "alibi": alibi_slopes(2), "tie_embeddings": True},
    "gpt_neox": {"norm": "layer", "norm_placement": "parallel", "rope": RopeConfig(partial_rotary_factor=0.25)}
    | BIASES,
}
ROWS = ["no sink", "1 sink", "2 sinks", "4 sinks", "8 sinks"]


@pytest.mark.filterwarnings("ignore:max_model_len is 257, the model was trained for 32 positions")
@pytest.mark.parametrize("family", FAMILIES)
def test_only_a_name_is_needed(family, tmp_path):
    vocab_size = load_config(model_path("ksana-tiny")).vocab_size
    config = ModelConfig(family=family, vocab_size=vocab_size, max_position=32, bos_id=1, **SHAPE, **FAMILIES[family])
    export_hf(tmp_path / "model", config, init_params(config, std=0.5))
    for path in model_path("ksana-tiny").glob("tokenizer*"):
        shutil.copy(path, tmp_path / "model")
    study = load(experiment_path("streamingllm"), [f"model={tmp_path / 'model'}", "seeds=[0]", "engine.block_size=8"])
    made = reported(study, tmp_path / "out", make_llm=Engines())
    assert [row.label for row in made.rows] == ROWS
    perplexities = [row.mean("ppl") for row in made.rows]
    assert np.isfinite(perplexities).all() and len(set(perplexities)) == len(ROWS)
