"""Sums in a stated order, against float64 and for other numbers of rows."""

import jax
import numpy as np
import pytest

from ksana_jax.sampling.probabilities import score
from ksana_jax.sampling.sums import running_sum, sum_by_halves


@pytest.mark.parametrize("size", [1, 2, 7, 128, 1000])
def test_sums_are_those_of_float64(size):
    x = np.random.default_rng(size).random((3, size), np.float32)
    np.testing.assert_allclose(jax.jit(sum_by_halves)(x), x.sum(-1, dtype=np.float64), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(running_sum)(x), x.cumsum(-1, dtype=np.float64), rtol=1e-6)


def test_log_probabilities_are_the_same_bit_by_bit_whatever_the_number_of_rows():
    logits = (np.random.default_rng(0).standard_normal((40, 999)) * 5).astype(np.float32)
    tokens = np.arange(40, dtype=np.int32)
    of_rows = jax.jit(score, static_argnums=2)
    whole = of_rows(logits, tokens, 3)
    for rows in (slice(0, 1), slice(3, 5), slice(7, 20), slice(1, 40)):
        for got, expected in zip(of_rows(logits[rows], tokens[rows], 3), whole, strict=True):
            np.testing.assert_array_equal(got, np.asarray(expected)[rows])
