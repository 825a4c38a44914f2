"""Keys and values in 4 bits: how exact they are, and how they stand beside tokens that are not quantised yet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import int4, reference
from pallas_kernels.contract import Call, Pool
from pallas_kernels.patterns import FAR

RNG = np.random.default_rng(3)


def blocks(*shape):
    """Keys and values of which one channel of the keys is 20 times as large, and another far from zero."""
    x = RNG.standard_normal(shape).astype(np.float32)
    x[..., 0, :, :, 5] *= 20
    x[..., 0, :, :, 9] += 10
    return x


def per_number(scales, block_size: int):
    """Scales and zeros [2, ..., 2, K, B, H], one for each number, of those that `int4` packs; by loops."""
    scales = np.asarray(scales, np.float32)
    *outer, _, kv_heads, _, _, h = scales.shape
    out = np.empty((2, *outer, 2, kv_heads, block_size, h), np.float32)
    for token in range(block_size):
        for channel in range(h):
            out[..., 0, :, token, channel] = np.moveaxis(scales[..., 0, :, token // 64, :, channel], -1, 0)
            of_value = channel // 64 * 64 + token % 64
            out[..., 1, :, token, channel] = np.moveaxis(scales[..., 1, :, token // 64, :, of_value], -1, 0)
    return out


@pytest.mark.soak
def test_numbers_come_back_within_half_a_step():
    x = blocks(3, 2, 2, 128, 128)
    codes, scales = int4.quantise(jnp.asarray(x))
    assert codes.dtype == jnp.int4 and codes.shape == x.shape
    assert scales.dtype == jnp.bfloat16 and scales.shape == (3, 2, 2, 2, 2, 128)
    scale, zero = per_number(scales, 128)
    back = np.asarray(int4.dequantise(codes, scales))
    # bfloat16 rounds a number and its zero, each by at most 2^-8 of it.
    assert (np.abs(back - x) <= scale / 2 + 2.0**-8 * (np.abs(back) + np.abs(zero))).all()
    np.testing.assert_array_equal(back, (np.asarray(codes, np.float32) * scale + zero).astype(jnp.bfloat16))


@pytest.mark.soak
def test_an_outlier_channel_costs_the_other_channels_of_keys_nothing():
    x = blocks(2, 1, 64, 64)
    error = np.abs(np.asarray(int4.dequantise(*int4.quantise(jnp.asarray(x)))) - x)[0, 0].mean(axis=0)
    others = np.delete(error, [5, 9])
    assert error[5] > 5 * others.max()
    assert others.max() < 0.15  # of numbers with a standard deviation of 1


def test_products_of_codes_and_scales_are_exact_in_bfloat16():
    _, scales = int4.quantise(jnp.asarray(blocks(5, 2, 2, 64, 64)))
    scale = np.asarray(scales[..., 0, :], np.float32)
    for code in range(-8, 8):
        product = code * scale
        np.testing.assert_array_equal(product.astype(jnp.bfloat16).astype(np.float32), product)


@pytest.mark.parametrize("number", [0.0, 3.25, -1e-30])
def test_blocks_of_one_number_come_back(number):
    x = jnp.full((2, 1, 64, 64), number)
    np.testing.assert_allclose(int4.dequantise(*int4.quantise(x)), x, rtol=2.0**-8)


@pytest.mark.parametrize("shape", [(2, 1, 32, 64), (2, 1, 64, 96)])
def test_parts_of_groups_are_refused(shape):
    with pytest.raises(ValueError, match="int4 needs multiples of 64"):
        int4.quantise(jnp.zeros(shape))


@pytest.mark.soak
def test_full_blocks_and_the_newest_tokens_merge_by_their_log_sum_exp():
    whole = jnp.asarray(blocks(3, 1, 2, 1, 64, 64))  # two full blocks, and 20 tokens in the third
    codes, scales = int4.quantise(whole[:2])
    newest = whole[2:].astype(jnp.bfloat16)
    q = jnp.asarray(RNG.standard_normal((1, 1, 2, 64)) / 8, jnp.float32)
    positions = jnp.array([[147]], jnp.int32)

    def attend(pool, tables, starts):
        call = Call(q, pool, jnp.array([tables]), jnp.array([starts]), positions)
        return reference.attend(call.replace(return_lse=True))

    parts = attend(Pool(codes, scales), [1, 0], [0, 64]), attend(Pool(newest), [0, 0], [128, FAR])
    weights = jax.nn.softmax(jnp.stack([part.lse for part in parts]), axis=0)
    merged = sum(weight[..., None] * part.out for weight, part in zip(weights, parts))
    numbers = jnp.concatenate([int4.dequantise(codes, scales), newest.astype(jnp.float32)])
    expected = attend(Pool(numbers), [1, 0, 2], [0, 64, 128]).out
    np.testing.assert_allclose(merged, expected, atol=1e-6)
