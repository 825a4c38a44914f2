"""GGUF files of families with other tensors than a Llama's: config and weights of the checkpoints they are made of."""

import json
import shutil

import jax
import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.core.errors import LoadError
from ksana_jax.core.layer_spec import NO_ROPE
from ksana_jax.loading import load_config, load_model
from ksana_jax.loading.export import export_hf
from ksana_jax.loading.gguf_export import export_gguf
from ksana_jax.loading.load import open_model
from ksana_jax.models.block_matrix import BlockMatrix
from tests.golden.cases import golden_case
from tests.loading.gguf_converted import convert

SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # llama.cpp has no keys for them, nor for MPT's scale
# llama.cpp's own numbers of MiniCPM3, for which it has no keys.
MINICPM3 = {
    **{"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "rope_theta": 10_000.0},
    "rope_scaling": {"type": "longrope", "attention_factor": 1.0}
    | {"short_factor": [1.0, 1.5, 3.0, 4.0], "long_factor": [1.0, 2.0, 9.0, 9.0]},
}
CASES = {
    "gpt_neox-mha-rope-partial-biases": {},
    "falcon-mqa-tied": {},
    "falcon-gqa-two-norms-untied": {},
    "mpt-mha-alibi-tied": {"attn_config": {}},
    "gpt2-mha-positions-biases-tied": {},
    "stablelm-gqa-rope-partial-biases": {},
    "stablelm-mha-rope-partial-parallel": {},
    "cohere-gqa-tied": {},
    "cohere2-gqa-window-nope-tied": {"layer_types": ["sliding_attention"] * 3},  # the fourth would be full
    "granitemoe-gqa-experts": {},
    "deepseek_v2-latent-rope-yarn-experts": {},
    "deepseek_v2-latent-experts-new": {},
    "deepseek_v3-latent-rope-yarn-experts": {},
    "deepseek_v3-latent-experts-tied": {},
    "youtu-latent-tied": {},
    "minicpm3-latent-rope-long-tied": MINICPM3,
    "gpt_oss-gqa-window-rope-yarn-experts-biases": SWIGLU,
    "gpt_oss-mqa-window-rope-yarn-experts-mxfp4": SWIGLU,
}


def twins(name, tmp_path):
    """A checkpoint whose config GGUF can express, and the GGUF file."""
    folder, changes = golden_case(name).model_dir, CASES[name]
    twin = shutil.copytree(folder, tmp_path / "twin")
    (twin / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | changes))
    return twin, convert(twin, tmp_path / "model.gguf")


@pytest.mark.parametrize("name", CASES)
def test_gguf_gives_the_config_and_weights_of_the_checkpoint(name, tmp_path):
    twin, path = twins(name, tmp_path)
    (wanted, weights), (found, params) = load_model(twin), load_model(path)
    assert found == wanted
    jax.tree.map(np.testing.assert_array_equal, params, weights)
    if found.latent is None or found.family == "minicpm3":
        with pytest.raises(ConfigError, match="GGUF files have no architecture here"):
            export_gguf(twin, tmp_path / "out.gguf", "Q8_0")
    export_hf(tmp_path / "back", found, params)
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "back")[1], weights)


def test_experts_of_gpt_oss_are_kept_in_blocks(tmp_path):
    _, path = twins("gpt_oss-mqa-window-rope-yarn-experts-mxfp4", tmp_path)
    config, read = open_model(path, "f32", quantization="stored")
    assert {kind for _, kind in config.kept} == {"MXFP4"} and len(config.kept) == 3 * config.num_layers
    for layer, plain in zip(read().layers, load_model(path)[1].layers, strict=True):
        assert isinstance(layer.w_up_experts, BlockMatrix)
        np.testing.assert_array_equal(layer.w_up_experts.numbers(), plain.w_up_experts)


def refusal(folder, tmp_path, error=ConfigError, changes=None, **keys):
    changes = CASES[folder] | (changes or {})
    path = convert(golden_case(folder).model_dir, tmp_path / "model.gguf", changes, **keys)
    with pytest.raises(error) as caught:
        (load_config if error is ConfigError else load_model)(path)
    return str(caught.value)


def test_each_fourth_layer_of_cohere_2_has_neither_window_nor_rope(tmp_path):
    folder = golden_case("cohere2-gqa-window-nope-tied").model_dir
    layers = load_config(convert(folder, tmp_path / "model.gguf", {"num_hidden_layers": 8})).layers
    full = [layer.attention.pattern.window is None for layer in layers]
    assert full == [layer.attention.rope == NO_ROPE for layer in layers] == [False, False, False, True] * 2


NEOX, GPT_OSS = "gpt_neox-mha-rope-partial-biases", "gpt_oss-gqa-window-rope-yarn-experts-biases"


def test_keys_and_tensors_that_do_not_fit_are_refused(tmp_path):
    said = refusal(NEOX, tmp_path, attention__head_count_kv=2)
    assert "num_key_value_heads is 2; must be absent" in said
    assert "alibi_bias_max is 4.0" in refusal("mpt-mha-alibi-tied", tmp_path, attention__max_alibi_bias=4.0)
    several = np.array([1.0, 2.0], np.float32)
    for folder, key in ((NEOX, "use_parallel_residual"), ("cohere-gqa-tied", "logit_scale")):
        assert f"{key} is array([1., 2.], dtype=float32); supported: one v" in refusal(
            folder, tmp_path, **{key: several}
        )
    assert "clamp_kqv is array" in refusal("mpt-mha-alibi-tied", tmp_path, attention__clamp_kqv=several)
    assert "use_parallel_residual is 'x'; must be true" in refusal(NEOX, tmp_path, use_parallel_residual="x")
    assert "clip_qkv is 8.0" in refusal("mpt-mha-alibi-tied", tmp_path, attention__clamp_kqv=8.0)
    assert "logit_scale is 0.0" in refusal("cohere-gqa-tied", tmp_path, logit_scale=0.0)
    said = refusal(NEOX, tmp_path, LoadError, {"num_hidden_layers": 3})
    assert "gpt_neox.layers.2.input_layernorm.weight is missing" in said
    said = refusal("falcon-gqa-two-norms-untied", tmp_path, LoadError, attention__head_count_kv=1)
    assert "query_key_value.weight has shape [64, 32], the config gives [48, 32]" in said
    assert "has shape" in refusal("gpt2-mha-positions-biases-tied", tmp_path, LoadError, {"n_inner": 24})
    said = refusal(GPT_OSS, tmp_path, LoadError, {"num_local_experts": 5})
    assert "mlp.experts.gate_up_proj has shape [6, 32, 96], the config gives [5, 32, 96]" in said
