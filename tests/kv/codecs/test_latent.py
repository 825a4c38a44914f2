"""The codec of latents against a definition in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ksana_jax.methods.codecs.latent import Latent8


@pytest.mark.parametrize(("rank", "rotated"), [(512, 64), (256, 32)])
def test_a_latent_is_read_within_half_a_step_of_its_group_and_rotated_numbers_exactly(rank, rotated):
    rng, codec, half = np.random.default_rng(3), Latent8(), rotated // 2
    c = rng.standard_normal((300, rank)) * np.exp(rng.uniform(-4, 4, (300, 1)))
    c[:, :128] *= 100  # the step of another group does not grow with it
    turned = rng.standard_normal((300, rotated)).astype(ml_dtypes.bfloat16).astype(np.float64) * 64
    x = np.concatenate([turned[:, :half], c[:, : rank // 2], turned[:, half:], c[:, rank // 2 :]], axis=1)
    x = x.astype(np.float32).astype(np.float64)
    parts = codec.encode(x.astype(np.float32), np)
    assert {name: (part.shape[1:], part.dtype.name) for name, part in parts.items()} == codec.arrays(rank + rotated)
    assert sum(part[0].nbytes for part in parts.values()) == rank + rank // 128 * 4 + 2 * rotated
    found = codec.decode(parts, np).astype(np.float64).reshape(300, 2, -1)
    np.testing.assert_array_equal(found[..., :half].reshape(300, -1), turned)
    groups = x.reshape(300, 2, -1)[..., half:].reshape(300, -1, 128)
    step = np.abs(groups).max(-1, keepdims=True) / 127
    expected = (np.round(groups / step) * step).reshape(300, -1)
    differs = np.abs(found[..., half:].reshape(300, -1) - expected) > 1e-6 * np.abs(expected)
    assert differs.mean() < 1e-4  # ties
    error = np.abs(found[..., half:].reshape(groups.shape) - groups)
    assert (error <= step / 2 * (1 + 1e-4)).all() and (error / step).max() > 0.49
    compiled = jax.jit(lambda x: codec.decode(codec.encode(x, jnp), jnp))(x.astype(np.float32))
    np.testing.assert_allclose(np.float64(compiled).reshape(found.shape), found, rtol=1e-6)
