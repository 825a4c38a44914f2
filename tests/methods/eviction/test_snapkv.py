"""SnapKV's observation window does not count in its own choice of tokens."""

import numpy as np
import pytest

from ksana_jax.kv.eviction.base import Cached
from ksana_jax.methods.eviction.snapkv import SnapKV
from tests.methods.eviction.reference import pooled


def cached(scores: np.ndarray, num_tokens: int, window: int) -> Cached:
    """One row, layer and head."""
    keys = np.zeros((1, 1, 1, len(scores), 4), np.float32)
    counts = (np.array([x]) for x in (num_tokens, window, num_tokens, 0))
    return Cached(keys, keys, scores[None, None, None].astype(np.float32), None, *counts)


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize(("window", "kernel"), [(4, 5), (2, 7), (1, 3), (8, 13)])
def test_attention_within_the_window_lifts_no_token_before_it(window, kernel, pooling):
    rng, num_tokens = np.random.default_rng(window), 20
    method, before = SnapKV(recent=window, kernel=kernel, pooling=pooling), num_tokens - window
    scores = rng.random(24)
    wanted = pooled(scores[:before], kernel, pooling)
    # Slots from 20 on hold what other texts left there.
    for own in (0.0, 1.0, 100.0):
        scores[before:] = own
        found = method.priority(cached(scores, num_tokens, window), np)[0, 0, 0, :before]
        # Sums of at most 13 numbers below 1 in float32.
        np.testing.assert_allclose(found, wanted, rtol=2e-6)
