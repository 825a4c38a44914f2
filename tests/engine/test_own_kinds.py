"""Every weight and every kind of MLP and norm, own ones too, with every setting that treats them differently.
An engine has the tokens of the model without a cache, or one ConfigError names the kind before weights are read."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.engine.build import build_engine
from ksana_jax.engine.settings import engine_config
from ksana_jax.models.dense import dense_logits
from ksana_jax.models.params import quantised
from tests.engine.test_invariant_numerics import bits
from tests.machine import native_products
from tests.models.own_kinds import CONFIGS, Unstated, register, weights
from tests.soak import soak_unless

pytestmark = pytest.mark.usefixtures("few_shapes")

SETTINGS: dict[str, Any] = {"block_size": 16, "num_blocks": 16, "max_num_seqs": 2, "max_num_batched_tokens": 16}
SETTINGS |= {"query_tile": 16, "max_model_len": 48}
PROMPTS = [np.random.default_rng(1).integers(0, 97, n) for n in (21, 5)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, detokenize=False)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    register(monkeypatch)


def completions(llm: LLM, prompts=PROMPTS) -> list:
    return [output.outputs[0] for output in llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY)]


def made(name: str, params=None, **settings) -> LLM:
    return LLM.from_params(CONFIGS[name], weights(name) if params is None else params, **SETTINGS | settings)


def expect_dense(name: str, found: list, quantization: str | None = None) -> None:
    params = quantised(weights(name), quantization)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        scores = dense_logits(params, jnp.asarray([*prompt, *completion.token_ids]), config=CONFIGS[name])
        assert completion.token_ids == scores[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("name", "quantization"),
    soak_unless(
        lambda case: case[1] is None or case in (("everything", "int8"), ("experts", "w8a8")),
        itertools.product(
            "everything after scaled own squared parallel shared experts clamped mixed reads latent".split(),
            (None, "int8", "w8a8"),
        ),
    ),
)
def test_tokens_are_those_of_the_model_without_a_cache(name, quantization):
    expect_dense(name, completions(made(name, quantization=quantization)), quantization)


def test_tokens_of_kinds_without_statements_are_those_of_the_model_without_a_cache():
    expect_dense("unstated", completions(made("unstated")))


def test_texts_longer_than_a_table_of_positions_are_refused():
    with pytest.raises(ConfigError, match="max_model_len is 66, this model has a table of 64 positions"):
        made("parallel", max_model_len=66)
    assert made("parallel", max_model_len=65).engine.max_model_len == 65


@native_products
@pytest.mark.parametrize(
    "name", ["everything", "after", "scaled", "own", "shared", "experts", "clamped", "mixed", "reads"]
)
def test_numbers_are_invariant(name):
    alone = made(name, numerics="invariant", max_num_seqs=1, max_num_batched_tokens=4, query_tile=4)
    together = completions(made(name, numerics="invariant"))
    assert [bits(c) for c in together] == [bits(c) for p in PROMPTS for c in completions(alone, [p])]
    expect_dense(name, together)


@pytest.mark.parametrize(
    ("changed", "settings", "said"),
    [
        ({}, {"quantization": "int8"}, "quantization is 'int8': mlp 'unstated' does not state quantises"),
        ({}, {"quantization": "w8a8"}, "quantization is 'w8a8': mlp 'unstated' does not state quantises"),
        pytest.param(
            {"norm": "rms"},
            {"numerics": "invariant"},
            "'invariant' needs .* mlp 'unstated' does not state row_by_row",
            marks=native_products,
        ),
        pytest.param(
            {"mlp": "swiglu"},
            {"numerics": "invariant"},
            "'invariant' needs .* norms are centred; native norms are",
            marks=native_products,
        ),
    ],
)
def test_what_a_kind_does_not_state_is_refused_before_weights_are_read(changed, settings, said):
    config = dataclasses.replace(CONFIGS["unstated"], **changed)
    with pytest.raises(ConfigError, match=said):
        build_engine(config, pytest.fail, engine_config(SETTINGS | settings))


def test_a_field_that_states_nothing_is_refused_before_weights_are_read(monkeypatch):
    register(monkeypatch, Unstated)
    with pytest.raises(ConfigError, match="weight w_new does not state what quantization must know"):
        build_engine(CONFIGS["own"], pytest.fail, engine_config(SETTINGS | {"quantization": "int8"}))


@native_products
@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_a_field_that_states_nothing_is_served_where_no_setting_needs_to_know_it(monkeypatch, numerics):
    params = weights("own")
    register(monkeypatch, Unstated)
    layers = tuple(Unstated(**vars(p)) for p in params.layers)
    expect_dense("own", completions(made("own", params.replace(layers=layers), numerics=numerics)))
