"""Quantised safetensors load as the numbers that their formats define, bit for bit."""

import functools

import jax
import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.loading import load_model
from tests.loading.quantised.on_disk import awq, awq_config, fp8, fp8_config, gptq, gptq_config, write_quantised

GPTQ = [
    {},
    {"bits": 8},
    {"sym": False},
    {"bits": 8, "sym": False, "version": "gptq_v2"},
    {"desc_act": True, "sym": False},
    {"group": 24, "version": "gptq_v2"},
]

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


@pytest.mark.parametrize("quantise, settings", [(gptq, gptq_config()), (awq, awq_config()), (fp8, fp8_config())])
def test_an_engine_computes_what_it_computes_with_the_numbers(quantise, settings, tmp_path):
    quantised, twin = write_quantised(tmp_path, quantise, settings)
    np.testing.assert_array_equal(logprobs(quantised), logprobs(twin))
