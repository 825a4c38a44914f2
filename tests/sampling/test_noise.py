"""The random numbers of sampling: threefry's are jax's, and no generator lets a row's depend on other rows."""

import functools

import jax
import numpy as np
import pytest

from ksana_jax.devices.features import RBG, THREEFRY
from ksana_jax.sampling.noise import gumbel_noise
from tests.sampling.test_sampler import settings

SIZE = 300
noise = jax.jit(gumbel_noise, static_argnums=(1, 2))


@functools.partial(jax.jit, static_argnums=2)
@functools.partial(jax.vmap, in_axes=(0, 0, None))
def of_jax(seed, at, size):
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), at)
    return jax.random.gumbel(key, (size,))


def rows(count: int):
    rng = np.random.default_rng(0)
    drawn = settings(count, num_outputs=rng.integers(0, 2**31 - 1, count))
    return drawn._replace(seeds=rng.integers(0, 2**32, (count, 2), dtype=np.uint32))


def test_threefrys_numbers_are_jaxs_to_the_bit():
    drawn = rows(64)
    np.testing.assert_array_equal(noise(drawn, SIZE, THREEFRY), of_jax(drawn.seeds, drawn.num_outputs, SIZE))


def test_threefry_needs_no_integers_of_64_bits():
    assert "i64" not in noise.lower(rows(2), SIZE, THREEFRY).as_text().replace("array<i64", "")


@pytest.mark.parametrize("generator", [THREEFRY, RBG])
def test_a_rows_numbers_depend_on_its_seed_and_place_alone(generator):
    drawn = rows(8)
    together = np.asarray(noise(drawn, SIZE, generator))
    order = np.random.default_rng(1).permutation(8)
    mixed = drawn._replace(seeds=drawn.seeds[order], num_outputs=drawn.num_outputs[order])
    np.testing.assert_array_equal(noise(mixed, SIZE, generator), together[order])
    for row in range(8):
        alone = drawn._replace(seeds=drawn.seeds[[row]], num_outputs=drawn.num_outputs[[row]])
        np.testing.assert_array_equal(noise(alone, SIZE, generator)[0], together[row])


@pytest.mark.parametrize("generator", [THREEFRY, RBG])
def test_other_seeds_and_places_have_other_numbers_though_they_are_neighbours(generator):
    words = np.array([[0, 0], [0, 1], [1, 0], [1, 1], [2**32 - 1, 0]], np.uint32)
    drawn = settings(20, num_outputs=np.tile(np.arange(4), 5))._replace(seeds=np.repeat(words, 4, axis=0))
    found = np.asarray(noise(drawn, SIZE, generator))
    # Of 6,000 numbers of 23 bits two are seldom equal; streams that overlap would share hundreds.
    assert np.unique(found).size > found.size - 20
    # Euler's constant and pi / sqrt(6), within five standard errors.
    assert abs(found.mean() - 0.57722) < 5 * 1.28255 / found.size**0.5
    assert abs(found.std() - 1.28255) < 5 * 1.28255 * (4.4 / 4 / found.size) ** 0.5


def test_a_generator_that_is_given_all_keys_at_once_would_not_do():
    """Why rows are drawn one after the other: with jax's own batching, numbers depend on the other keys."""
    drawn = rows(4)
    keys = np.concatenate([drawn.seeds, np.zeros((4, 1), np.uint32), drawn.num_outputs[:, None]], axis=1).astype(
        np.uint32
    )
    vmapped = jax.vmap(lambda key: jax.random.bits(jax.random.wrap_key_data(key, impl="rbg"), (SIZE,)))
    assert not np.array_equal(vmapped(keys)[1], vmapped(keys[[1]])[0])
