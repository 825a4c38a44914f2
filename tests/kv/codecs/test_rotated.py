"""Codecs that rotate vectors, against definitions written here in float64 with whole matrices."""

import numpy as np
import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.codecs.registry import find_codec, find_sealing
from ksana_jax.methods.codecs.hadamard import hadamard4
from ksana_jax.methods.codecs.turboquant import lloyd_max

RNG = np.random.default_rng(5)
# Least mean square errors of levels for a normal distribution: Max (1960), table I; TurboQuant's theorem 1 rounds them.
LEAST = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}


def matrix(size: int) -> np.ndarray:
    """The Hadamard matrix of a power of two, of length 1."""
    found = np.ones((1, 1))
    while len(found) < size:
        found = np.block([[found, found], [found, -found]])
    return found / np.sqrt(size)


def rotation(head_dim: int) -> np.ndarray:
    """Random signs, then equal parts, each multiplied by the largest matrix that fits."""
    size = next(n for n in (256, 128, 64, 32, 16) if head_dim % n == 0)
    return np.kron(np.eye(head_dim // size), matrix(size)) * np.random.default_rng(0).choice([-1.0, 1.0], head_dim)


def keys(head_dim: int) -> np.ndarray:
    """Vectors of which two channels are 30 times larger than the rest, as keys' are."""
    x = RNG.standard_normal((2000, head_dim))
    x[:, [3, head_dim // 2 + 1]] *= 30
    return x.astype(np.float32).astype(np.float64)


def stored(name: str, x: np.ndarray) -> np.ndarray:
    codec = find_codec(name)
    parts = codec.encode(x.astype(np.float32), np)
    assert {part: (a.shape[1:], a.dtype.name) for part, a in parts.items()} == codec.arrays(x.shape[-1])
    return codec.decode(parts, np).astype(np.float64)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_a_rotation_is_its_matrix_and_is_taken_back(head_dim):
    x, by = keys(head_dim), rotation(head_dim)
    np.testing.assert_allclose(by @ by.T, np.eye(head_dim), atol=1e-12)
    found = hadamard4().transform(x.astype(np.float32), np)
    np.testing.assert_allclose(found, x @ by.T, atol=1e-4)
    np.testing.assert_allclose(hadamard4().inverse(found, np), x, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_hadamard_rounds_rotated_numbers_between_their_smallest_and_largest(bits):
    x, by = keys(64), rotation(64)
    y = x @ by.T
    low = y.min(-1, keepdims=True).astype(np.float16).astype(np.float64)
    step = (np.ptp(y, axis=-1, keepdims=True) / (2**bits - 1)).astype(np.float16).astype(np.float64)
    expected = (low + np.clip(np.round((y - low) / step), 0, 2**bits - 1) * step) @ by
    # A number in the middle between two codes moves all numbers of its vector.
    wrong = np.abs(stored(f"hadamard{bits}", x) - expected).max(-1) > 1e-4
    assert wrong.mean() < 2e-3


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_an_outlier_no_longer_takes_the_levels_of_other_channels(bits):
    x = keys(64)
    x[:, 33] /= 30  # one outlier
    error, plain = (np.square(stored(f"{name}{bits}", x) - x)[:, 8:32].mean() for name in ("hadamard", "int"))
    assert error < plain / 3


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_are_the_means_between_their_bounds(bits):
    levels = lloyd_max(bits).astype(np.float64)
    bounds = (levels[1:] + levels[:-1]) / 2
    z = np.linspace(-9, 9, 2_000_001)
    weight = np.exp(-(z**2) / 2)
    at = np.searchsorted(bounds, z)
    mean = np.bincount(at, weight * z) / np.bincount(at, weight)
    np.testing.assert_allclose(levels, mean, atol=2e-5)
    error = (weight * (z - levels[at]) ** 2).sum() / weight.sum()
    assert error == pytest.approx(LEAST[bits], rel=2e-3)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_turboquant_is_its_definition_and_loses_the_published_share(bits):
    x, by = keys(128), rotation(128)
    y = x @ by.T
    scale = np.sqrt((y**2).mean(-1, keepdims=True))
    levels = lloyd_max(bits).astype(np.float64)
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, y / scale)
    found = stored(f"turboquant{bits}", x)
    wrong = np.abs(found - (levels[codes] * scale) @ by).max(-1) > 1e-4
    assert wrong.mean() < 2e-3
    random = RNG.standard_normal((4000, 128))
    lost = np.square(stored(f"turboquant{bits}", random) - random).sum() / np.square(random).sum()
    assert lost == pytest.approx(LEAST[bits], rel=0.03)


@pytest.mark.parametrize("name", ["hadamard4", "turboquant4"])
def test_vectors_of_zeros_stay_zeros(name):
    assert not stored(name, np.zeros((2, 64))).any()


def test_keys_and_values_may_have_different_codecs_of_vectors():
    sealing = find_sealing({"k": "turboquant4", "v": "int3"})
    assert (sealing.residual, sealing.first) == (0, 0)
    assert find_sealing({"k": "turboquant4", "v": "int3", "first": 4}).first == 4
    assert sealing.head_bytes(16, 64) == 16 * (32 + 4) + 16 * (24 + 4)
    k, v = (RNG.standard_normal((5, 16, 64)).astype(np.float32) for _ in range(2))
    found = sealing.decoded(sealing.encoded(k, v, np), 16, 64, np)
    for got, x, name in zip(found, (k, v), ("turboquant4", "int3"), strict=True):
        np.testing.assert_array_equal(got, stored(name, x.reshape(-1, 64).astype(np.float64)).reshape(x.shape))
    assert find_sealing({"k": "turboquant4", "v": "int3"}) == sealing
    with pytest.raises(ConfigError, match="kv_cache_dtype has no setting 'group'"):
        find_sealing({"k": "int4", "v": "int3", "group": 32})
    with pytest.raises(ConfigError, match="head_dim is 4: its codes of 3 bits do not fill whole bytes"):
        find_codec("turboquant3").arrays(4)
