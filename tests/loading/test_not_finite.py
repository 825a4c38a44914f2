"""Weights that are not numbers are refused with the tensor's name."""

import jax
import numpy as np
import pytest

from ksana_jax.core.errors import LoadError
from ksana_jax.loading import load_model
from ksana_jax.loading.load import all_finite
from tests.loading.models_on_disk import STORED, TINY, random_tensors, write_model

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("stored", sorted(STORED))
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_refused_with_its_tensor(tmp_path, stored, dtype, value):
    tensors = random_tensors(TINY, stored)
    load_model(write_model(tmp_path / "good", tensors), dtype)
    tensors[NAME][3, 5] = value
    kind = np.dtype(STORED[stored]).name
    with pytest.raises(LoadError, match=rf"{NAME} has values that are NaN or infinite in {kind}"):
        load_model(write_model(tmp_path / "bad", tensors), dtype)


def test_a_weight_beyond_the_range_of_float16_is_refused(tmp_path):
    tensors = random_tensors(TINY)
    tensors[NAME][3, 5] = 1e5
    folder = write_model(tmp_path / "large", tensors)
    load_model(folder, "bf16")
    with pytest.raises(LoadError, match=rf"{NAME} has values that are NaN or infinite in float16"):
        load_model(folder, "f16")


@pytest.mark.parametrize("dtype", sorted(STORED))
def test_the_largest_numbers_are_finite(dtype):
    kind = STORED[dtype]
    largest = float(jax.numpy.finfo(kind).max)
    assert all_finite(np.array([largest, -largest, 0.0], kind))
    assert all_finite(np.zeros(0, kind))
    assert not all_finite(np.array([0.0, -np.inf], kind)) and not all_finite(np.array([np.nan], kind))
