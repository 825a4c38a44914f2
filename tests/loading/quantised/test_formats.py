"""Quantised safetensors load as the numbers that their formats define, bit for bit."""

import dataclasses
import functools
import shutil

import jax
import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.core.sources import model_path
from ksana_jax.engine.fingerprint import digest_of_params
from ksana_jax.engine.model_facts import model_facts
from ksana_jax.loading.digest import digest_of_files
from ksana_jax.loading.export import export_hf
from ksana_jax.loading.find import find_weights
from ksana_jax.loading.gguf_export import export_gguf
from ksana_jax.loading.load import load_model, open_model, read_weight
from ksana_jax.sharding.shares import Share
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

GPTQ = [
    {},
    {"bits": 8},
    {"sym": False},
    {"bits": 8, "sym": False, "version": "gptq_v2"},
    {"desc_act": True, "sym": False},
    {"group": 24, "version": "gptq_v2"},
]

HALF = RopeConfig(partial_rotary_factor=0.5)
PHI3 = dataclasses.replace(CONFIG, family="phi3", rope=HALF)
GLM4 = dataclasses.replace(CONFIG, family="glm4", norm_placement="both", rope=HALF)
PROMPT = {"prompt_token_ids": list(range(5, 45))}
SETTINGS = {"max_num_seqs": 2, "max_model_len": 64, "dtype": "f32"}
SCORED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False)


def logprobs(model) -> np.ndarray:
    return scored(LLM(model, **SETTINGS))


def scored(llm) -> np.ndarray:
    [output] = llm.generate([PROMPT], SCORED)
    return np.array([next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]])


def shown(options):
    return " ".join(f"{name}={value}" for name, value in options.items()) or "default"


def check_twins(quantised, twin, dtype="f32"):
    (config, found), (plain, wanted) = load_model(quantised, dtype), load_model(twin, dtype)
    assert config == plain
    for (path, a), (_, b) in zip(*(jax.tree_util.tree_leaves_with_path(params) for params in (found, wanted))):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("options", GPTQ, ids=shown)
def test_gptq_is_the_product_of_scales_and_codes_less_zeros(options, tmp_path):
    check_twins(*write_quantised(tmp_path, functools.partial(gptq, **options), gptq_config(**options)))


@pytest.mark.parametrize("options", [{}, {"group": 40}], ids=shown)
def test_awq_is_the_product_of_scales_and_codes_less_zeros(options, tmp_path):
    check_twins(*write_quantised(tmp_path, functools.partial(awq, **options), awq_config(**options)))


@pytest.mark.parametrize("options", [{}, {"block": (24, 40)}], ids=shown)
def test_fp8_is_the_product_of_codes_and_scales_of_blocks(options, tmp_path):
    check_twins(*write_quantised(tmp_path, functools.partial(fp8, **options), fp8_config(**options)))


@pytest.mark.parametrize(
    "quantise, settings",
    [(gptq, gptq_config()), (awq, awq_config()), (compressed, compressed_config()), (fp8, fp8_config())],
    ids=["gptq", "awq", "compressed", "fp8"],
)
def test_an_engine_computes_what_it_computes_with_the_numbers(quantise, settings, tmp_path):
    quantised, twin = write_quantised(tmp_path, quantise, settings)
    np.testing.assert_array_equal(logprobs(quantised), logprobs(twin))


@pytest.mark.parametrize("config", [PHI3, GLM4], ids=lambda config: config.family)
@pytest.mark.parametrize("quantise, settings", [(gptq, gptq_config()), (fp8, fp8_config())], ids=["gptq", "fp8"])
def test_fused_tensors_and_rows_in_another_order_are_read(quantise, settings, config, tmp_path):
    check_twins(*write_quantised(tmp_path, quantise, settings, config))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_other_dtypes_round_the_numbers_once(dtype, tmp_path):
    check_twins(*write_quantised(tmp_path, gptq, gptq_config()), dtype)


LISTS = [("modules_to_not_convert", ["lm_head", "model.layers.0.mlp.up_proj"]), ("modules_to_not_convert", ["up_proj"])]
LISTS += [("ignore", ["re:.*up_proj$"]), ("ignore", None)]


@pytest.mark.parametrize(("name", "modules"), LISTS)
def test_modules_that_are_not_quantised_are_read_as_they_are_however_the_config_lists_them(name, modules, tmp_path):
    for quantise, settings in ((compressed, compressed_config()), (fp8, fp8_config())):
        plain = ("lm_head", "embed_tokens", "up_proj")
        folder = tmp_path / settings["quant_method"]
        check_twins(*write_quantised(folder, quantise, settings | {name: modules}, plain=plain))


def test_a_device_gets_its_share_of_rows_and_columns(tmp_path):
    path, twin = write_quantised(tmp_path, awq, awq_config())
    found, wanted = (find_weights(folder, CONFIG)["model.layers.0.mlp.down_proj.weight"] for folder in (path, twin))
    for share in (Share(slice(24, 48)), Share(slice(None), slice(32, 64)), Share(slice(3, 9), slice(5, 70), padding=2)):
        a, b = (read_weight([stored], stored.shape, np.float32, share) for stored in (found, wanted))
        np.testing.assert_array_equal(a, b)


def test_doctor_says_how_matrices_are_quantised(tmp_path):
    path, _ = write_quantised(tmp_path, gptq, gptq_config())
    [fact] = [fact for fact in model_facts(path) if fact.name == "weights in files"]
    assert fact.value == "tensors: 14 in GPTQ, 7 in F32; GPTQ, 4 bits, groups of 32 share a scale"


def test_digests_tell_checkpoints_apart_that_differ_in_one_part(tmp_path):
    def change(tensors):
        tensors["model.layers.1.mlp.down_proj.qzeros"][2, 3] ^= 16

    asymmetric = functools.partial(gptq, sym=False), gptq_config(sym=False)
    models = [write_quantised(tmp_path / n, *asymmetric, change=c)[0] for n, c in (("a", None), ("b", change))]
    assert len({digest_of_files(model) for model in models}) == 2
    for quantization in (None, "stored"):
        digests = set()
        for model in models:
            _, read = open_model(model, quantization=quantization)
            digests.update([read.digest(), digest_of_params(read())])
        assert len(digests) == 4


def test_export_and_quantize_write_dequantised_weights(tmp_path):
    path, twin = write_quantised(tmp_path, gptq, gptq_config(), dataclasses.replace(CONFIG, vocab_size=1024))
    export_hf(tmp_path / "exported", *load_model(path))
    check_twins(tmp_path / "exported", twin)
    for folder in (path, twin):
        shutil.copy(model_path("ksana-tiny") / "tokenizer.model", folder)
        export_gguf(folder, folder.with_suffix(".gguf"), "Q8_0")
    check_twins(path.with_suffix(".gguf"), twin.with_suffix(".gguf"))
