"""Products with changes of an adapter, with each form of a matrix, against the definitions in float64."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.loading.config_json import load_config
from ksana_jax.models.adapted import AdapterWeights, adaptable, bound, with_lengths, with_slots, write_slot
from ksana_jax.models.int8_matrix import quantise
from ksana_jax.models.layers import linear
from ksana_jax.models.params import init_params
from ksana_jax.ops.adapter_layout import adapted_form
from ksana_jax.ops.weight_packing import can_pack, numbers, pack
from tests.machine import native_products
from tests.models.blocks import block_matrix
from tests.models.own_matrix import in_blocks

CONFIG = load_config(Path(__file__).parents[1] / "golden" / "llama-gqa-tied")
ROWS, WIDTH = adaptable(CONFIG)[0]["w_q"]
W = np.random.default_rng(5).standard_normal((ROWS, WIDTH)).astype(np.float32)
FORMS = {
    "array": jnp.asarray(W),
    "bfloat16": jnp.asarray(W, jnp.bfloat16),
    "int8": quantise(jnp.asarray(W)),
    "blocks": block_matrix("Q4_0", ROWS, WIDTH)[0],
    "own": in_blocks(jnp.asarray(W)),
}


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_what_products_multiply_by(form):
    w = FORMS[form]
    np.testing.assert_allclose(numbers(w), linear(jnp.eye(WIDTH), w, dtype=jnp.float32).T, rtol=1e-6, atol=1e-6)
    if can_pack(w):
        np.testing.assert_array_equal(numbers(pack(w)), numbers(w))


@pytest.mark.parametrize("form", FORMS)
def test_tokens_with_lengths_with_a_plain_adapter_and_with_none_share_a_product(form):
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 3, WIDTH)).astype(np.float32), rng.standard_normal((2, ROWS, 3)).astype(np.float32)
    bias, x = rng.standard_normal(ROWS).astype(np.float32), jnp.asarray(rng.standard_normal((3, WIDTH)), jnp.float32)
    lengths = rng.uniform(1, 9, ROWS).astype(np.float32)
    shapes = adaptable(CONFIG)[0]
    params = with_slots(init_params(CONFIG), CONFIG, 2, 4, linear, jnp.asarray)
    layer = params.layers[0].replace(w_q=dataclasses.replace(params.layers[0].w_q, base=FORMS[form]))
    plain = {"w_q": AdapterWeights(a[1], b[1])}
    long = with_lengths(layer, shapes, {"w_q": AdapterWeights(a[0], b[0])}, {"w_q": lengths}, numbers)
    layer = write_slot(write_slot(layer, shapes, 1, long), shapes, 0, plain)

    found = bound(layer, jnp.array([1, 0, -1])).w_q.multiply(x, jnp.asarray(bias))

    w, x64 = np.asarray(numbers(FORMS[form]), np.float64), np.asarray(x, np.float64)
    whole = w + b[0].astype(np.float64) @ a[0]
    whole *= (lengths / np.linalg.norm(whole, axis=1))[:, None]
    wanted = np.stack([m @ row for m, row in zip((whole, w + b[1].astype(np.float64) @ a[1], w), x64, strict=True)])
    np.testing.assert_allclose(found, wanted + bias, rtol=0, atol=2e-6 * np.abs(wanted).max())
    np.testing.assert_array_equal(found[2], linear(x, FORMS[form], jnp.asarray(bias))[2])


@native_products
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["array", "int8", "w8a8", "blocks"])
def test_packed_products_add_the_adapter_of_each_row(form, dtype):
    """Rows of a slot fill more than a tile, the rank more than a vector; products without adapters are tested apart."""
    rng, shapes, rank, num_rows = np.random.default_rng(2), adaptable(CONFIG)[0], 20, 150
    plain = {"w8a8": quantise(jnp.asarray(W), rounds_inputs=True), "array": jnp.asarray(W, dtype)}
    base, bias = pack((FORMS | plain)[form]), jnp.asarray(rng.standard_normal(ROWS), dtype)
    params = init_params(CONFIG, dtype=jnp.dtype(dtype))
    p = params.layers[0].replace(w_q=base)
    params = with_slots(
        params.replace(layers=(p, *params.layers[1:])), CONFIG, 3, rank, linear, jnp.asarray, adapted_form
    )
    layer, changes = params.layers[0], []
    for slot in range(3):
        a, b = rng.standard_normal((rank - slot, WIDTH)), rng.standard_normal((ROWS, rank - slot))
        changes.append(AdapterWeights(a.astype(dtype), b.astype(dtype), rng.random(ROWS)))
        layer = write_slot(layer, shapes, slot, {"w_q": changes[slot]})
    slots, x = rng.integers(-1, 3, num_rows), jnp.asarray(rng.standard_normal((num_rows, WIDTH)), dtype)
    slots[40:80] = 1

    def found(rows, layer):
        return np.asarray(layer.w_q.multiply(x[rows], bias, dtype=jnp.float32))

    def of_step(rows):
        return found(rows, bound(layer, jnp.asarray(slots[rows], jnp.int32)))

    together, alone = of_step(slice(None)), found(slice(None), layer)
    wanted, error = alone.astype(np.float64), np.zeros(alone.shape)
    for row, slot in enumerate(slots):
        if slot >= 0:
            a, b, gain = (np.asarray(part, np.float64) for part in changes[slot])
            low = a @ np.asarray(x[row], np.float64)
            wanted[row] += gain * (wanted[row] - np.asarray(bias, np.float64)) + b @ low
            # In bfloat16, numbers of A x are rounded, each by up to 2^-8 of it.
            error[row] = 2.0**-8 * abs(b) @ abs(low) * (dtype == "bfloat16")
    assert (abs(together - wanted) <= error + 2e-6 * np.abs(wanted).max()).all()
    np.testing.assert_array_equal(together[slots < 0], alone[slots < 0])
    for rows in (slice(41, 42), slice(60, 75), slice(149, None)):
        np.testing.assert_array_equal(of_step(rows), together[rows])
