"""`quantization: stored`: codes of float8_e4m3fn stay in memory, with a scale for 128 or 32 numbers of a row."""

import dataclasses
import functools
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from ksana_jax import LLM
from ksana_jax.core.errors import LoadError
from ksana_jax.loading import load_config
from ksana_jax.loading.load import load_model, open_model
from ksana_jax.models.block_matrix import FORMS, BlockMatrix
from ksana_jax.runner.planner.solve import NO_STEP, plan
from ksana_jax.runner.planner.terms import weights_bytes
from tests.golden.cases import golden_case
from tests.loading.quantised.on_disk import CONFIG, fp8, fp8_config, write_quantised
from tests.loading.quantised.test_formats import GLM4, PHI3, SETTINGS, scored
from tests.loading.quantised.test_kept_codes import check_numbers, opened
from tests.loading.test_kept import matrices
from tests.machine import native_products

# Whole blocks of 128 columns, and a block and a half of rows and of columns.
EDGES = dataclasses.replace(CONFIG, d_model=128, d_ff=192)
V3: Any = load_config(golden_case("deepseek_v3-latent-rope-yarn-experts").model_dir)
DEEPSEEK = dataclasses.replace(
    V3,
    d_model=128,
    d_ff=160,
    experts=dataclasses.replace(V3.experts, shared_d_ff=320, plain_d_ff=192),
    latent=dataclasses.replace(V3.latent, value=32, query_rank=96),
)
PLAIN = ("lm_head", "embed_tokens", "mlp.gate.")


@pytest.mark.parametrize(
    "config, block, forms",
    [
        (EDGES, (128, 128), ["fp8", "fp8_32"]),
        (EDGES, (24, 32), ["fp8_32"]),
        (CONFIG, (128, 128), ["fp8_32"]),
        (PHI3, (128, 128), ["fp8_32"]),
        (GLM4, (32, 64), ["fp8_32"]),
    ],
    ids=lambda value: getattr(value, "family", str(value)),
)
def test_numbers_are_those_of_widened_weights_bit_for_bit(config, block, forms, tmp_path):
    quantise = functools.partial(fp8, block=block)
    check_numbers(write_quantised(tmp_path, quantise, fp8_config(block=block), config)[0], set(forms))


@functools.cache
def deepseek(folder):
    return write_quantised(folder, fp8, fp8_config(), DEEPSEEK, PLAIN)


def test_stacks_of_experts_are_kept_and_what_heads_multiply_is_widened(tmp_path):
    path, twin = deepseek(tmp_path)
    (config, kept), (_, wanted) = opened(path), load_model(twin)
    layers: Any = kept.layers
    assert {kind for _, kind in config.kept} == {"fp8", "fp8_32"}
    held = {name for name, w in matrices(kept) if isinstance(w, BlockMatrix)}
    assert {"w_q_a", "w_q_b", "w_kv_a", "w_o", "w_gate", "w_up", "w_down"} == held
    assert isinstance(layers[1].w_gate_experts, BlockMatrix)
    for layer in layers:
        assert isinstance(layer.w_uk, jax.Array) and isinstance(layer.w_uv, jax.Array)
    for (name, w), (_, numbers) in zip(matrices(kept), matrices(wanted), strict=True):
        found = w.numbers() if isinstance(w, BlockMatrix) else w
        np.testing.assert_array_equal(np.asarray(found), np.asarray(numbers), err_msg=name)
    # A byte for each code, and four for each of the scales.
    for w, form in ((layers[1].w_down_experts, "fp8_32"), (layers[1].w_up_experts, "fp8")):
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(w)) == np.prod(w.shape) * (1 + 4 / FORMS[form].group)


@native_products
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("linear", ["native", "xla", "auto"])
def test_an_engine_computes_with_the_codes_what_it_computes_with_widened_weights(linear, dtype, tmp_path):
    path, twin = deepseek(tmp_path)
    settings = SETTINGS | {"dtype": dtype, "operators": {"linear": linear}}
    kept, plain = LLM(path, quantization="stored", **settings), LLM(twin, **settings)
    found, wanted = scored(kept), scored(plain)
    # Packed matrices are summed in another order.
    exact = linear == "native" or (dtype, linear) == ("f32", "xla")
    most = 0 if exact else {"f32": 1e-5, "bf16": 0.05}[dtype]
    assert np.abs(found - wanted).mean() <= most * wanted.std()
    used = sum(leaf.nbytes for leaf in jax.tree.leaves(kept.runner.params))
    packs = kept.config.operators.linear == "packed"
    assert kept.memory_plan.weights_bytes == used < plain.memory_plan.weights_bytes
    assert used == weights_bytes(kept.model_config, dtype, quantization="stored", packs=packs)


def test_a_plan_counts_the_bytes_of_codes_and_scales(tmp_path):
    path, _ = deepseek(tmp_path)
    found = plan(str(path), "24GiB", dtype="bf16", quantization="stored", context=64, batch=1, step=NO_STEP)
    _, read = open_model(path, "bf16", quantization="stored")
    assert found.weights_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(read()))


@pytest.mark.parametrize(
    "part, value, said",
    [
        ("weight", ml_dtypes.float8_e4m3fn(np.nan), "q_proj.weight has codes that are NaN"),
        ("weight_scale_inv", np.float32(2.0**119), "q_proj.weight has scales that are NaN or infinite, or above 2"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(part, value, said, tmp_path):
    def broken(rng, shape):
        parts, numbers = fp8(rng, shape)
        parts[part][0, 0] = value
        return parts, numbers

    with pytest.raises(LoadError, match=said):
        opened(write_quantised(tmp_path, broken, fp8_config())[0])
