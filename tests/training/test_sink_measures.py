"""Measures of attention sinks, against their definition in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training.sink_measures import received_attention, sink_measures, sink_strength
from ksana_jax.core.config import ModelConfig
from ksana_jax.models import init_params
from tests.reference import reference_logprobs

CONFIG = ModelConfig(
    vocab_size=50, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48, max_position=64
).validate()


def literal_alpha(weights, k):
    """alpha_k of one head, k from 1: the mean weight of position k over queries k .. T."""
    length = len(weights)
    return sum(weights[i - 1][k - 1] for i in range(k, length + 1)) / (length - k + 1)


def test_measures_are_those_of_the_definition():
    length, num_first = 24, 3
    params = init_params(CONFIG, seed=0)
    # Larger queries, so that heads differ and some pay more than epsilon.
    layers = tuple(dataclasses.replace(layer, w_q=layer.w_q * 200) for layer in params.layers)
    params = dataclasses.replace(params, layers=layers)
    tokens = np.random.default_rng(0).integers(0, 50, (3, length)).astype(np.int32)
    received, ratios = sink_measures(params, jnp.array(tokens), config=CONFIG, num_first=num_first)
    assert received.shape == (2, 3, 4, num_first) and ratios.shape == (2, 3, 2)
    wanted, wanted_ratios = np.zeros(received.shape), np.zeros(ratios.shape)
    for text, ids in enumerate(tokens):
        weights, stored = [], []
        reference_logprobs(params, CONFIG, ids, attention=weights, stored=lambda x, seen=stored: (seen.append(x), x)[1])
        for layer in range(2):
            for head in range(4):
                for k in range(num_first):
                    wanted[layer, text, head, k] = literal_alpha(weights[layer * 4 + head], k + 1)
            norms = np.sqrt((stored[2 * layer + 1] ** 2).sum(-1))  # keys and values are stored in turn
            wanted_ratios[layer, text] = norms[0] / np.median(norms, axis=0)
    # float32 against float64, with scores of up to a few hundred.
    np.testing.assert_allclose(received, wanted, atol=1e-4)
    np.testing.assert_allclose(ratios, wanted_ratios, rtol=1e-4)
    strength = sink_strength(np.asarray(received), 0.3)
    assert strength == pytest.approx([np.mean([a > 0.3 for a in wanted[..., k].ravel()]) for k in range(num_first)])
    assert 0 < strength[0] < 1


def test_uniform_attention_pays_the_harmonic_mean_to_the_first_position():
    length = 64
    uniform = np.tril(np.ones((length, length))) / np.arange(1, length + 1)[:, None]
    found = received_attention(jnp.array(uniform), 2)
    assert found[0] == pytest.approx(sum(1 / n for n in range(1, 65)) / 64, abs=1e-6)
    assert found[1] == pytest.approx(sum(1 / n for n in range(2, 65)) / 63, abs=1e-6)
