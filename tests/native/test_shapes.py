"""Arrays of shapes that do not fit are refused before C++ reads them, whichever argument it is."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.core.layer_spec import NormSpec
from ksana_jax.native.kernel import KERNEL
from ksana_jax.native.operators import Norms, Weights, layer_norm, linear, project, rest_of_layer, rms_norm
from ksana_jax.ops.native_operators import normaliser
from pallas_kernels.arguments import SINKS_AT_CEILING, Spec, make
from pallas_kernels.contract import Pool

NORMS = Norms(1e-6, False)


def zeros(*shape, dtype="float32") -> Any:
    return np.zeros(shape, dtype)


def longer(x: Any, axis: int) -> Any:
    """The array with one entry more along an axis."""
    return np.pad(x, [(0, int(i == axis)) for i in range(x.ndim)])


def test_a_norm_refuses_a_weight_of_another_length():
    said = r"the weight of a norm is \[128\], must be \[64\]: x is \[2, 64\]"
    with pytest.raises(ValueError, match=said):
        normaliser(NormSpec("rms", 1e-6, False))(jnp.ones((2, 64)), jnp.arange(128.0))
    for shape in ((63,), (1,), (1, 64), ()):
        with pytest.raises(ValueError, match=r"must be \[64\]"):
            rms_norm(jnp.ones((2, 64)), jnp.ones(shape), 1e-6)
    with pytest.raises(ValueError, match=r"the weight of a norm is \[1, 64\], must be \[2, 64\]"):
        layer_norm(jnp.ones((2, 64)), jnp.ones((1, 64)), 1e-6)


PRODUCT = {"x": zeros(3, 8), "w": zeros(10, 8, dtype="int8"), "b": zeros(10), "scales": zeros(10)}


@pytest.mark.parametrize(("name", "axis"), [("x", 1), ("w", 0), ("w", 1), ("b", 0), ("scales", 0)])
def test_a_product_refuses_arguments_that_do_not_fit_each_other(name, axis):
    given = PRODUCT | {name: longer(PRODUCT[name], axis)}
    with pytest.raises(ValueError, match=r"is \[\d+(, \d+)?\], must be \[\d+(, \d+)?\]: "):
        linear(**given)


def packed(rows, columns):
    """A matrix of codes that rounds its inputs, with a bias: all that there may be."""
    words = zeros(-(-rows // 64), columns // 4, 64, 4, dtype="int8")
    return Weights(words, rows, zeros(rows), zeros(rows, dtype="int32"), zeros(rows))


X, ATTENDED, WEIGHT = zeros(5, 8), zeros(5, 12), zeros(8)
REST = {"output": packed(8, 12), "gate": packed(72, 8), "up": packed(72, 8), "down": packed(8, 72)}
OF_WEIGHTS = [("words", 0), ("words", 1), ("words", 2), ("words", 3), ("scales", 0), ("sums", 0), ("bias", 0)]


def rest(changed=None, attended=ATTENDED, weights: Any = (WEIGHT,) * 3, activation="silu"):
    matrices: Any = tuple((REST | (changed or {})).values())
    return rest_of_layer(X, attended, matrices, weights, NORMS, activation)


@pytest.mark.parametrize(("name", "axis"), OF_WEIGHTS)
def test_packed_products_refuse_each_array_that_does_not_fit_the_matrix(name, axis):
    for part, w in REST.items():
        wrong = w._replace(**{name: longer(getattr(w, name), axis)})
        with pytest.raises(ValueError, match=part):
            rest({part: wrong})
        with pytest.raises(ValueError, match="matrix 1"):
            project(zeros(5, 4 * w.words.shape[1]), [w, wrong])


def test_packed_products_refuse_matrices_norms_and_rows_that_do_not_fit_each_other():
    for part, shape in {"output": (9, 12), "gate": (72, 12), "up": (73, 8), "down": (8, 68)}.items():
        with pytest.raises(ValueError, match=part):
            rest({part: packed(*shape)})
    for i in range(3):
        with pytest.raises(ValueError, match=r"the weight of a norm is \[9\], must be \[8\]: x is \[5, 8\]"):
            rest(weights=tuple(zeros(9) if i == j else WEIGHT for j in range(3)))
    with pytest.raises(ValueError, match=r"attended is \[6\], must be \[5\]"):
        rest(attended=zeros(6, 12))
    with pytest.raises(ValueError, match="activation is 'mine', must be one of"):
        rest(activation="mine")
    with pytest.raises(ValueError, match=r"the weight of a norm is \[9\], must be \[8\]"):
        project(X, [REST["gate"]], norm=zeros(9), norms=NORMS)
    with pytest.raises(ValueError, match=r"matrix 0 is \[72, 8\], must be \[72, 12\]: x is \[5, 12\]"):
        project(ATTENDED, [REST["gate"]])
    with pytest.raises(ValueError, match="4 matrices, a call has at most 3"):
        project(X, [REST["gate"]] * 4)


def test_packed_products_refuse_numbers_of_another_type_and_sums_of_some():
    words = zeros(2, 8, 64, 1)
    with pytest.raises(NotImplementedError, match="matrix 0 has numbers in float32; packed numbers are bfloat16 here"):
        project(X.astype(jnp.bfloat16), [Weights(words, 72)])
    with pytest.raises(NotImplementedError, match="matrix 0 has codes in float32; packed codes are int8 here"):
        project(X, [Weights(words, 72, scales=zeros(72))])
    with pytest.raises(ValueError, match="rounded by rows and not at all"):
        project(X, [REST["gate"], REST["up"]._replace(sums=None)])


CALL = make(
    Spec(rows=((40, 3),), q_tile=3, codes="int8", sink_queries=2, pattern=SINKS_AT_CEILING, sink_logits=True)
).replace(mass_factor=zeros(1, 3))
# Axes of each argument of attention; of the pool, blocks, layers and slots of a block may be any number.
AXES = {"q": 4, "tables": 2, "starts": 2, "positions": 2, "q_sink": (0, 1, 3, 4), "sinks": 1, "mass_factor": 2}


@pytest.mark.parametrize(
    ("name", "axis"),
    [(name, axis) for name, axes in AXES.items() for axis in (range(axes) if isinstance(axes, int) else axes)],
)
def test_attention_refuses_each_argument_that_does_not_fit_the_others(name, axis):
    array = np.asarray(getattr(CALL.options if name in ("q_sink", "sinks", "mass_factor") else CALL, name))
    with pytest.raises(ValueError, match=r"must be (\[|a multiple)"):
        KERNEL(CALL.replace(**{name: longer(array, axis)}))


@pytest.mark.parametrize("axis", [2, 3, 5])
def test_attention_refuses_a_pool_of_other_heads(axis):
    kv, scales = (np.asarray(x) for x in CALL.pool[:2])
    pool = Pool(longer(kv, axis), longer(scales, axis) if axis < scales.ndim else scales)
    with pytest.raises(ValueError, match=r"must be (\[|a multiple)"):
        KERNEL(dataclasses.replace(CALL, pool=pool))


@pytest.mark.parametrize(
    ("part", "array", "said"),
    [
        ("kv", zeros(4, 1, 2, 2, 16, 33, dtype="uint8"), r"the pool is .*, must be "),
        ("scales", zeros(4, 1, 2, 2, 15, 1, dtype="float16"), "scales are"),
        ("zeros", zeros(4, 1, 2, 2, 16, 1), "zeros are float32"),
        ("levels", zeros(5), r"levels are \[5\], must be \[4\], \[8\] or \[16\]"),
        ("levels", None, "a pool of uint8 without levels"),
    ],
)
def test_attention_refuses_packed_codes_that_do_not_fit_each_other(part, array, said):
    scales = zeros(4, 1, 2, 2, 16, 1, dtype="float16")
    pool = Pool(zeros(4, 1, 2, 2, 16, 32, dtype="uint8"), scales, scales, np.arange(16, dtype=np.float32))
    call = make(Spec(rows=((40, 3),), q_tile=3, num_heads=4, num_kv_heads=2, head_dim=64))
    with pytest.raises(ValueError, match=said):
        KERNEL(call.replace(pool=pool._replace(**{part: array})))
    zeroless = pool._replace(scales=zeros(4, 1, 2, 2, 16, 3, dtype="float16"), zeros=None)
    with pytest.raises(ValueError, match="3 groups of scales, must divide a head dim of 64"):
        KERNEL(call.replace(pool=zeroless))
