"""`quantization: stored`: codes of quantised safetensors stay in memory."""

import dataclasses
import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from ksana_jax import LLM
from ksana_jax.core.config import ConfigError
from ksana_jax.core.errors import LoadError
from ksana_jax.loading.load import load_model, open_model
from ksana_jax.models.block_matrix import BlockMatrix
from ksana_jax.ops.linear import choose_linear
from ksana_jax.ops.weight_packing import pack
from ksana_jax.runner.planner.solve import NO_STEP, plan
from ksana_jax.runner.planner.terms import weights_bytes
from tests.loading.quantised.on_disk import (
    CONFIG,
    awq,
    awq_config,
    compressed,
    compressed_config,
    fp8,
    fp8_config,
    gptq,
    gptq_config,
    write_quantised,
)
from tests.loading.quantised.test_formats import PHI3, SETTINGS, scored, shown
from tests.loading.test_kept import matrices
from tests.machine import native_products
from tests.native.test_blocks import rounded

BF16 = ml_dtypes.bfloat16
# Options of GPTQ, and the form that memory has.
KEPT = [
    ({}, "int4"),
    ({"bits": 8}, "int8"),
    ({"scales": BF16}, "int4_f32"),
    ({"bits": 8, "scales": BF16}, "int8_f32"),
    ({"sym": False}, "int4_zeros"),
    ({"bits": 8, "sym": False, "scales": BF16}, "int8_zeros"),
    ({"group": 64}, "int4"),
]


def opened(path, **options):
    config, read = open_model(path, "f32", quantization="stored", **options)
    return config, read()


def check_numbers(path, forms) -> None:
    (config, kept), (_, wanted) = opened(path), load_model(path)
    assert {kind for _, kind in config.kept} == forms
    for (name, w), (_, numbers) in zip(matrices(kept), matrices(wanted), strict=True):
        assert isinstance(w, BlockMatrix) == (name not in ("embed", "head")), name
        found = w.numbers() if isinstance(w, BlockMatrix) else w
        np.testing.assert_array_equal(np.asarray(found), np.asarray(numbers), err_msg=name)


@pytest.mark.parametrize("options, form", KEPT, ids=lambda value: value if isinstance(value, str) else shown(value))
def test_numbers_of_gptq_are_those_of_dequantised_weights_bit_for_bit(options, form, tmp_path):
    settings = gptq_config(**{name: value for name, value in options.items() if name != "scales"})
    path, _ = write_quantised(tmp_path, functools.partial(gptq, **options), settings)
    check_numbers(path, {form})


@pytest.mark.parametrize("config", [CONFIG, PHI3], ids=lambda config: config.family)
@pytest.mark.parametrize(
    "quantise, settings, form",
    [
        (awq, awq_config(), "int4_zeros"),
        (compressed, compressed_config(), "int4_f32"),
        (functools.partial(compressed, sym=False, scales=BF16), compressed_config(sym=False), "int4_zeros"),
        (functools.partial(compressed, bits=8, scales=np.float16), compressed_config(bits=8), "int8"),
    ],
    ids=["awq", "w4a16", "w4a16 zeros", "w8a16"],
)
def test_numbers_of_other_formats_and_of_fused_tensors_are_too(quantise, settings, form, config, tmp_path):
    check_numbers(write_quantised(tmp_path, quantise, settings, config)[0], {form})


@native_products
@pytest.mark.parametrize("options, form", KEPT, ids=[form for _, form in KEPT])
def test_native_products_are_those_of_the_numbers_with_rounded_rows(options, form, tmp_path):
    settings = gptq_config(**{name: value for name, value in options.items() if name != "scales"})
    _, params = opened(write_quantised(tmp_path, functools.partial(gptq, **options), settings)[0])
    w = params.layers[0].w_gate
    x = np.random.default_rng(1).normal(size=(5, w.shape[1])).astype(np.float32)
    found = jax.jit(lambda x: choose_linear("cpu", "float32", "packed").load().linear(x, pack(w)))(x)
    codes, numbers = rounded(x), np.asarray(w.numbers(), np.float64)
    assert (np.abs(found - codes @ numbers.T) <= 3e-6 * (np.abs(codes) @ np.abs(numbers).T + 1)).all()


@pytest.mark.parametrize("quantise, settings", [(gptq, gptq_config()), (awq, awq_config())], ids=["gptq", "awq"])
def test_an_engine_computes_with_the_codes(quantise, settings, tmp_path):
    path, twin = write_quantised(tmp_path, quantise, settings)
    plain = scored(LLM(twin, operators={"linear": "xla"}, **SETTINGS))
    for linear in ("xla", "auto"):
        llm = LLM(path, quantization="stored", operators={"linear": linear}, **SETTINGS)
        packs = llm.config.operators.linear == "packed"
        # XLA's products are those of dequantised weights; native ones round activations to codes.
        apart = np.abs(scored(llm) - plain).mean() / plain.std()
        assert (1e-4 < apart < 0.06) if packs else apart == 0  # measured: 0.033
        used = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.runner.params))
        assert llm.memory_plan.weights_bytes == used
        assert used == weights_bytes(llm.model_config, "f32", quantization="stored", packs=packs)


def test_a_plan_knows_the_bytes_of_codes_and_scales(tmp_path):
    path, _ = write_quantised(tmp_path, awq, awq_config())
    config, params = opened(path)
    found = plan(str(path), "24GiB", dtype="f32", quantization="stored", context=64, batch=1, step=NO_STEP)
    assert found.weights_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    numbers = sum(np.prod(w.shape) for name, w in matrices(params) if isinstance(w, BlockMatrix))
    others = (2 * config.vocab_size + 5) * config.d_model
    assert found.weights_bytes == numbers * 6 / 8 + 4 * others


def test_matrices_that_cannot_be_kept_are_dequantised_and_named_once(tmp_path, caplog):
    narrow = dataclasses.replace(CONFIG, d_ff=48)
    path, twin = write_quantised(tmp_path, gptq, gptq_config(), narrow)
    _, params = opened(path)
    _, wanted = load_model(twin)
    for layer, plain in zip(params.layers, wanted.layers, strict=True):
        np.testing.assert_array_equal(layer.w_down, plain.w_down)
        assert isinstance(layer.w_up, BlockMatrix)
    [message] = [message for message in caplog.messages if "dequantised" in message]
    assert message.endswith("2 have rows of 48 numbers, no multiple of 32")


REFUSED = [
    (functools.partial(fp8, block=(24, 40)), fp8_config(block=(24, 40)), "14 have groups of 40 columns"),
    (functools.partial(gptq, desc_act=True), gptq_config(desc_act=True), "columns in an order of their own .desc_act."),
    (functools.partial(gptq, group=24), gptq_config(group=24), "groups of 24 columns"),
    (functools.partial(compressed, sym=False), compressed_config(sym=False), "zeros with scales in F32"),
]


@pytest.mark.parametrize("quantise, settings, reason", REFUSED, ids=[reason for *_, reason in REFUSED])
def test_a_checkpoint_of_which_nothing_can_be_kept_is_refused_with_the_reason(quantise, settings, reason, tmp_path):
    path, _ = write_quantised(tmp_path, quantise, settings)
    with pytest.raises(ConfigError, match=reason):
        opened(path)


def test_scales_that_are_not_finite_are_refused(tmp_path):
    def infinite(rng, shape):
        parts, numbers = gptq(rng, shape)
        parts["scales"][0, 0] = np.inf
        return parts, numbers

    with pytest.raises(LoadError, match=r"q_proj\.weight has scales that are NaN or infinite"):
        opened(write_quantised(tmp_path, infinite, gptq_config())[0])
