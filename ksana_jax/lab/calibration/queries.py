"""Statistics of a model's queries: mean and covariance (Expected Attention), the main direction (Q-Filters)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.lab.calibration.sums import NUM_SKIPPED, layer_sums
from ksana_jax.models.frequencies import layer_ropes
from ksana_jax.models.params import Params


def expected_attention(params: Params, config: ModelConfig, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Returns mean [L, N, H] and covariance [L, N, H, H] of queries before the rotation, scaled as in attention."""

    def moments(layer, q, k, v):
        return _moments(q * config.layers[layer].attention.scale)

    sums, squares = (np.array(x) for x in zip(*layer_sums(params, config, tokens, moments), strict=True))
    count = len(tokens) * (tokens.shape[1] - NUM_SKIPPED)
    mean = sums / count
    covariance = (squares - count * mean[..., None] * mean[..., None, :]) / (count - 1)
    return {"mean": mean.astype(np.float32), "covariance": covariance.astype(np.float32)}


def qfilter(params: Params, config: ModelConfig, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Returns filters [L, K, H]: the principal right singular vector of each head's rotated queries, with the sign on
    which most of them are, averaged over the query heads of a kv head."""
    ropes, positions = layer_ropes(config, tokens.shape[1]), jnp.arange(NUM_SKIPPED, tokens.shape[1])

    def rotated(layer, q):
        return ropes[layer].rotate(q.astype(jnp.float32), ropes[layer].angles(positions))

    found = layer_sums(params, config, tokens, lambda layer, q, k, v: _moments(rotated(layer, q)))
    # The right singular vectors are the eigenvectors of the second moments; eigenvalues rise.
    vectors = np.linalg.eigh(np.array([squares for _, squares in found]))[1][..., -1]

    def projections_above_0(layer, q, k, v):
        return (jnp.einsum("tnh,nh->tn", rotated(layer, q), vectors[layer].astype(np.float32)) > 0).sum(axis=0)

    above = np.array(layer_sums(params, config, tokens, projections_above_0))
    vectors *= np.where(2 * above > len(tokens) * len(positions), 1, -1)[..., None]
    filters = vectors.reshape(len(vectors), config.num_kv_heads, -1, vectors.shape[-1]).mean(axis=2)
    return {"filters": filters.astype(np.float32)}


def _moments(q):
    """Returns the sums over tokens of q [T, N, H] and of its outer products, [N, H] and [N, H, H]."""
    q = q.astype(jnp.float32)
    return q.sum(axis=0), jnp.einsum("tni,tnj->nij", q, q)
