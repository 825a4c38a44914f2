"""Bytes of weights and of keys and values: the figures of the KsanaLLM articles, and bytes of allocated arrays."""

import dataclasses
import math

import jax
import pytest

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.devices.tuning import tuning
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.loading import load_model
from ksana_jax.models.params import num_params
from ksana_jax.ops.new_pool import make_cache
from ksana_jax.runner.planner import weights_bytes
from ksana_jax.runner.planner.devices import DEVICES
from ksana_jax.runner.planner.terms import embedding_bytes
from tests.runner.planner.models import MODELS, read

SMALL = ModelConfig(
    vocab_size=40, d_model=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=24, max_position=64
)
MIB = 2**20


def token_bytes(config: ModelConfig, dtype: str) -> int:
    return layout_of(config, dtype=dtype, block_size=16).token_bytes


def test_a_token_of_llama_2_7b_takes_512_kib_in_16_bits():
    config = read("llama-2-7b")
    assert token_bytes(config, "bf16") == 512 * 1024
    assert token_bytes(config, "f32") == 1024 * 1024


def test_shipped_shapes_of_eight_billion_weights_have_their_published_sizes():
    assert (num_params(read("llama-3.1-8b")), num_params(read("qwen3-8b"))) == (8_030_261_248, 8_190_735_360)
    assert (token_bytes(read("llama-3.1-8b"), "bf16"), token_bytes(read("qwen3-8b"), "bf16")) == (131_072, 147_456)


def test_llama_2_7b_has_14_gb_of_weights_in_16_bits():
    # "about 14 GB" rounds 7e9 weights of two bytes; the real shape has 6.74e9.
    assert weights_bytes(read("llama-2-7b"), "bf16") == 13_476_831_232


def test_one_kv_head_takes_a_thirty_second_of_it():
    config = dataclasses.replace(read("llama-2-7b"), num_kv_heads=1)
    assert token_bytes(config, "bf16") == 512 * 1024 / 32
    assert 1024 * token_bytes(config, "bf16") == 16 * MIB


def test_about_100_tokens_fill_an_l2_cache_of_50_mb():
    l2_bytes = DEVICES["h100"].l2_bytes
    assert l2_bytes == 50 * MIB
    assert l2_bytes / token_bytes(read("llama-2-7b"), "bf16") == 100


def test_an_embedding_of_300k_tokens_beside_llama_13b():
    large = read("llama-2-13b-vocab300k")
    embedding = embedding_bytes(large, "bf16")
    assert embedding == 300_000 * 5120 * 2
    # The article's 11.8 % is that table beside the weights of Llama-2-13B as it is, with 32k tokens.
    assert embedding / weights_bytes(read("llama-2-13b"), "bf16") == pytest.approx(0.118, abs=5e-4)
    # Of the model that has it, with an output head of the same size, it is less.
    assert embedding / weights_bytes(large, "bf16") == pytest.approx(0.0975, abs=5e-5)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_as_many_as_the_config_counts(name):
    config = read(name)
    layers = len(config.recurrent.layers) if config.recurrent else 0
    # Each head's decay and its bias stay in float32.
    wide = 2 * layers * getattr(config.recurrent, "num_value_heads", 0)
    assert weights_bytes(config, "f32") == 4 * num_params(config)
    assert weights_bytes(config, "bf16") == 2 * (num_params(config) + wide)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        dataclasses.replace(SMALL, tie_embeddings=True),
        dataclasses.replace(SMALL, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm="head"),
    ],
    ids=["untied", "tied", "with biases and norms"],
)
def test_weights_are_the_bytes_of_the_loaded_tree(config, dtype):
    _, params = load_model(config, dtype, load_format="dummy")
    assert weights_bytes(config, dtype) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_weights_of_the_embedded_model_are_those_on_disk():
    config, params = load_model("ksana-tiny")
    assert weights_bytes(config, "f32") == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_an_embedding_on_the_host_leaves_the_device_by_its_bytes(dtype):
    _, params = load_model(SMALL, dtype, load_format="dummy", embedding_device="host")
    on_device = sum(leaf.nbytes for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array))
    assert on_device == weights_bytes(SMALL, dtype, "host") == weights_bytes(SMALL, dtype) - params.embed.nbytes
    assert params.embed.nbytes == embedding_bytes(SMALL, dtype) == 40 * 16 * params.embed.dtype.itemsize


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_an_allocated_pool_has_the_bytes_of_its_layout(dtype, platform):
    num_blocks, block_size = 6, 4
    layout = layout_of(SMALL, dtype=dtype, block_size=block_size, as_bits=tuning(platform).stored_as_bits)
    cache = make_cache(layout, num_blocks)
    assert cache.nbytes == num_blocks * layout.block_bytes == num_blocks * block_size * token_bytes(SMALL, dtype)
    assert math.prod(cache.kv.shape[1:]) == block_size * 2 * 3 * 2 * 8
    on_cpu_in_16_bits = (platform, dtype) == ("cpu", "bf16")
    assert cache.kv.dtype.name == ("uint16" if on_cpu_in_16_bits else {"f32": "float32", "bf16": "bfloat16"}[dtype])


def test_unknown_dtypes_are_refused():
    with pytest.raises(ConfigError, match="dtype is 'int8', must be one of f32, bf16, f16"):
        weights_bytes(SMALL, "int8")
