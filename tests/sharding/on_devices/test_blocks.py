"""Matrices in blocks (`quantization: stored`), divided between blocks: numbers, tokens and memory."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from ksana_jax import LLM
from ksana_jax.core.config import ModelConfig
from ksana_jax.loading.load import load_model, open_model
from ksana_jax.models.block_matrix import BlockMatrix, PackedBlocks
from ksana_jax.models.params import heads_of
from ksana_jax.ops.weight_packing import packed, unpacked
from ksana_jax.sharding.placing import place_on
from ksana_jax.sharding.shares import share
from tests.loading.quantised.on_disk import (
    awq,
    awq_config,
    compressed,
    compressed_config,
    gptq,
    gptq_config,
    write_quantised,
)
from tests.loading.test_kept import MOE, matrices, stacks, written, written_experts
from tests.machine import native_products
from tests.sharding.on_devices.engines import GREEDY, SETTINGS
from tests.sharding.on_devices.test_tokens import ONE_SHAPE

pytestmark = pytest.mark.usefixtures("quick_compiles")

# Each of two devices has columns of whole blocks of K-quants, and a copy of the kv head.
CONFIG = ModelConfig(
    **{"vocab_size": 300, "d_model": 256, "num_layers": 1, "num_heads": 4, "num_kv_heads": 1, "head_dim": 128},
    **{"d_ff": 512, "tie_embeddings": True, "bos_id": 1, "eos_ids": (2,)},
)
SMALL = {"d_model": 64, "num_kv_heads": 2, "head_dim": 16, "d_ff": 64}
PROMPTS = [{"prompt_token_ids": np.random.default_rng(2).integers(2, 300, n)} for n in (9, 4)]


def on_device(params, device: int):
    """A device's part of the weights."""
    return jax.tree.map(lambda leaf: leaf.addressable_shards[device].data, params)


numbers_of = jax.jit(lambda w: w.numbers())


def test_each_device_has_the_numbers_of_its_part_packed_or_not(tmp_path):
    kinds = ["Q4_1", "Q6_K", "Q5_K", "Q8_0"]  # by rows, and by columns
    path = written(tmp_path, kinds, CONFIG)
    config, read = open_model(path, "f32", quantization="stored", placement=place_on(2), num_devices=2)
    (_, whole), kept = load_model(path), read()
    assert len(config.kept) == 8 and {kind for _, kind in config.kept} == {*kinds}
    in_panels = packed(kept, config, only_blocks=True)
    for form, params in ((BlockMatrix, kept), (PackedBlocks, in_panels), (BlockMatrix, unpacked(in_panels))):
        for device in range(2):
            parts = matrices(on_device(params, device))
            for (name, part), (_, w) in zip(parts, matrices(whole), strict=True):
                mine = share(name, w.shape, device, 2, heads_of(name, config.layers[0]))
                wanted = np.pad(w[mine.rows, mine.columns], ((0, mine.padding), (0, 0)))
                assert isinstance(part, form) and part.shape == wanted.shape
                np.testing.assert_array_equal(numbers_of(part), wanted, name)


def served(path, num_devices: int, linear: str):
    """An engine with some products, its tokens and their log-probabilities."""
    settings = SETTINGS | ONE_SHAPE | {"operators": {"linear": linear}, "dtype": "f32", "max_model_len": 64}
    llm = LLM(path, quantization="stored", tensor_parallel_size=num_devices, **settings)
    outputs = llm.generate(PROMPTS, dataclasses.replace(GREEDY, max_tokens=4, logprobs=0))
    found = [output.outputs[0] for output in outputs]
    scores = [entry[token].logprob for c in found for entry, token in zip(c.logprobs, c.token_ids, strict=True)]
    weights = llm.memory_usage()["weights"]
    assert weights.predicted == weights.measured > 0
    return llm, [c.token_ids for c in found], scores


@pytest.mark.parametrize(
    ("linear", "form", "atol"),
    [
        # Sums of products in another order, through a layer: 3e-6 and 8e-6. A sum whose last bit differs may also be
        # rounded to another code.
        pytest.param("xla", BlockMatrix, 2e-5, marks=pytest.mark.soak),
        pytest.param("packed", PackedBlocks, 2e-3, marks=native_products),
    ],
)
def test_tokens_are_those_of_one_device(linear, form, atol, tmp_path):
    path = written(tmp_path, ["Q8_0", "F32", "Q4_1", "Q4_K", "Q6_K", "Q5_K", "Q5_0", "Q2_K"], CONFIG)
    (_, *one), (llm, *two) = (served(path, n, linear) for n in (1, 2))
    kept = dict(matrices(llm.runner.params))
    assert isinstance(kept.pop("w_q"), jax.Array) and {type(w) for w in kept.values()} == {form}
    assert one[0] == two[0]
    np.testing.assert_allclose(one[1], two[1], atol=atol)


@native_products
def test_experts_are_divided_too(tmp_path):
    moe = dataclasses.replace(MOE, vocab_size=300, num_layers=1)
    path = written_experts(tmp_path, ["Q4_1", "Q8_0", "Q5_0"], moe)
    config, read = open_model(path, "f32", quantization="stored", placement=place_on(2), num_devices=2)
    (_, whole), kept = load_model(path), read()
    in_panels = packed(kept, config, only_blocks=True)
    for form, params in ((BlockMatrix, kept), (PackedBlocks, in_panels), (BlockMatrix, unpacked(in_panels))):
        for device in range(2):
            for (name, part), (_, w) in zip(stacks(on_device(params, device)), stacks(whole), strict=True):
                mine = share(name, w.shape, device, 2, heads_of(name, config.layers[0]))
                assert isinstance(part, form)
                np.testing.assert_array_equal(numbers_of(part), w[:, mine.rows, mine.columns], name)
    (_, *one), (llm, *two) = (served(path, n, "packed") for n in (1, 2))
    assert one[0] == two[0] and {type(w) for _, w in stacks(llm.runner.params)} == {PackedBlocks}
    np.testing.assert_allclose(one[1], two[1], atol=2e-3)


def test_matrices_whose_blocks_devices_would_divide_are_dequantised_and_named(tmp_path, caplog):
    path = written(tmp_path, ["Q4_1"], dataclasses.replace(CONFIG, **SMALL, num_heads=6))
    llm = LLM(path, quantization="stored", tensor_parallel_size=2, **SETTINGS | ONE_SHAPE | {"max_model_len": 64})
    [warning] = [message for message in caplog.messages if "would divide blocks" in message]
    assert "1 matrices are" in warning and "o_proj.weight (96 / 2 = 48 columns, blocks of 32)" in warning
    layer = llm.runner.params.layers[0]
    assert isinstance(layer.w_down, BlockMatrix) and isinstance(layer.w_o, jax.Array)
    assert ".layers[0].w_o" not in dict(llm.model_config.kept)
    weights = llm.memory_usage()["weights"]
    assert weights.predicted == weights.measured > 0


@pytest.mark.parametrize(
    ("quantise", "settings"),
    [
        (functools.partial(gptq, sym=False), gptq_config(sym=False)),
        (awq, awq_config()),
        (compressed, compressed_config()),
    ],
    ids=["gptq", "awq", "compressed-tensors"],
)
def test_codes_of_quantised_safetensors_are_divided(quantise, settings, tmp_path):
    path, _ = write_quantised(tmp_path, quantise, settings)
    config, read = open_model(path, "f32", quantization="stored", placement=place_on(2), num_devices=2)
    (_, whole), kept, num_blocks = load_model(path), read(), 0
    for device in range(2):
        for (name, part), (_, w) in zip(matrices(on_device(kept, device)), matrices(whole), strict=True):
            mine = share(name, w.shape, device, 2, heads_of(name, config.layers[0]))
            num_blocks += isinstance(part, BlockMatrix)
            found = numbers_of(part) if isinstance(part, BlockMatrix) else part
            np.testing.assert_array_equal(found, np.pad(w[mine.rows, mine.columns], ((0, mine.padding), (0, 0))), name)
    assert num_blocks == 2 * len(config.kept) > 0
