"""Error of each codec on plain and on outlier-heavy vectors, against definitions written here in float64."""

import ml_dtypes
import numpy as np
import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.codecs.registry import CODECS, find_codec
from ksana_jax.methods.codecs.packed import Packed

RNG = np.random.default_rng(11)
H = 64


def outliers() -> np.ndarray:
    """Two channels in all vectors, and single numbers, are 50 to 200 times larger than the rest."""
    x = RNG.standard_normal((600, H))
    x[:, [3, 40]] *= 50
    x[RNG.random(x.shape) < 0.002] *= 200
    return x


PACKED = {"int4": 4, "int3": 3, "int2": 2}
# Codecs whose numbers are stored as they are, not mixed by a rotation: see `test_rotated.py`.
ONE_BY_ONE = [name for name in CODECS if not name.startswith(("hadamard", "turboquant"))]
VECTORS = {
    "normal": RNG.standard_normal((600, H)),
    "outliers": outliers(),
    "of all sizes": RNG.standard_normal((600, H)) * np.exp(RNG.uniform(-8, 8, (600, 1))),
    "zeros, and one number": np.concatenate([np.zeros((1, H)), np.eye(H) * 3]),
}


def power_below(x: np.ndarray) -> np.ndarray:
    """Largest power of two that is not above each magnitude."""
    return 2.0 ** (np.frexp(x)[1] - 1)


def half_a_step(name: str, x: np.ndarray) -> np.ndarray:
    """Half the distance of neighbouring numbers of the codec around each of x."""
    top = np.abs(x).max(-1, keepdims=True)
    if name == "int8":
        return np.broadcast_to(top / 127 / 2, x.shape)
    if name == "fp8_e4m3":
        scale = np.maximum(top, 1e-30) / 448
        return np.maximum(power_below(x / scale) * 2.0**-4, 2.0**-10) * scale
    if name in PACKED:
        return np.broadcast_to(np.ptp(x, axis=-1, keepdims=True) / (2 ** PACKED[name] - 1) / 2, x.shape)
    bits, smallest = {"f32": (24, -149), "bf16": (8, -133), "f16": (11, -24), "fp8_e5m2": (3, -16)}[name]
    return np.maximum(power_below(x) * 2.0**-bits, 2.0 ** (smallest - 1))


def stored(name: str, x: np.ndarray) -> np.ndarray:
    codec = find_codec(name)
    return codec.decode(codec.encode(x.astype(np.float32), np), np).astype(np.float64)


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("kind", VECTORS)
def test_each_number_is_wrong_by_half_a_step_at_most(name, kind):
    x = VECTORS[kind].astype(np.float32).astype(np.float64)
    error, bound = np.abs(stored(name, x) - x), half_a_step(name, x)
    # float32 rounds the scale, its reciprocal, the code and their product; float16 scale and zero of packed codes.
    rounding = np.abs(x) * 2.0**-22
    if name in PACKED:
        rounding = (np.abs(x).max(-1, keepdims=True) + np.ptp(x, axis=-1, keepdims=True)) * 2.0**-10 + 2.0**-24
    assert (error <= bound * (1 + 1e-4) + rounding).all()
    if name != "f32" and kind == "normal":
        assert error.max() > 0.8 * bound[error == error.max()].min()  # the bound is not loose


def packed_definition(x: np.ndarray, bits: int) -> np.ndarray:
    """Asymmetric codes over all H channels, which are one group."""
    zero = x.min(-1, keepdims=True).astype(np.float16).astype(np.float64)
    scale = (np.ptp(x, axis=-1, keepdims=True) / (2**bits - 1)).astype(np.float16).astype(np.float64)
    return zero + np.clip(np.round((x - zero) / scale), 0, 2**bits - 1) * scale


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_what_is_read_is_the_definition_but_for_ties(name):
    x = VECTORS["outliers"].astype(np.float32).astype(np.float64)
    top = np.abs(x).max(-1, keepdims=True)
    expected = {
        "f32": lambda: x,
        "bf16": lambda: x.astype(ml_dtypes.bfloat16),
        "f16": lambda: x.astype(np.float16),
        "int8": lambda: np.round(x / (top / 127)) * (top / 127),
        "fp8_e4m3": lambda: (x / (top / 448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * (top / 448),
        "fp8_e5m2": lambda: x.astype(ml_dtypes.float8_e5m2),
        "int4": lambda: packed_definition(x, 4),
        "int3": lambda: packed_definition(x, 3),
        "int2": lambda: packed_definition(x, 2),
    }[name]().astype(np.float64)
    differs = np.abs(stored(name, x) - expected) > 1e-6 * np.abs(expected) + 1e-12
    assert differs.mean() < 1e-4


def test_numbers_beyond_e5m2_become_its_largest():
    x = np.array([[1e5, -1e9, 57_344.0, 1.0]])
    assert stored("fp8_e5m2", x).tolist() == [[57_344.0, -57_344.0, 57_344.0, 1.0]]


@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_a_number_stays_so(name):
    x = np.ones((2, H), np.float32)
    x[1, 5] = np.nan
    with np.errstate(invalid="ignore"):
        found = stored(name, x)
    assert np.isfinite(found[0]).all() and np.isnan(found[1, 5])


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_are_packed_and_groups_of_channels_have_their_own_scale(bits):
    x = np.repeat(np.float32([[1.0], [1000.0]]), 64, axis=1).reshape(1, 128) * np.linspace(-1, 1, 128, dtype=np.float32)
    codec = Packed(bits)
    parts = codec.encode(x, np)
    assert {name: (part.shape[1:], part.dtype.name) for name, part in parts.items()} == codec.arrays(128)
    assert parts["kv"].nbytes == 128 * bits // 8 and parts["scale"].shape == (1, 2)
    error = np.abs(codec.decode(parts, np) - x)
    assert error[:, :64].max() < 1 / (2**bits - 1) and error[:, 64:].max() > 10
    with pytest.raises(ConfigError, match="head_dim is 6: its codes of 2 bits do not fill whole bytes"):
        Packed(2).arrays(6)


def test_codecs_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int5', must be one of f32, bf16, f16, int8, fp8_e4m3"):
        find_codec("int5")
