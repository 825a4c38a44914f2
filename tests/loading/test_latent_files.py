"""Checkpoints of models with latents: FP8 in blocks, layers that are no part of the model, and GGUF files that have
heads in another form."""

import dataclasses
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from ksana_jax.core.config import ConfigError
from ksana_jax.core.gguf_file import read_gguf
from ksana_jax.loading import load_config, load_model
from ksana_jax.loading.gguf_export import export_gguf
from tests.golden.cases import HERE, golden_case
from tests.loading.gguf_converted import convert

V2, V3 = "deepseek_v2-latent-rope-yarn-experts", "deepseek_v3-latent-rope-yarn-experts"


def changed(folder, name: str, change, **fields):
    """Copies a checkpoint with other tensors and config fields."""
    shutil.copytree(golden_case(name).model_dir, folder)
    values = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(values))
    tensors = change(safetensors.numpy.load_file(folder / "model.safetensors"))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("size", [16, 128])
def test_weights_in_fp8_blocks_are_read(size, tmp_path):
    numbers = {}

    def in_blocks(tensors):
        found = {}
        for name, w in tensors.items():
            if w.ndim < 2 or not name.endswith(("_proj.weight", "with_mqa.weight")):
                numbers[name] = found[name] = w.astype(np.float32)
                continue
            rows, columns = (np.arange(n) // size for n in w.shape)
            scales = np.exp2(np.random.default_rng(len(found)).integers(-8, -5, (rows[-1] + 1, columns[-1] + 1)))
            of_each = scales[rows][:, columns]
            codes = (w.astype(np.float32) / of_each).astype(ml_dtypes.float8_e4m3fn)
            found[name], found[f"{name}_scale_inv"] = codes, scales.astype(np.float32)
            numbers[name] = (codes.astype(np.float32) * of_each).astype(np.float32)
        return found

    quantised = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [size] * 2}
    folder = changed(tmp_path / "fp8", V3, in_blocks, quantization_config=quantised)
    plain = changed(tmp_path / "plain", V3, lambda tensors: numbers)
    jax.tree.map(np.testing.assert_array_equal, load_model(folder)[1], load_model(plain)[1])


def test_the_layer_that_guesses_the_token_after_next_is_left_out(tmp_path):
    extra = {"model.layers.61.eh_proj.weight": np.zeros((4, 4), np.float16)}
    folder = changed(tmp_path / "mtp", V3, lambda tensors: tensors | extra)
    jax.tree.map(np.testing.assert_array_equal, load_model(folder)[1], load_model(golden_case(V3).model_dir)[1])


def said(name: str, tmp_path, **keys) -> str:
    with pytest.raises(ConfigError) as refusal:
        load_config(convert(golden_case(name).model_dir, tmp_path / "model.gguf", **keys))
    return str(refusal.value)


def test_gguf_files_that_cannot_be_read_right_are_refused(tmp_path):
    assert "older converters of llama.cpp wrote them expanded" in said(V2, tmp_path, attention__head_count_kv=4)
    assert "above 0 and at most 0.2: a tenth of mscale" in said(V2, tmp_path, rope__scaling__yarn_log_multiplier=1.0)
    assert "expert_gating_func is 3; supported: 1 (softmax)" in said(V3, tmp_path, expert_gating_func=3)
    assert "norm_topk_prob is True" in said(V2, tmp_path, expert_weights_norm=np.bool_(True))
    cpm = "minicpm3-latent-rope-long-tied"
    assert "minicpm3.attention.kv_lora_rank is missing" in said(cpm, tmp_path, attention__kv_lora_rank=0)
    assert "minicpm3.embedding_scale is 12.0; not supported" in said(cpm, tmp_path, embedding_scale=12.0)
    assert "deepseek2.attention.other is 5; not supported" in said(V3, tmp_path, attention__other=5)


def test_a_file_without_a_gating_function_has_sigmoids_if_it_has_a_bias_for_the_choice(tmp_path):
    for name, kind in ((V2, "deepseek_v2"), (V3, "deepseek_v3")):
        assert load_config(convert(golden_case(name).model_dir, tmp_path / "model.gguf")).family == kind


WRITTEN = sorted(
    path.name for path in HERE.iterdir() if path.name.startswith(("deepseek_v2-", "deepseek_v3-", "glm4_moe", "youtu"))
)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_model_is_written_as_the_converter_does(name, tmp_path):
    folder = golden_case(name).model_dir
    export_gguf(folder, out := tmp_path / "out.gguf", "F32")
    config, params = load_model(folder)
    found, read = load_model(out)
    assert dataclasses.replace(found, family=config.family) == config
    jax.tree.map(np.testing.assert_array_equal, read, jax.tree.map(lambda w: w.astype(np.float32), params))
    if name.startswith("glm4"):  # whose converter is not written out in these tests
        return
    theirs, ours = (read_gguf(path) for path in (convert(folder, tmp_path / "theirs.gguf"), out))
    assert {name: t.shape for name, t in theirs.tensors.items()} == {name: t.shape for name, t in ours.tensors.items()}
    keys = {key: x for key, x in theirs.metadata.items() if key in ours.metadata}
    assert keys == pytest.approx({key: ours.metadata[key] for key in keys})
    assert all("expert" in key for key in theirs.metadata.keys() - keys)  # of dense models
