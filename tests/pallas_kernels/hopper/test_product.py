"""Products of few rows, with norm, bias, gated activation and residual, against plain jax.numpy."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.models import layers
from pallas_kernels import product_reference
from pallas_kernels.contract import Product
from pallas_kernels.hopper.product import Plan, bound_us
from pallas_kernels.registry import PRODUCTS
from tests.pallas_kernels.interpreter import PARAMS, interpreting
from tests.soak import soak_unless


@dataclasses.dataclass(frozen=True)
class Case:
    """rows, depth, width: of x and the result. norm: of layers.NORMS, "" without. options: of the kernel's tuning."""

    rows: int
    depth: int
    width: int
    norm: str = ""
    bias: bool = False
    residual: bool = False
    activation: str | None = None
    options: tuple[tuple[str, int], ...] = ()

    def __str__(self):
        named = [self.norm, "bias" * self.bias, "residual" * self.residual, self.activation or ""]
        named += [f"{name}{number}" for name, number in self.options]
        return "-".join([f"{self.rows}x{self.depth}x{self.width}", *filter(None, named)])


CASES = (
    Case(8, 256, 128),
    Case(8, 384, 128, norm="rms", bias=True, options=(("stages", 2),)),
    Case(16, 256, 64, residual=True),
    Case(8, 256, 128, norm="rms", activation="silu"),
    Case(64, 320, 128, norm="rms_plus_one", activation="gelu_tanh", bias=True, options=(("stages", 3),)),
    Case(64, 128, 256, norm="rms", residual=True, bias=True),
    Case(40, 192, 128, activation="silu", residual=True, options=(("tiles", 1), ("stages", 2))),
)


def make(case: Case) -> Product:
    """Rows of different sizes, so that a factor of another row shows."""
    rng = np.random.default_rng(CASES.index(case))
    parts = 1 if case.activation is None else 2

    def draw(*shape):
        return rng.normal(size=shape)

    x = draw(case.rows, case.depth) * np.exp(draw(case.rows, 1))
    weight = draw(case.depth) / 2 + (case.norm == "rms")
    arrays = {
        "x": x,
        "w": draw(parts * case.width, case.depth) * case.depth**-0.5,
        "norm": weight if case.norm else None,
        "bias": draw(parts * case.width) if case.bias else None,
        "residual": draw(case.rows, case.width) if case.residual else None,
    }
    arrays = {name: None if x is None else jnp.asarray(x, jnp.bfloat16) for name, x in arrays.items()}
    return Product(**arrays, eps=1e-5, plus_one=case.norm == "rms_plus_one", activation=case.activation)


def kernel_of(case: Case, interpret: Any = False):
    return PRODUCTS["hopper_product"].tuned(interpret=interpret, **dict(case.options))


def compare(actual, call: Product) -> None:
    """Asserts that a product is that of the reference.

    Rounding a normed row's numbers, and the result, are each off by up to 2**-9 of a number. The errors of a row's
    numbers add up like a random walk: to 2**-9 of the product, whose size is here about 1 beside a bias and a gate.
    """
    wanted = np.asarray(product_reference.multiply(call), np.float32)
    size = np.sqrt(np.mean(wanted**2))
    np.testing.assert_allclose(np.asarray(actual, np.float32), wanted, rtol=2**-7, atol=2**-6 * size)


@pytest.mark.parametrize("case", soak_unless((*CASES[:4], CASES[4]).__contains__, CASES), ids=str)
def test_the_kernel_multiplies_as_the_reference_does(case):
    call = make(case)
    with interpreting():
        compare(jax.block_until_ready(kernel_of(case, PARAMS)(call)), call)


@pytest.mark.parametrize("case", CASES[:1], ids=str)
def test_interpret_true_is_all_that_a_machine_without_a_gpu_needs(case):
    call = make(case)
    compare(kernel_of(case, True)(call), call)


@pytest.mark.parametrize("change", [{"norm": 1}, {"bias": 1}, {"residual": 1}, {"x": 7}, {"w": 64}])
def test_a_product_of_other_numbers_is_found_out(change):
    case = dataclasses.replace(CASES[1], residual=True)
    [(name, row)] = change.items()
    call = make(CASES[1])
    call = dataclasses.replace(call, residual=jnp.ones((case.rows, case.width), jnp.bfloat16))
    array = getattr(call, name)
    other = dataclasses.replace(call, **{name: array.at[row % len(array)].mul(-8)})
    with pytest.raises(AssertionError):
        compare(product_reference.multiply(other), call)


@pytest.mark.parametrize("kind", [kind for kind, norm in layers.NORMS.items() if norm.plus_one is not None])
def test_the_reference_is_what_the_layers_compute_one_after_the_other(kind):
    case = dataclasses.replace(CASES[1], norm=kind)
    call = dataclasses.replace(make(CASES[1]), plus_one=kind == "rms_plus_one")
    normed = layers.norm_kind(kind).apply(call.x, call.norm, call.eps)
    compare(layers.linear(normed, call.w, call.bias), call)
    assert case.norm == kind


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": 12}, "12 rows"),
        ({"rows": 72}, "72 rows"),
        ({"width": 96}, "multiples of \\[64"),
        ({"depth": 96}, "multiples of \\[64, 64\\]"),
    ],
)
def test_other_shapes_are_refused(change, reason):
    case = dataclasses.replace(CASES[0], **change)
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((case.rows, case.depth), (case.width, case.depth))]
    said = kernel_of(case).unsupported(Product(*arrays))
    assert said is not None
    assert re.search(reason, said)


def test_blocks_compute_more_columns_where_reading_rows_again_would_cost_more():
    few, many = Plan.of(8, 4096, 6144, 1), Plan.of(64, 4096, 6144, 1)
    assert (few.columns, many.columns) == (64, 128)
    assert few.us == bound_us(8, 4096, 6144, 1) and bound_us(8, 4096, 6144, 1) < many.us < bound_us(
        64, 4096, 6144, 1, 1
    )
    # Of what a multiprocessor holds, two blocks of threads have half each.
    for rows, depth, width, parts, blocks in (
        (8, 4096, 14_336, 2, 2),
        (16, 4096, 14_336, 2, 2),
        (64, 14_336, 4096, 1, 1),
    ):
        plan = Plan.of(rows, depth, width, parts)
        held = 2 * plan.stages * plan.piece * (rows + parts * plan.columns)
        assert plan.stages >= 3 and 80 * 1024 < blocks * held < 227 * 1024
