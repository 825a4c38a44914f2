"""Weights that arrive: from one file and from shards, in every dtype, made up, and within the memory they need."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.errors import LoadError
from ksana_jax.core.layer_spec import NO_ROPE, RopeConfig
from ksana_jax.loading import abstract_params, load_config, load_model, stored_tensor
from ksana_jax.loading.load import auto_dtype
from ksana_jax.loading.tensor_files import find_tensors
from ksana_jax.models.dense import dense_logits
from ksana_jax.models.params import num_params
from tests.loading.models_on_disk import (
    STORED,
    TINY,
    random_tensors,
    read_index,
    write_config,
    write_index,
    write_model,
    write_shards,
)


def test_every_weight_arrives_at_its_place(tmp_path):
    config = dataclasses.replace(TINY, family="qwen3", qk_norm="head", qkv_bias=True, out_bias=True)
    tensors = random_tensors(config)
    found, params = load_model(write_model(tmp_path, tensors, config))
    assert found == config
    layer = params.layers[1]
    for name, value in {
        "model.embed_tokens.weight": params.embed,
        "lm_head.weight": params.head,
        "model.norm.weight": params.final_norm,
        "model.layers.1.self_attn.k_proj.weight": layer.w_k,
        "model.layers.1.self_attn.k_proj.bias": layer.b_k,
        "model.layers.1.self_attn.q_norm.weight": layer.q_norm,
        "model.layers.1.mlp.down_proj.weight": layer.w_down,
        "model.layers.1.post_attention_layernorm.weight": layer.mlp_norm,
    }.items():
        np.testing.assert_array_equal(value, tensors[name])
    assert len(jax.tree.leaves(params)) == len(tensors)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_stored_dtypes_are_converted_to_the_wanted_one(tmp_path, stored, dtype):
    tensors = random_tensors(TINY, stored)
    wanted = jnp.float32 if dtype == "f32" else ml_dtypes.bfloat16
    _, params = load_model(write_model(tmp_path, tensors), dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(wanted)}
    np.testing.assert_array_equal(params.embed, tensors["model.embed_tokens.weight"].astype(wanted))


def test_shards_give_the_same_weights_as_one_file(tmp_path, monkeypatch):
    tensors = random_tensors(TINY)
    one = load_model(write_model(tmp_path / "one", tensors))
    monkeypatch.setattr(stored_tensor, "CHUNK_BYTES", 100)  # a row is 64 bytes or more: every tensor comes in pieces
    assert len(list(find_tensors(tmp_path / "one")["lm_head.weight"].chunks())) == 32
    several = load_model(write_shards(tmp_path / "several", tensors))
    assert one[0] == several[0]
    jax.tree.map(np.testing.assert_array_equal, one[1], several[1])


def test_snapshot_of_the_hugging_face_cache_is_read_through_its_links(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for index, path in enumerate(sorted(write_shards(tmp_path / "plain", random_tensors(TINY)).iterdir())):
        path.rename(blobs / str(index))
        (snapshot / path.name).symlink_to(f"../../blobs/{index}")
    assert load_model(snapshot)[0] == TINY


def test_ids_that_end_a_text_are_the_union_of_both_files(tmp_path):
    write_config(tmp_path)
    assert (load_config(tmp_path).bos_id, load_config(tmp_path).eos_ids) == (1, (2,))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9], "temperature": 0.6}))
    assert (load_config(tmp_path).bos_id, load_config(tmp_path).eos_ids) == (1, (5, 9, 2))
    for nothing in ("", "{}", '{"eos_token_id": -1}', '{"eos_token_id": []}', '{"eos_token_id": null}'):
        (tmp_path / "generation_config.json").write_text(nothing)
        assert load_config(tmp_path).eos_ids == (2,)
    # The family's default, 2 for a Llama, is no file's word.
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(tmp_path).eos_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert load_config(tmp_path).eos_ids == (7,)


def test_tied_model_takes_no_head_and_ignores_an_equal_one(tmp_path):
    config = dataclasses.replace(TINY, tie_embeddings=True)
    tensors = random_tensors(config)
    assert "lm_head.weight" not in tensors
    assert load_model(write_model(tmp_path, tensors, config))[1].head is None
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert load_model(write_model(tmp_path, tensors, config))[1].head is None


@pytest.mark.parametrize("write", [write_model, write_shards])
def test_tied_model_may_store_its_matrix_under_the_name_of_the_head(write, tmp_path):
    # safetensors.torch.save_model keeps the first of two names of one tensor in alphabetical order.
    config = dataclasses.replace(TINY, tie_embeddings=True)
    tensors = random_tensors(config)
    usual = load_model(write_model(tmp_path / "usual", tensors, config))[1]
    renamed = {name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in tensors.items()}
    assert renamed.keys() - tensors.keys() == {"lm_head.weight"}
    jax.tree.map(np.testing.assert_array_equal, load_model(write(tmp_path / "renamed", renamed, config))[1], usual)


def test_tensors_that_the_index_does_not_name_are_no_part_of_the_model(tmp_path):
    tensors = random_tensors(TINY)
    expected = load_model(write_model(tmp_path / "one", tensors))[1]
    folder = write_shards(tmp_path / "several", tensors | {"model.rotary.more": np.ones(4, np.float32)})
    weight_map = read_index(folder)
    del weight_map["model.rotary.more"]
    write_index(folder, weight_map)
    jax.tree.map(np.testing.assert_array_equal, load_model(folder)[1], expected)


def test_doubles_become_floats_and_one_beyond_their_range_is_refused(tmp_path):
    given = random_tensors(TINY)
    tensors = {name: tensor.astype(np.float64) for name, tensor in given.items()}
    write_model(tmp_path, tensors, dtype="float64")
    _, params = load_model(tmp_path, auto_dtype(tmp_path))
    np.testing.assert_array_equal(params.layers[1].w_up, given["model.layers.1.mlp.up_proj.weight"])
    assert params.embed.dtype == np.float32
    tensors["model.norm.weight"][3] = 1e39
    with pytest.raises(LoadError, match=r"model.norm.weight has values that are NaN or infinite in float32"):
        load_model(write_model(tmp_path, tensors))


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path):
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(2)}
    load_model(write_model(tmp_path, random_tensors(TINY) | buffers))


def test_dummy_weights_need_a_config_only_and_repeat_with_the_seed(tmp_path):
    write_config(tmp_path)
    config, params = load_model(tmp_path, dtype="bf16", load_format="dummy", seed=3)
    same = load_model(TINY, dtype="bf16", load_format="dummy", seed=3)[1]
    other = load_model(TINY, dtype="bf16", load_format="dummy", seed=4)[1]
    assert config == TINY
    jax.tree.map(np.testing.assert_array_equal, params, same)
    assert not np.array_equal(params.embed, other.embed)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract_params(TINY, "bf16")
    )


def test_shapes_of_7b_are_planned_and_traced_without_weights():
    config = ModelConfig(
        vocab_size=32_000,
        d_model=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        d_ff=11_008,
        max_position=4096,
    )
    params = abstract_params(config, "bf16")
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == num_params(config) == 6_738_415_616
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    assert jax.eval_shape(lambda p, t: dense_logits(p, t, config=config), params, tokens).shape == (2, 8, 32_000)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"dtype": "f64"}, "dtype is 'f64', must be one of f32, bf16, f16"),
        ({"load_format": "gguf"}, "load_format is 'gguf', must be one of auto, dummy"),
        ({}, "a ModelConfig has no weights"),
        ({"source": dataclasses.replace(TINY, num_heads=0), "load_format": "dummy"}, "num_heads is 0"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, named):
    with pytest.raises(ConfigError, match=named):
        load_model(**{"source": TINY, **arguments})


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from Linux's /proc")
@pytest.mark.parametrize(
    ("stored", "dtype", "num_devices"),
    [("F32", "f32", 1), ("BF16", "f32", 1), pytest.param("F32", "f32", 4, marks=pytest.mark.soak)],
)
def test_loading_takes_at_most_1_3_times_the_weights(tmp_path, stored, dtype, num_devices):
    """Devices that divide a model read each number once, but for the norms, which all have."""
    # 32M weights, 130 MB in float32: enough that the 16 MiB in flight and the imports do not hide a second copy.
    config = dataclasses.replace(TINY, vocab_size=8_000, d_model=1024, num_layers=2, num_kv_heads=4, d_ff=2600)
    tensors = {name: np.full_like(tensor, 0.5) for name, tensor in random_tensors(config, stored).items()}
    write_shards(tmp_path / "model", tensors, config, num_shards=2)
    probe = Path(__file__).with_name("memory_probe.py")
    root = Path(__file__).parents[2]
    devices = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}", "NPROC": str(4 * num_devices)}
    done = subprocess.run(
        [sys.executable, probe, tmp_path / "model", dtype, str(num_devices)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(root), **devices},
    )
    assert done.returncode == 0, done.stderr
    peak, weights, num_read = map(int, done.stdout.split())
    whole = sum(tensor.nbytes for tensor in tensors.values())
    norms = sum(tensor.nbytes for tensor in tensors.values() if tensor.ndim == 1)
    assert num_read == whole + (num_devices - 1) * norms
    # The last device has rows of zeros after its part of the vocabulary, whole groups of ids.
    assert weights >= 4 * num_params(config) and weights == pytest.approx(4 * num_params(config), rel=0.02)
    assert peak <= 1.3 * weights


def test_older_and_newer_names_of_a_tensor_are_the_same_and_buffers_are_left_out(tmp_path):
    config = dataclasses.replace(
        TINY,
        **{"family": "gpt_neox", "num_kv_heads": 4, "head_dim": 4, "norm": "layer", "norm_placement": "parallel"},
        **{"mlp": "gelu", "mlp_bias": True, "rope": RopeConfig(partial_rotary_factor=0.5)},
    )
    tensors = random_tensors(config)
    _, params = load_model(write_model(tmp_path / "older", tensors, config))
    layer = params.layers[1]
    np.testing.assert_array_equal(layer.attn_norm[0], tensors["gpt_neox.layers.1.input_layernorm.weight"])
    np.testing.assert_array_equal(layer.attn_norm[1], tensors["gpt_neox.layers.1.input_layernorm.bias"])
    newer = {name.replace("embed_out", "lm_head"): values for name, values in tensors.items()}
    newer["gpt_neox.layers.0.attention.bias"] = np.ones((1, 1, 64, 64), np.bool_)
    newer["gpt_neox.layers.0.attention.masked_bias"] = np.array(-1e9, np.float32)
    _, same = load_model(write_model(tmp_path / "newer", newer, config))
    assert jax.tree.all(jax.tree.map(np.array_equal, params, same))
    both = newer | {"embed_out.weight": newer["lm_head.weight"]}
    with pytest.raises(LoadError, match=r"embed_out.weight and .*lm_head.weight are|lm_head.weight and embed_out"):
        load_model(write_model(tmp_path / "both", both, config))


@pytest.mark.parametrize(
    ("family", "changes", "prefix"),
    [
        ("gpt2", {"position_offset": 0, "mlp": "gelu_tanh"}, "transformer."),
        ("opt", {"position_offset": 2, "mlp": "relu"}, "model."),
    ],
)
def test_first_checkpoints_of_a_family_lack_a_prefix(tmp_path, family, changes, prefix):
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)
    shape = {"num_kv_heads": 4, "head_dim": 4, "norm": "layer", "rope": NO_ROPE, "tie_embeddings": True}
    config = dataclasses.replace(TINY, family=family, **shape, **biases, **changes)
    tensors = random_tensors(config)
    found, params = load_model(write_model(tmp_path / "usual", tensors, config))
    assert found == config and params.positions is not None and len(params.positions) == 64 + changes["position_offset"]
    first = {name.removeprefix(prefix): values for name, values in tensors.items()}
    _, same = load_model(write_model(tmp_path / "first", first, config))
    assert jax.tree.all(jax.tree.map(np.array_equal, params, same))
