"""`LLM.logprobs_function`: training computes the numbers that the engine samples by, bit by bit."""

import dataclasses
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import LLM, AttentionPattern, SamplingParams
from ksana_jax.core import processor
from ksana_jax.core.config import ConfigError
from ksana_jax.models import dense_logits, init_params
from tests.engine.small import VOCAB, model
from tests.machine import native_products

pytestmark = pytest.mark.cpu("invariant numerics need native operators")

SETTINGS: dict[str, Any] = {"numerics": "invariant", "max_model_len": 128, "max_num_seqs": 4, "num_blocks": 40}
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 32, "query_tile": 16}
TEXTS = np.random.default_rng(3).integers(2, VOCAB, (3, 77))
ASKED = SamplingParams(max_tokens=9, temperature=1.0, seed=5, logprobs=0, prompt_logprobs=0, detokenize=False)
CONFIG = dataclasses.replace(model()[0], max_position=128)
TYPES = {"f32": "float32", "bf16": "bfloat16"}


def weights(dtype: str, seed: int = 3) -> Any:
    return init_params(CONFIG, seed=seed, std=0.5, dtype=TYPES[dtype])


def served(llm: LLM, prompts: Any, asked: SamplingParams = ASKED) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the tokens of each prompt with its completion, and log-probabilities of all but the first."""
    found = []
    for output in llm.generate([{"prompt_token_ids": list(map(int, ids))} for ids in prompts], asked):
        [completion] = output.outputs
        tokens = np.array([*output.prompt_token_ids, *completion.token_ids])
        entries = [*(output.prompt_logprobs or [])[1:], *completion.logprobs]
        followed = tokens[len(tokens) - len(entries) :]
        scores = [entry[int(token)].logprob for token, entry in zip(followed, entries, strict=True)]
        found.append((tokens, np.array(scores, np.float32)))
    return found


def chosen(logprobs: jax.Array, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(logprobs)[np.arange(len(tokens) - 1), tokens[1:]]


@native_products
@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=pytest.mark.soak)])
def test_bits_are_those_of_requests_whatever_their_batch_chunks_and_cache(dtype):
    params = weights(dtype)
    variants = [CHUNKS, {"max_num_batched_tokens": 7, "query_tile": 4, "max_num_seqs": 2, "block_size": 32}]
    for number, variant in enumerate(variants):
        llm = LLM.from_params(CONFIG, params, **SETTINGS | {"dtype": dtype} | variant)
        function = llm.logprobs_function()
        found = served(llm, TEXTS)
        together = function(params, jnp.array([tokens for tokens, _ in found]))
        for (tokens, scores), row in zip(found, together, strict=True):
            assert np.array_equal(chosen(row, tokens), scores)
        tokens, scores = found[0]
        if number == 0:  # compiled as one program with the loss, and not inside of another program
            alone = jnp.array([tokens])

            def loss(params, function=function, alone=alone):
                found = function(params, alone)
                return found.mean(), found

            (_, [inside]), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
            assert np.array_equal(chosen(inside, tokens), scores)
            assert np.array_equal(chosen(jax.jit(function)(params, alone)[0], tokens), scores)
            assert np.array_equal(chosen(function(params, alone[:, :50])[0], tokens[:50]), scores[:49])


@native_products
@pytest.mark.parametrize("dtype", TYPES)
def test_bits_are_those_after_a_cached_prefix_and_after_new_weights(dtype):
    asked = dataclasses.replace(ASKED, prompt_logprobs=None)
    settings = SETTINGS | CHUNKS | {"dtype": dtype, "enable_prefix_caching": True}
    llm = LLM.from_params(CONFIG, weights(dtype), **settings)
    function = llm.logprobs_function()
    for seed in (3, 4):
        params = weights(dtype, seed)
        llm.update_weights(params)
        for cached in (0, 64):
            before = llm.engine.memory.counters.hit_tokens
            [(tokens, scores)] = served(llm, TEXTS[:1], asked)
            assert llm.engine.memory.counters.hit_tokens - before == cached
            row = chosen(function(params, jnp.array([tokens]))[0], tokens)
            assert np.array_equal(row[-len(scores) :], scores)


@native_products
def test_the_gradient_is_that_of_the_plain_model():
    params, pattern = weights("f32"), AttentionPattern(window=20)
    llm = LLM.from_params(CONFIG, params, **SETTINGS | CHUNKS, pattern=pattern)
    tokens, function = jnp.array(TEXTS), llm.logprobs_function()
    windowed = dataclasses.replace(CONFIG, pattern=pattern)

    def plain(params, tokens):
        return jax.nn.log_softmax(dense_logits(params, tokens, config=windowed))

    def loss(logprobs, params):
        picked = jnp.take_along_axis(logprobs(params, tokens)[:, :-1], tokens[:, 1:, None], axis=-1)
        return jnp.mean(jnp.exp(picked) - picked)

    found, wanted = (jax.grad(loss, argnums=1)(f, params) for f in (function, plain))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        # float32 through two layers; the gradients themselves reach 0.1.
        np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-4)
    assert max(float(abs(x).max()) for x in jax.tree.leaves(wanted)) > 0.01


@native_products
def test_bits_are_the_same_without_avx512():
    if "avx512f" not in processor.features():
        pytest.skip("this machine has no AVX-512 to hide")
    chosen = ["-k", "cached_prefix", "-q", "-p", "no:xdist", __file__]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *chosen],
        env=os.environ | {"KSANA_HIDE": "avx512", "KSANA_PROGRAMS": "off"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout[-2000:]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"numerics": "fast"}, 'does not go with numerics "fast"'),
        ({"quantization": "int8"}, "does not go with quantization"),
    ],
)
@native_products
def test_an_engine_whose_numbers_depend_on_more_than_weights_says_so(settings, said):
    llm = LLM.from_params(CONFIG, weights("f32"), **SETTINGS | CHUNKS | settings)
    with pytest.raises(ConfigError, match=said):
        llm.logprobs_function()
