"""The random numbers of sampling: a function of a row's seed and the number of its tokens so far
alone. Knows no scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

from ksana_jax.devices.features import RBG
from ksana_jax.scheduler.step.settings import SamplingArrays


def gumbel_noise(settings: SamplingArrays, size: int, generator: str) -> jax.Array:
    """Returns Gumbel noise [S, size] of each row's seed, at its place in the random stream.

    Args:
      generator: "threefry", whose numbers are the same everywhere, equal to `jax.random.gumbel` with the key
        `fold_in(seed, num_outputs)`, in additions, shifts and exclusive ors of 32 bits. Or "rbg", the random bits of
        the device's own generator: a compiler's choice, so that tokens differ from threefry's and from one kind of
        device to another.

    Source: Threefry, "Parallel random numbers: as easy as 1, 2, 3", Salmon et al., SC 2011.
    """
    if generator == RBG:
        # One row after the other: a generator that is given several keys at once uses only some of them, and a row's
        # numbers would depend on the other rows.
        bits = jax.lax.map(lambda row: _rbg_bits(row[0], row[1], size), (settings.seeds, settings.num_outputs))
    else:
        bits = jax.vmap(lambda seed, at: _threefry_bits(seed, at, size))(settings.seeds, settings.num_outputs)
    return _gumbel(bits)


def _threefry_bits(seed: jax.Array, at: jax.Array, size: int) -> jax.Array:
    """Returns uint32 [size] of a seed [2] at a place in its stream, as jax with jax_threefry_partitionable."""
    key = threefry_2x32(seed, jnp.stack([jnp.uint32(0), at.astype(jnp.uint32)]))
    counts = jnp.arange(size, dtype=jnp.uint32)
    both = threefry_2x32(key, jnp.concatenate([jnp.zeros_like(counts), counts]))
    return both[:size] ^ both[size:]


def _rbg_bits(seed: jax.Array, at: jax.Array, size: int) -> jax.Array:
    """Returns uint32 [size] of XLA's generator."""
    # The generator counts up in the lower half of the key's last 64 bits: the place is the upper one, else neighbouring
    # tokens would have the same numbers, shifted.
    key = jnp.stack([seed[0], seed[1], jnp.uint32(0), at.astype(jnp.uint32)])
    return jax.lax.rng_bit_generator(key, (size,), dtype=jnp.uint32)[1]


def _gumbel(bits: jax.Array) -> jax.Array:
    """Returns Gumbel noise of uniform uint32, bitwise equal to `jax.random.gumbel`."""
    tiny = jnp.finfo(jnp.float32).tiny
    in_1_2 = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
    uniform = jnp.maximum((in_1_2 - 1.0) * (1.0 - tiny) + tiny, tiny)
    return -jnp.log(-jnp.log(uniform))


def uniforms(settings: SamplingArrays, generator: str) -> jax.Array:
    """Returns a number [S] in [0, 1) of each row's seed, at its place in the random stream; generator: as above."""
    # The first of as many as a token is drawn with: one number takes as long.
    noise = gumbel_noise(settings, 1, generator)[:, 0]
    return jnp.exp(-jnp.exp(-noise))


def of_stream(settings: SamplingArrays, number: int) -> SamplingArrays:
    """Returns settings of an independent random stream; number: the stream's, above 0."""
    return settings._replace(seeds=settings.seeds ^ jnp.array([number << 16, 0x5BD1E995], jnp.uint32))
