"""The recurrence of layers with a matrix per head against its equations in float64, for texts of any lengths."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.models.layers import linear
from ksana_jax.models.recurrent import Terms, mixer, together, token_by_token
from ksana_jax.models.text_tokens import TextTokens
from ksana_jax.ops.pool import KVCache
from ksana_jax.ops.states import paged_recur
from ksana_jax.scheduler.step.per_token import StateArrays
from ksana_jax.scheduler.step.types import StepShape, TileGroup
from tests.models import own_kinds

HEADS, KEYS, VALUES = 3, 5, 4
FAR = 2**30
# Lengths of the texts of a step; 0 is a text that the step does not have.
LENGTHS = {"one": (53,), "several": (1, 16, 0, 33, 15, 0)}
# Whether there is a delta rule, and decays of a head.
KINDS = [(True, KEYS), (True, 1), (False, 1)]


def definition(matrices, texts, terms, delta, reads=None):
    """One token after the other in float64; also a text's state after it."""
    states, rows = matrices.astype(np.float64), []
    for n, (text, read) in enumerate(zip(texts, texts if reads is None else reads, strict=True)):
        q, k, v, g, beta = (np.float64(x[n]) for x in terms)
        for h in range(HEADS):
            state = np.exp(g[h])[:, None] * states[read, h]
            u = beta[h] * (v[h] - state.T @ k[h]) if delta else v[h]
            states[text, h] = state + np.outer(k[h], u)
        rows.append([states[text, h].T @ q[h] for h in range(HEADS)])
    return np.array(rows), states


def random_terms(rng, num, decays):
    def normal(*shape):
        return rng.standard_normal((num, *shape)).astype(np.float32)

    k = normal(HEADS, KEYS)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    # Decays from nearly none to one after which nothing is left, whose inverse would overflow.
    g = -np.exp(rng.uniform(-6, 5, (num, HEADS, decays))).astype(np.float32)
    return Terms(normal(HEADS, KEYS), k, normal(HEADS, VALUES), g, 2 / (1 + np.exp(-normal(HEADS))))


@pytest.mark.parametrize(("delta", "decays"), KINDS)
@pytest.mark.parametrize("name", LENGTHS)
def test_tokens_one_by_one_are_the_definition(delta, decays, name):
    rng, lengths, padding = np.random.default_rng(4), LENGTHS[name], 7
    texts = np.repeat(np.arange(len(lengths)), lengths)
    num = len(texts)
    terms = random_terms(rng, num + padding, decays)
    matrices = rng.standard_normal((len(lengths), HEADS, KEYS, VALUES)).astype(np.float32)
    text = jax.numpy.asarray(np.pad(texts, (0, padding), constant_values=FAR))

    def run(matrices, inputs):
        def given(*x):
            return Terms(*x) if delta else Terms(*x)._replace(beta=None)

        return token_by_token(matrices, (text, text), tuple(inputs), text, given, lambda out, *_: out)

    rows, states = jax.jit(run)(matrices, jax.tree.map(jax.numpy.asarray, terms))
    expected, after = definition(matrices, texts, terms, delta)
    np.testing.assert_allclose(rows[:num], expected, atol=2e-5, rtol=0)
    np.testing.assert_allclose(states, after, atol=2e-5, rtol=0)
    absent = [text for text, length in enumerate(lengths) if not length]
    np.testing.assert_array_equal(np.asarray(states)[absent], matrices[absent])


@pytest.mark.parametrize(("delta", "decays"), KINDS)
@pytest.mark.parametrize("of_chunks", [(), (2, 2, 2, 2, 2, FAR, 4, 4, 4), (2, 2, 2, 3, 3)], ids=str)
def test_tokens_together_are_the_definition(delta, decays, of_chunks):
    rng, text = np.random.default_rng(6), np.array([0, 1, FAR, FAR, *of_chunks])  # padding where texts 2 and 3 would be
    reads = np.where((text == 3) & (np.roll(text, 1) == 2), 2, text)  # text 3 continues text 2
    terms = random_terms(rng, len(text), decays)
    matrices = rng.standard_normal((5, HEADS, KEYS, VALUES)).astype(np.float32)

    def run(matrices, inputs):
        def given(*x):
            return Terms(*x) if delta else Terms(*x)._replace(beta=None)

        of = jnp.asarray(text), jnp.asarray(reads)
        return together(matrices, of, inputs, text[:, None], given, lambda out, *_: out, 4)

    rows, states = jax.jit(run)(matrices, tuple(map(jnp.asarray, terms)))
    real = text < FAR
    expected, after = definition(matrices, text[real], [x[real] for x in terms], delta, reads[real])
    np.testing.assert_allclose(np.asarray(rows)[real], expected, atol=2e-5, rtol=0)
    np.testing.assert_allclose(states, after, atol=2e-5, rtol=0)
    absent = sorted({*range(5)} - {*text})
    np.testing.assert_array_equal(np.asarray(states)[absent], matrices[absent])


@pytest.mark.parametrize(("parts", "loops"), [(((8, 1),), 0), (((8, 1), (2, 64)), 1), (((2, 64),), 1)])
def test_a_gpu_computes_decodes_without_a_loop(parts, loops):
    config, array = own_kinds.CONFIGS["gated"], jax.ShapeDtypeStruct
    mix = mixer(own_kinds.weights("gated").layers[0], config.recurrent, linear)
    shape = StepShape(tuple(TileGroup(*part) for part in parts), 1, 8)
    pool = {n: array((20, 1, *s), jnp.float32) for n, (s, _) in config.recurrent.state(config.d_model).items()}
    texts = StateArrays(array((4, shape.num_texts), int), array((2, shape.num_tokens), int))

    def run(pool, texts, x):
        layer = SimpleNamespace(at=0, batch=SimpleNamespace(states=texts))
        out, cache = paged_recur([layer], shape)(0, mix, x, KVCache({}, "f32", states=pool))
        return out, cache.states

    traced = jax.jit(run).trace(pool, texts, array((shape.num_tokens, config.d_model), jnp.float32))
    for platform, expected in (("cuda", loops), ("cpu", 1)):
        assert traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.while") == expected


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
