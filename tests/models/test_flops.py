"""Operations of steps by definition, against the products of traced networks."""

import math

import jax
import jax.numpy as jnp
import pytest

from ksana_jax.loading.config_json import load_config
from ksana_jax.models.dense import dense_logits
from ksana_jax.models.flops import StepFlops
from ksana_jax.models.params import init_params

T = 24


def traced(jaxpr) -> int:
    """Counts two operations for each multiply-add of a program's products; those of loops once for each iteration."""
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            contracting = eqn.params["dimension_numbers"][0][0]
            lengths = [eqn.invars[0].aval.shape[dim] for dim in contracting]
            found += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lengths)
        inner = [x for x in jax.tree.leaves(list(eqn.params.values())) if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
        found += eqn.params.get("length", 1) * sum(traced(getattr(x, "jaxpr", x)) for x in inner)
    return found


@pytest.mark.parametrize("name", ["ksana-tiny", "ksana-recall"])
def test_operations_equal_the_products_of_a_dense_network(name):
    config = load_config(name)
    params = init_params(config)
    program = jax.make_jaxpr(lambda tokens: dense_logits(params, tokens, config=config))(jnp.zeros(T, jnp.int32))
    # It gives scores to all pairs before it masks them, and logits to all tokens.
    vectors = sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim == 1)
    assert traced(program.jaxpr) == StepFlops.of(config).count(T, T * T, T) - 2 * vectors * T


def test_attention_grows_with_the_context():
    flops = StepFlops.of(load_config("ksana-tiny"))
    assert flops.count(1, 256, 1) - flops.count(1, 64, 1) == 192 * flops.pair > 0
