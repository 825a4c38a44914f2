"""Priorities of long rows, in NumPy and jax.numpy, against the definitions in float64; unused slots hold anything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.eviction.base import Cached
from tests.methods.eviction.reference import Head, Rule, priorities

NUM_TOKENS, NUM_SLOTS, HEADS, SIZE = 470, 512, 2, 16
# With the methods' defaults, but a budget for which no token is recent by itself. The window is `recent`.
RULES = {
    "keydiff": Rule("unlike the mean", [0], 1, [0]),
    "lagkv": Rule("lag", [0], 1, [0], sinks=16, lag=128),
    "chunkkv": Rule("chunks", [0], 1, [0], window=32, kernel=1, chunk=10),
    "rkv": Rule("important, not redundant", [0], 1, [0], window=8, kernel=7, pooling="max", mix=0.1),
}


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax.numpy"])
@pytest.mark.parametrize("name", RULES)
def test_a_long_row_is_ranked_as_the_definition_ranks_it(name, xp):
    rng, rule = np.random.default_rng(2), RULES[name]
    method = read_eviction({"method": name})
    assert method is not None
    # Keys gather about a few centres, so that some are alike.
    keys = rng.normal(size=(12, SIZE))[rng.integers(0, 12, (HEADS, NUM_SLOTS))]
    keys = (keys + 0.4 * rng.normal(size=keys.shape)).astype(np.float32)
    values, scores = rng.normal(size=keys.shape).astype(np.float32), rng.random((HEADS, NUM_SLOTS)).astype(np.float32)
    heads = []
    for k, v, s in zip(keys, values, scores, strict=True):
        of_slots = (dict(enumerate(x.astype(np.float64))) for x in (k, v))
        stored, of_values = of_slots
        newest = [dict(enumerate(s.astype(np.float64)))]
        heads.append(Head(list(range(NUM_TOKENS)), stored=stored, values=of_values, newest=newest))
    for x in (keys, values, scores):
        x[:, NUM_TOKENS:] = np.nan
    counts = (xp.array([x]) for x in (NUM_TOKENS, rule.window if method.observes else 0, NUM_TOKENS, 0))
    cached = Cached(*(xp.asarray(x)[None, None] for x in (keys, values, scores)), None, *counts)
    with np.errstate(invalid="ignore"):
        found = np.asarray(method.priority(cached, xp))[0, 0, :, :NUM_TOKENS].astype(np.float64)
    first, last = rule.sinks, NUM_TOKENS - (rule.window if method.observes else 0)
    for number in range(HEADS):
        wanted = priorities(rule.drop, rule, 0, heads, number, NUM_TOKENS)[first:last]
        got = found[number, first:last]
        order = np.argsort(wanted, kind="stable")
        # Neighbours in the definition's order rise in ours too, unless they are equal up to rounding in float32.
        apart = np.diff(wanted[order]) > 1e-5 * np.abs(wanted).max()
        assert apart.mean() > 0.05 and (np.diff(got[order])[apart] > 0).all()


@pytest.mark.parametrize("field", ["chunkkv chunk_size", "lagkv lag_size", "lagkv sinks"])
def test_sizes_beyond_the_cache_take_no_memory(field):
    (name, key), rng, one = field.split(), np.random.default_rng(0), np.array([20])
    vectors, scores = rng.normal(size=(1, 1, 2, 24, 4)), rng.random((1, 1, 2, 24))
    cached = Cached(vectors, vectors, scores, None, one, one - 16, one, one - 20)
    found = [read_eviction({"method": name, key: size}).priority(cached, np) for size in (24, 10**12)]
    assert np.array_equal(*found)


def test_rkv_never_holds_all_pairs_of_keys():
    num_slots, method = 1024, read_eviction({"method": "rkv"})
    assert method is not None
    keys, scores = (jax.ShapeDtypeStruct((1, 4, 2, num_slots, *more), np.float32) for more in ((SIZE,), ()))
    cached = Cached(keys, keys, scores, None, *[jax.ShapeDtypeStruct((1,), np.int32)] * 4)
    needed = jax.jit(lambda cached: method.priority(cached, jnp)).lower(cached).compile().memory_analysis()
    assert needed.temp_size_in_bytes < 4 * 2 * num_slots**2 * 4 / 2
