"""A form of weights that the package does not know, in the places that treat forms differently."""

import jax
import numpy as np
import pytest

from ksana_jax.core.config import QUANTIZATIONS
from ksana_jax.models.int8_matrix import QUANTISERS
from ksana_jax.models.joined import joined, separate
from ksana_jax.models.operators import XLA_OPERATORS
from ksana_jax.models.params import init_params, quantised
from ksana_jax.ops.linear import LINEAR_IMPLEMENTATIONS
from ksana_jax.ops.weight_packing import packed, unpacked
from ksana_jax.sharding.specs import specs_of
from tests.models.own_kinds import CONFIGS
from tests.models.own_matrix import SIZE, Blocks, blocked

CONFIG = CONFIGS["after"]
BLOCKED, PLAIN = blocked(init_params(CONFIG, seed=1, std=0.4))
CPU = [i for i in LINEAR_IMPLEMENTATIONS if i.why_not("cpu", "float32") is None]
X = np.random.default_rng(0).standard_normal((3, CONFIG.d_model)).astype(np.float32)


def layer(operators, p):
    q, k, v = operators.queries_keys_values(X, p, CONFIG.layers[0])
    return q, k, v, operators.after_attention(X, q, p, CONFIG.layers[0])


@pytest.mark.parametrize("implementation", CPU, ids=[i.name for i in CPU])
def test_every_implementation_multiplies_by_it(implementation):
    weights = implementation.weights(BLOCKED, CONFIG, joins=False)
    assert isinstance(weights.layers[0].w_q, Blocks)
    found = layer(implementation.operators(XLA_OPERATORS.normaliser), weights.layers[0])
    for ours, theirs in zip(found, layer(XLA_OPERATORS, PLAIN.layers[0]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_it_is_stacked_by_rows_and_stays_where_others_are_packed_or_quantised():
    [whole, *_] = joined(BLOCKED, CONFIG).layers
    assert isinstance(whole.w_qkv, Blocks) and whole.w_qkv.scales.shape == (64, 32 // SIZE)
    for ours, theirs in zip(layer(XLA_OPERATORS, whole), layer(XLA_OPERATORS, PLAIN.layers[0]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for back in (
        separate(joined(BLOCKED, CONFIG), CONFIG),
        unpacked(packed(BLOCKED, CONFIG)),
        quantised(BLOCKED, "int8"),
    ):
        assert jax.tree.structure(back.layers) == jax.tree.structure(BLOCKED.layers)
        jax.tree.map(np.testing.assert_array_equal, back, BLOCKED)


def test_devices_have_columns_of_blocks_as_they_have_columns_of_codes():
    by_columns, by_rows = jax.P(None, "tensor"), jax.P("tensor")
    for name, spec in {"w_down": by_columns, "w_up": by_rows}.items():
        specs = specs_of(BLOCKED).layers[0]
        assert {getattr(getattr(specs, name), part) for part in ("codes", "scales")} == {spec}
    codes = specs_of(quantised(PLAIN, "int8")).layers[0].w_down
    assert (codes.codes, codes.scales) == (by_columns, jax.P())


def test_every_quantization_has_its_function():
    assert {None, "stored", *QUANTISERS} == set(QUANTIZATIONS)  # stored: `loading.kept`
