"""The target of the studies of speculative decoding computes the same as the model that it is grown from."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from experiments.spec_models.starts import grow
from ksana_jax.models.dense import dense_logits
from ksana_jax.models.params import init_params, num_params
from tests.loading.models_on_disk import TINY


def test_a_grown_model_computes_the_same_until_its_new_matrices_are_trained():
    larger = dataclasses.replace(TINY, num_layers=2 * TINY.num_layers, d_ff=4 * TINY.d_ff)
    source, drawn = init_params(TINY, seed=1), init_params(larger, seed=2)
    assert num_params(larger) > 3 * num_params(TINY)
    text = jnp.arange(3, 30)
    wanted = dense_logits(source, text, config=TINY)
    # Sums of more terms, all of them zero, are added in another order.
    np.testing.assert_allclose(dense_logits(grow(source, drawn), text, config=larger), wanted, rtol=0, atol=1e-6)
    assert float(jnp.abs(dense_logits(drawn, text, config=larger) - wanted).max()) > 1e-2
