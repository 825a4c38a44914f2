"""Implementations of products with weights, in order of preference, and the choice among them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ksana_jax.core import processor
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import NormSpec
from ksana_jax.models import layers
from ksana_jax.models.block_matrix import BlockMatrix
from ksana_jax.models.int8_matrix import Int8Matrix
from ksana_jax.models.joined import joined
from ksana_jax.models.layers import Linear, Normalise
from ksana_jax.models.matrix import Matrix
from ksana_jax.models.operators import Operators
from ksana_jax.models.params import Params
from ksana_jax.ops.weight_packing import packed

# Rows up to which native products are faster than XLA's: 1.4 to 2.4 times with 8 rows, 1.1 to 1.5 with 32, 0.9 to 1.4
# with 64, and 0.6 to 1.1 with 128 and more (weights of 256 KiB to 16 MiB, both types, two cores of Zen 4, jax 0.10.2).
FEW_ROWS = 64
# XLA may have matrix units (AMX) for bfloat16, which native products do not use. Below eight rows it takes them anyway:
# XLA took 6 times as long for one row as for eight, on Zen 4. No machine with AMX was measured.
FEW_ROWS_BESIDE_AMX = 7


class LinearImplementation(NamedTuple):
    """An implementation with the contract of `models.layers.linear`.

    unsupported: (platform, NumPy's name of the type of activations and weights) -> why it cannot serve, or None.
    packs: takes weights from `ops.weight_packing.packed`; where products stand alone, those in blocks only.
    fused: operators that fuse parts of a layer, as "module:class"; None where products stand alone.
    compute_capability: of the NVIDIA GPU that it needs; None where it needs none.
    row_by_row: a row of the result depends on that row of the activations alone, bit by bit.
    grouped: products of rows that are sorted by expert, see `Operators`.
    needs: hardware and software that it runs on, for readers.
    """

    name: str
    apply: Linear
    unsupported: Callable[[str, str], str | None]
    packs: bool = False
    fused: str | None = None
    compute_capability: tuple[int, int] | None = None
    row_by_row: bool = False
    grouped: Callable[..., Any] | None = None
    needs: str = ""

    def why_not(self, platform: str, dtype: str, compute_capability: tuple[int, int] | None = None) -> str | None:
        """Returns why it cannot serve a device of some platform and compute capability, and a type; or None."""
        if self.compute_capability not in (None, compute_capability):
            wanted, found = (".".join(map(str, x or ())) for x in (self.compute_capability, compute_capability))
            return f"needs an NVIDIA GPU of compute capability {wanted}, this is {f'{platform} {found}'.rstrip()}"
        return self.unsupported(platform, dtype)

    def operators(self, normaliser: Callable[[NormSpec], Normalise]) -> Operators:
        """Returns the operators of a network with these products and some norms."""
        made = _imported(self.fused) if self.fused else Operators
        return made(self.apply, normaliser, grouped=self.grouped)

    def weights(self, params: Params, config: ModelConfig, joins: bool, *, consume: bool = False) -> Params:
        """Returns weights in the form that the products read.

        Args:
          params: weights, or their shapes.
          joins: whether matrices that multiply the same input become one, unless they are packed.
          consume: deletes each array of another form.
        """
        if self.packs:
            return packed(params, config, consume=consume, only_blocks=self.fused is None)
        return joined(params, config, consume=consume) if joins else params


def _imported(name: str) -> Callable[..., Any]:
    """Returns a function or class, "module:name", that is imported when it is called."""
    module, found = name.split(":")
    return lambda *args, **kwargs: getattr(importlib.import_module(module), found)(*args, **kwargs)


def _native(x: jax.Array, w: jax.Array | Matrix, b: jax.Array | None = None, *, dtype=None) -> jax.Array:
    from ksana_jax.native.operators import linear

    if isinstance(w, BlockMatrix):
        return linear(x, w.numbers().astype(x.dtype), b, dtype=dtype)
    if isinstance(w, Int8Matrix) and not w.rounds_inputs:
        return linear(x, w.codes, b, dtype=dtype, scales=w.scales)
    return layers.linear(x, w, b, dtype=dtype) if isinstance(w, Matrix) else linear(x, w, b, dtype=dtype)


def _mixed(x: jax.Array, w: jax.Array | Matrix, b: jax.Array | None = None, *, dtype=None) -> jax.Array:
    is_small = x.size // x.shape[-1] <= (FEW_ROWS_BESIDE_AMX if _has_matrix_units(x.dtype.name) else FEW_ROWS)
    return (_native if is_small else layers.linear)(x, w, b, dtype=dtype)


def _has_matrix_units(dtype: str) -> bool:
    return dtype == "bfloat16" and "amx_bf16" in processor.features()


def _not_packed(platform: str, dtype: str) -> str | None:
    if reason := _not_native(platform, dtype):
        return reason
    if _has_matrix_units(dtype):
        return "this CPU has matrix units for bfloat16 (AMX), which XLA's products use and these do not"
    return None


def _not_native(platform: str, dtype: str) -> str | None:
    if not (processor.is_arm() or {"avx2", "fma"} <= processor.features()):
        return "needs a CPU with AVX2 and FMA, or NEON, for which its tiles are made"
    from ksana_jax.native.callers import why_not_called
    from ksana_jax.native.target import DTYPES

    if dtype not in DTYPES:
        return f"activations are {dtype}; native products have {' or '.join(DTYPES)}"
    return why_not_called(platform)


_GROUPED = _imported("ksana_jax.ops.grouped:grouped")
_NEEDS = "a CPU with AVX2 and FMA, or NEON, and C++ of a wheel or a compiler"
# In order of preference; the last one runs everywhere. "mixed" takes native products for few rows, of weights as they
# are given, and XLA's for more; so does "hopper" with its kernel.
LINEAR_IMPLEMENTATIONS = (
    LinearImplementation(
        "packed",
        _native,
        _not_packed,
        packs=True,
        fused="ksana_jax.ops.weight_layout:PackedOperators",
        row_by_row=True,
        grouped=_GROUPED,
        needs=f"{_NEEDS}; bf16: no AMX",
    ),
    LinearImplementation("mixed", _mixed, _not_native, grouped=_GROUPED, needs=_NEEDS),
    LinearImplementation("native", _native, _not_native, row_by_row=True, grouped=_GROUPED, needs=_NEEDS),
    LinearImplementation(
        "hopper",
        _imported("ksana_jax.ops.fused_products:linear"),
        lambda platform, dtype: None if dtype == "bfloat16" else f"activations are {dtype}; the kernel has bfloat16",
        fused="ksana_jax.ops.fused_products:FusedOperators",
        compute_capability=(9, 0),
        needs="an NVIDIA GPU of compute capability 9.0; bf16",
    ),
    LinearImplementation("xla", layers.linear, lambda platform, dtype: None),
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
        allowed = [i._replace(fused=None) if i.packs else i for i in allowed]

    def unsupported(i: LinearImplementation) -> str | None:
        if i.fused and num_devices > 1:
            return f"computes parts of a layer at once, and {num_devices} devices add up parts of it"
        return i.why_not(platform, dtype, compute_capability)

    if name == "auto":
        if serving := [i for i in allowed if unsupported(i) is None]:
            return serving[0]
        name = allowed[-1].name
    for i in allowed:
        if i.name == name:
            if reason := unsupported(i):
                raise ValueError(f"operators.linear {name!r}: {reason}")
            return i
    raise ValueError(f"operators.linear is {name!r}, must be auto or one of {', '.join(i.name for i in allowed)}")
