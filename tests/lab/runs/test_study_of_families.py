"""StreamingLLM's study of sinks and windows runs on models of the paper's other families, given as folders."""

import dataclasses
import math
import shutil

import pytest

from ksana_jax.core.layer_spec import NO_ROPE, RopeConfig
from ksana_jax.core.sources import model_path
from ksana_jax.lab.runs.config import load
from ksana_jax.models.families.mpt import alibi_slopes
from tests.lab.runs.runs import reported
from tests.loading.models_on_disk import TINY, random_tensors, write_model

BASE = dataclasses.replace(TINY, vocab_size=2048, num_kv_heads=4, head_dim=4, max_position=16, mlp="gelu")
BIASES = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)
MODELS = {
    "MPT": dataclasses.replace(
        BASE, family="mpt", norm="layer_no_bias", d_ff=64, rope=NO_ROPE, alibi=alibi_slopes(4), tie_embeddings=True
    ),
    "Pythia": dataclasses.replace(
        BASE,
        **BIASES,
        family="gpt_neox",
        norm="layer",
        norm_placement="parallel",
        rope=RopeConfig(partial_rotary_factor=0.5),
    ),
    "Falcon": dataclasses.replace(
        BASE, family="falcon", norm="layer", norm_placement="parallel_shared", num_kv_heads=1
    ),
}


@pytest.mark.filterwarnings("ignore:max_model_len is 257")  # sixteen times the context, which is what the study asks
@pytest.mark.parametrize("name", MODELS)
def test_sinks_and_windows_of(name, tmp_path):
    folder = write_model(tmp_path / "model", random_tensors(MODELS[name]), MODELS[name])
    shutil.copy(model_path("ksana-tiny") / "tokenizer.model", folder)
    small = ["settings.num_texts=1", "engine.block_size=4", "engine.max_num_batched_tokens=32", "seeds=[0]"]
    made = reported(load("sink_window", [f"model={folder}", *small]), tmp_path / "out")
    scored = {(row.point["pattern.window"], row.point["pattern.num_sinks"]): row.mean("ppl") for row in made.rows}
    assert len(set(scored)) == 15 and all(math.isfinite(value) and value > 1 for value in scored.values())
    assert len(set(scored.values())) == 15  # no setting is without effect
