"""The pool of block codecs as bytes: exact tokens in each dtype, codes of full blocks, and zeros elsewhere."""

import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.core.config import ModelConfig
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.ops.new_pool import make_cache
from ksana_jax.ops.sealed_pool import SealedCache

MODEL = ModelConfig(num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16)
SIZE, NUM_BLOCKS = 4, 6
RNG = np.random.default_rng(0)


def new_pool(dtype: str) -> SealedCache:
    setting = {"k": "kivi2", "v": "kivi4", "residual_dtype": dtype}
    cache = make_cache(layout_of(MODEL, dtype=setting, block_size=SIZE), NUM_BLOCKS)
    assert isinstance(cache, SealedCache)
    noise = RNG.integers(0, 256, cache.kv.shape, np.uint8)
    return cache.with_kv(jnp.asarray(noise))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_exact_tokens_are_those_of_the_dtype_and_codes_those_of_what_is_stored(dtype):
    cache = new_pool(dtype)
    k, v = jnp.asarray(RNG.standard_normal((2, 6, 2, 16)), jnp.float32)
    rounded = [x.astype({"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[dtype]) for x in (k, v)]
    # Six tokens in blocks 3 and 1; the last one is padding.
    slots = jnp.array([12, 13, 14, 15, 4, NUM_BLOCKS * SIZE], jnp.int32)
    before = np.asarray(cache.kv)
    cache = cache.write_side(0, slots, k)
    wrote = (np.asarray(cache.kv) != before).any(axis=(1, 2, 3, 4))
    assert wrote.tolist() == [block in (1, 3) for block in range(NUM_BLOCKS)]
    read = np.asarray(cache.read_side(0, jnp.array([3, 1])))  # [K, P*B, H]
    np.testing.assert_array_equal(read[:, :5], np.asarray(rounded[0][:5].astype("float32")).swapaxes(0, 1))
    # Values of the same tokens in blocks 0 and 2; block 3 of keys and 0 of values are full, and make the codes of 5.
    cache = cache.write_side(0, jnp.array([0, 1, 2, 3, 8, NUM_BLOCKS * SIZE], jnp.int32), v)
    absent = NUM_BLOCKS
    full, exact = jnp.array([5, absent]), (jnp.array([3, absent]), jnp.array([0, absent]))
    before = np.asarray(cache.kv)
    cache = cache.seal(1, (0, 0), full, exact)
    assert np.flatnonzero((np.asarray(cache.kv) != before).any(axis=(1, 2, 3, 4))).tolist() == [5]
    sealing = cache.blocks.sealing
    blocks = [np.asarray(x[:4].astype("float32")).swapaxes(0, 1) for x in rounded]
    for got, codec, x in zip(cache.read_codes(1, jnp.array([5])), (sealing.k, sealing.v), blocks, strict=True):
        np.testing.assert_allclose(np.asarray(got), codec.decode(codec.encode(x, np), np), rtol=1e-6, atol=1e-6)
