"""The recurrence of layers with a matrix per head against its equations in float64, for texts of any lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.models.layers import linear
from ksana_jax.models.recurrent import Terms, TextTokens, mixer, token_by_token
from tests.models import own_kinds

HEADS, KEYS, VALUES = 3, 5, 4
FAR = 2**30
# Lengths of the texts of a step; 0 is a text that the step does not have.
LENGTHS = {"one": (53,), "several": (1, 16, 0, 33, 15, 0)}


def definition(matrices, texts, terms, delta):
    """One token after the other in float64; also a text's state after it."""
    states, rows = matrices.astype(np.float64), []
    for n, text in enumerate(texts):
        q, k, v, g, beta = (np.float64(x[n]) for x in terms)
        for h in range(HEADS):
            state = np.exp(g[h])[:, None] * states[text, h]
            u = beta[h] * (v[h] - state.T @ k[h]) if delta else v[h]
            states[text, h] = state + np.outer(k[h], u)
        rows.append([states[text, h].T @ q[h] for h in range(HEADS)])
    return np.array(rows), states


@pytest.mark.parametrize(("delta", "decays"), [(True, KEYS), (True, 1), (False, 1)])
@pytest.mark.parametrize("name", LENGTHS)
def test_tokens_one_by_one_are_the_definition(delta, decays, name):
    rng, lengths, padding = np.random.default_rng(4), LENGTHS[name], 7
    texts = np.repeat(np.arange(len(lengths)), lengths)
    num = len(texts)

    def normal(*shape):
        return rng.standard_normal((num + padding, *shape)).astype(np.float32)

    k = normal(HEADS, KEYS)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    # Decays from nearly none to one after which nothing is left, whose inverse would overflow.
    g = -np.exp(rng.uniform(-6, 5, (num + padding, HEADS, decays))).astype(np.float32)
    terms = Terms(normal(HEADS, KEYS), k, normal(HEADS, VALUES), g, 2 / (1 + np.exp(-normal(HEADS))))
    matrices = rng.standard_normal((len(lengths), HEADS, KEYS, VALUES)).astype(np.float32)
    text = jax.numpy.asarray(np.pad(texts, (0, padding), constant_values=FAR))

    def run(matrices, inputs):
        def given(*x):
            return Terms(*x) if delta else Terms(*x)._replace(beta=None)

        return token_by_token(matrices, text, tuple(inputs), text, given, lambda out, *_: out)

    rows, states = jax.jit(run)(matrices, jax.tree.map(jax.numpy.asarray, terms))
    expected, after = definition(matrices, texts, terms, delta)
    np.testing.assert_allclose(rows[:num], expected, atol=2e-5, rtol=0)
    np.testing.assert_allclose(states, after, atol=2e-5, rtol=0)
    absent = [text for text, length in enumerate(lengths) if not length]
    np.testing.assert_array_equal(np.asarray(states)[absent], matrices[absent])


@pytest.mark.cpu("XLA:CPU keeps the order of sums in a loop")
@pytest.mark.parametrize("name", ["gated", "mamba", "recurrent"])
def test_a_token_alone_in_a_step_gets_the_bits_that_it_gets_among_others(name):
    config, rng = own_kinds.CONFIGS[name], np.random.default_rng(5)
    mix = mixer(own_kinds.weights(name).layers[0], config.recurrent, linear)
    x = jnp.asarray(rng.standard_normal((5, config.d_model)), jnp.float32)
    state = {
        n: jnp.asarray(rng.standard_normal((1, *s)), jnp.float32) for n, (s, _) in config.recurrent.state(32).items()
    }
    inputs, gate = mix.project(x)
    advance = jax.jit(mix.advance)
    text, last = jnp.zeros(5, int), jnp.array([4])
    out, after = advance(inputs, gate, state, TextTokens(text, jnp.arange(5), last))
    _, again = advance(inputs, None, state, TextTokens(text, jnp.arange(5), last))
    for at in range(5):
        one = slice(at, at + 1)
        given = {n: part[one] for n, part in inputs.items()}
        alone, state = advance(given, gate[one], state, TextTokens(text[one], jnp.zeros(1, int), jnp.array([0])))
        np.testing.assert_array_equal(alone, out[one])
    for n, part in state.items():
        np.testing.assert_array_equal(part, after[n])
        np.testing.assert_array_equal(part, again[n])
