"""Masks that Hopper kernels compute in their own way, for their registers: equal to `pallas_kernels.mask`."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mask
from pallas_kernels.hopper import decode_mask, prefill_mask
from pallas_kernels.patterns import FAR, Pattern
from tests.pallas_kernels.test_every_pattern import numbers
from tests.patterns import PATTERNS

ALL_AT_ONCE = Pattern(window=7, num_sinks=5, stride=3, has_global=1, global_every=11, sink_position=2, sink_ceiling=9)
CASES = {name: numbers(name) for name in PATTERNS} | {"all at once": ALL_AT_ONCE}
NUM_SINK_QUERIES = 4
# Padding stands at -1 among queries; slots without a key are at FAR.
Q_POS = np.array([-1, *range(60), 63, 500, 2**20], np.int32)
KV_POS = np.array([*range(56), 62, 63, 64, 499, 500, 2**20 - 1, 2**20, FAR], np.int32)


def arrays(name: str):
    """A pattern, queries and keys as kernels have them; keys that each query attends to, and repositioned sinks."""
    pattern, q_pos, kv_pos = CASES[name], Q_POS[:, None], KV_POS[None]
    on_device = Pattern(*map(jnp.int32, pattern)), jnp.asarray(Q_POS), jnp.asarray(KV_POS)
    return on_device, mask.visible(pattern, q_pos, kv_pos), mask.repositioned(pattern, q_pos, kv_pos)


@pytest.mark.parametrize("name", CASES)
def test_masks_of_decode(name):
    (pattern, q_pos, kv_pos), visible, repositioned = arrays(name)
    np.testing.assert_array_equal(decode_mask.visible(pattern, q_pos, kv_pos), visible)
    found = np.asarray(decode_mask.repositioned(pattern, q_pos, kv_pos))
    np.testing.assert_array_equal(found[visible], repositioned[visible])


@pytest.mark.parametrize("name", CASES)
def test_masks_of_decode_with_keys_as_rows(name):
    (pattern, q_pos, kv_pos), visible, repositioned = arrays(name)
    few = slice(None, None, 8)
    given = pattern, q_pos[few], kv_pos, decode_mask.SWAPPED
    np.testing.assert_array_equal(decode_mask.visible(*given), visible[few].T)
    found = np.asarray(decode_mask.repositioned(*given)).T
    np.testing.assert_array_equal(found[visible[few]], repositioned[few][visible[few]])


@pytest.mark.parametrize("name", CASES)
def test_masks_of_prefill(name):
    (pattern, q_pos, kv_pos), visible, repositioned = arrays(name)
    scores, given = jnp.zeros(visible.shape), (lambda: pattern, lambda: (q_pos, kv_pos))
    np.testing.assert_array_equal(prefill_mask.masked_scores(scores, *given) == 0, visible)
    query = np.where(repositioned, 1 + np.minimum(KV_POS, NUM_SINK_QUERIES - 1), 0)
    for visit in range(1 + NUM_SINK_QUERIES):
        scored = prefill_mask.scored_by(jnp.int32(visit), NUM_SINK_QUERIES, *given, scores) == 0
        np.testing.assert_array_equal(np.asarray(scored)[visible], (query == visit)[visible])
