"""Implementations of products with weights, in order of preference, and the choice among them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

from ksana_jax.core import processor
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import NormSpec
from ksana_jax.core.operator_settings import first_serving
from ksana_jax.models.joined import joined
from ksana_jax.models.layers import Normalise
from ksana_jax.models.operators import Operators
from ksana_jax.models.params import Params
from ksana_jax.native.callers import why_not_called
from ksana_jax.native.grouped import by_head
from ksana_jax.native.target import DTYPES, register_targets
from ksana_jax.ops import native_operators
from ksana_jax.ops.normed_products import normed_products
from ksana_jax.ops.weight_packing import packed


class LinearImplementation(NamedTuple):
    """An implementation with the contract of `models.layers.linear`.

    load: returns the operators of a layer with its products, and norms of XLA. It imports Pallas for a GPU alone.
    unsupported: (platform, NumPy's name of the type of activations and weights) -> why it cannot serve, or None.
    packs: takes weights from `ops.weight_packing.packed`; where products stand alone, those in blocks only.
    fuses: whether its operators fuse parts of a layer; products stand alone otherwise.
    compute_capability: of the NVIDIA GPU that it needs; None where it needs none.
    row_by_row: a row of the result depends on that row of the activations alone, bit by bit.
    needs: hardware and software that it runs on, for readers.
    """

    name: str
    load: Callable[[], Operators]
    unsupported: Callable[[str, str], str | None]
    packs: bool = False
    fuses: bool = False
    compute_capability: tuple[int, int] | None = None
    row_by_row: bool = False
    needs: str = ""

    def why_not(self, platform: str, dtype: str, compute_capability: tuple[int, int] | None = None) -> str | None:
        """Returns why it cannot serve a device of some platform and compute capability, and a type; or None."""
        if self.compute_capability not in (None, compute_capability):
            wanted, found = (".".join(map(str, x or ())) for x in (self.compute_capability, compute_capability))
            return f"needs an NVIDIA GPU of compute capability {wanted}, this is {f'{platform} {found}'.rstrip()}"
        return self.unsupported(platform, dtype)

    def operators(self, normaliser: Callable[[NormSpec], Normalise]) -> Operators:
        """Returns the operators of a network with these products and some norms."""
        return dataclasses.replace(self.load(), normaliser=normaliser)

    def weights(self, params: Params, config: ModelConfig, joins: bool, *, consume: bool = False) -> Params:
        """Returns weights in the form that the products read.

        Args:
          params: weights, or their shapes.
          joins: whether matrices that multiply the same input become one, unless they are packed.
          consume: deletes each array of another form.
        """
        if self.packs:
            return packed(params, config, consume=consume, only_blocks=not self.fuses)
        return joined(params, config, consume=consume) if joins else params


def _native(kind: type[Operators] = Operators) -> Operators:
    register_targets()
    return kind(
        native_operators.linear, grouped=native_operators.grouped, by_head=by_head, normed_products=normed_products
    )


def _mixed() -> Operators:
    return dataclasses.replace(_native(), linear=native_operators.linear_of_few_rows, by_head=None)


def _hopper() -> Operators:
    from ksana_jax.ops import fused_products

    return fused_products.FusedOperators(fused_products.linear)


def _not_native(platform: str, dtype: str) -> str | None:
    if not (processor.is_arm() or {"avx2", "fma"} <= processor.features()):
        return "needs a CPU with AVX2 and FMA, or NEON, for which its tiles are made"
    if dtype not in DTYPES:
        return f"activations are {dtype}; native products have {' or '.join(DTYPES)}"
    return why_not_called(platform)


_NEEDS = "a CPU with AVX2 and FMA, or NEON, and C++ of a wheel or a compiler"
# In order of preference; the last one runs everywhere. "mixed" takes native products for few rows, of weights as they
# are given, and XLA's for more; so does "hopper" with its kernel.
LINEAR_IMPLEMENTATIONS = (
    LinearImplementation(
        "packed",
        functools.partial(_native, native_operators.PackedOperators),
        _not_native,
        packs=True,
        fuses=True,
        row_by_row=True,
        needs=_NEEDS,
    ),
    LinearImplementation("mixed", _mixed, _not_native, needs=_NEEDS),
    LinearImplementation("native", _native, _not_native, row_by_row=True, needs=_NEEDS),
    LinearImplementation(
        "hopper",
        _hopper,
        lambda platform, dtype: None if dtype == "bfloat16" else f"activations are {dtype}; the kernel has bfloat16",
        fuses=True,
        compute_capability=(9, 0),
        needs="an NVIDIA GPU of compute capability 9.0; bf16",
    ),
    LinearImplementation("xla", Operators, lambda platform, dtype: None),
)


def choose_linear(
    platform: str,
    dtype: str,
    name: str = "auto",
    *,
    row_by_row: bool = False,
    num_devices: int = 1,
    in_blocks: bool = False,
    compute_capability: tuple[int, int] | None = None,
) -> LinearImplementation:
    """Returns the first implementation that serves a platform and a type, or the one with the given name.

    Args:
      row_by_row: excludes implementations whose rows depend on each other.
      num_devices: that add up their products. in_blocks: matrices are; their packed products may stand alone.
      compute_capability: of an NVIDIA GPU.

    Raises:
      ValueError: there is none of that name, or it does not serve.
    """
    allowed = [i for i in LINEAR_IMPLEMENTATIONS if i.row_by_row or not row_by_row]
    if in_blocks and num_devices > 1:
        allowed = [i._replace(load=_native, fuses=False) if i.packs else i for i in allowed]

    def unsupported(i: LinearImplementation) -> str | None:
        if i.fuses and num_devices > 1:
            return f"computes parts of a layer at once, and {num_devices} devices add up parts of it"
        return i.why_not(platform, dtype, compute_capability)

    return first_serving("linear", name, allowed, unsupported)
