"""Products with weights, norms, and a layer's products with the norms and additions between them: calls into C++.

Packed weights are arrays [panels, in / p, 64, p]; see `ops.native_operators`, which this package does not know. In all
calls, a row of the result depends on that row of the arguments alone, bit by bit, whatever the other rows and their
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.native.adapters import Adapter, arguments
from ksana_jax.native.blocks import Form
from ksana_jax.native.codes import check_scales, check_types
from ksana_jax.native.shapes import BLOCK, PANEL, WORD_BYTES, check_shape
from ksana_jax.native.target import DTYPES, STORED, target

MOST_MATRICES = 3  # that multiply the same rows in one call
# Numbers of `Activation` in calls.h, by the names of `models.mlp.Activation`.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def linear(
    x: jax.Array, w: jax.Array, b: jax.Array | None = None, *, dtype=None, scales: jax.Array | None = None
) -> jax.Array:
    """Multiplies x [..., in] by w [out, in] and adds b [out]; the contract of `models.layers.linear`.

    Args:
      scales: float32 [out], of rows of w, which then are int8 codes; or [out, groups], of as many equal parts of each
        row, multiples of 32 numbers, which then are float8_e4m3fn. Products are those with the codes times the scales
        in x's dtype.

    Raises:
      NotImplementedError: x is neither float32 nor bfloat16, or w is not of x's dtype, or of int8 or float8_e4m3fn with
        scales.
      ValueError: w, b or scales do not fit x, or each other.
    """
    check_types(x, w, scales)
    reason = f"the matrix is {list(w.shape)}"
    check_shape("the matrix", w.shape, (len(w), x.shape[-1]), f"x is {list(x.shape)}")
    check_scales(scales, w.shape, reason)
    if b is not None:
        check_shape("the bias", b.shape, w.shape[:1], reason)
    dtype = jnp.dtype(dtype or x.dtype)
    asked = jnp.dtype(jnp.float32) if b is not None or dtype.name not in DTYPES else dtype
    result = jax.ShapeDtypeStruct((*x.shape[:-1], len(w)), asked)
    stored, of_result = (np.int32(STORED[d.name]) for d in (x.dtype, asked))
    given = jnp.zeros(0, jnp.float32) if scales is None else scales
    y = jax.ffi.ffi_call(target("ksana_linear"), result)(x, w, given, stored=stored, asked=of_result)
    return (y if b is None else y + b).astype(dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, plus_one: bool = False) -> jax.Array:
    """Normalises x [..., D] with a weight [D]; the contract of `models.layers.rms_norm`, or of `rms_norm_plus_one`.

    Raises:
      NotImplementedError: x and weight are not both float32 or both bfloat16.
      ValueError: the weight is not [D].
    """
    return _norm("ksana_rms_norm", x, weight, x.shape[-1:], eps=np.float32(eps), plus_one=np.bool_(plus_one))


def layer_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Normalises x [..., D] with a weight [D], or [2, D] with a bias; the contract of `models.layers.layer_norm`.

    Errors as of `rms_norm`.
    """
    return _norm("ksana_layer_norm", x, weight, (2,) * (weight.ndim > 1) + x.shape[-1:], eps=np.float32(eps))


def _norm(symbol: str, x: jax.Array, weight: jax.Array, shape: tuple[int, ...], **attributes: np.generic) -> jax.Array:
    """Calls a norm of the library, whose weight must have a shape."""
    if x.dtype != weight.dtype or x.dtype.name not in DTYPES:
        raise NotImplementedError(f"{x.dtype} and {weight.dtype}; native norms have both in {' or '.join(DTYPES)}")
    check_shape("the weight of a norm", weight.shape, shape, f"x is {list(x.shape)}")
    call = jax.ffi.ffi_call(target(symbol), jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, weight, stored=np.int32(STORED[x.dtype.name]), **attributes)


class Weights(NamedTuple):
    """A packed matrix [out, in] of x's type, or of codes with scales [out], and a bias [out].

    sums: int32 [out], of a row's codes; with them, x is rounded to codes too.
    form: of codes in blocks, for which x is rounded too. Words then are uint8 [ceil(out / 64), bytes of a panel], and
      width is `in`.
    """

    words: jax.Array
    num_rows: int
    scales: jax.Array | None = None
    sums: jax.Array | None = None
    bias: jax.Array | None = None
    form: Form | None = None
    width: int = 0
    adapter: Adapter | None = None

    @classmethod
    def of(cls, w: Any, bias: jax.Array | None) -> Weights:
        """Returns a `PackedMatrix` or `PackedBlocks`, or a `PackedAdapted` of one, and a bias [out]."""
        adapter, w = getattr(w, "adapter", None), getattr(w, "base", w)
        if (form := getattr(w, "form", None)) is not None:
            return cls(w.data, w.num_rows, bias=bias, form=form, width=w.width, adapter=adapter)
        return cls(w.words, w.num_rows, w.scales, w.sums, bias, adapter=adapter)

    @property
    def rounding(self) -> str | None:
        """Unit of x with a separate scale where x is rounded to codes; None if it is not."""
        return "blocks" if self.form else None if self.sums is None else "rows"

    def check(self, name: str, dtype: Any, wanted: tuple[int, int], reason: str) -> None:
        """Checks that this is a matrix [out, in] for rows of a type, and that its arrays belong together.

        Raises:
          NotImplementedError: its numbers are of another type.
          ValueError: shapes do not fit.
        """
        if self.form:
            self.form.check(name)
            check_shape(name, (self.num_rows, self.width), wanted, reason)
            shape = (-(-self.num_rows // PANEL), self.form.panel_bytes(wanted[1]))
        else:
            is_codes = self.scales is not None or self.sums is not None
            numbers = jnp.dtype(jnp.int8 if is_codes else dtype)
            if self.words.dtype != numbers:
                kind = "codes" if is_codes else "numbers"
                raise NotImplementedError(f"{name} has {kind} in {self.words.dtype}; packed {kind} are {numbers} here")
            _, depth, _, per_word = self.words.shape
            check_shape(name, (self.num_rows, depth * per_word), wanted, reason)
            shape = (-(-self.num_rows // PANEL), depth, PANEL, WORD_BYTES // numbers.itemsize)
        check_shape(f"words of {name}", self.words.shape, shape, f"it is {list(wanted)}")
        for part in ("scales", "sums", "bias"):
            if (vector := getattr(self, part)) is not None:
                check_shape(f"{part} of {name}", vector.shape, wanted[:1], f"it is {list(wanted)}")

    def arguments(self, dtype) -> tuple[jax.Array, ...]:
        none = jnp.zeros(0, jnp.float32)
        bias = None if self.bias is None else self.bias.astype(dtype)
        return self.words, *(none if x is None else x for x in (self.scales, self.sums, bias))


def forms(matrices: Sequence[Weights]) -> np.ndarray:
    """Returns the `Form.attribute` of each matrix of a call, zeros for those that are not in blocks."""
    return np.array([w.form.attribute if w.form else [0] * 4 for w in matrices], np.int32).reshape(-1)


class Norms(NamedTuple):
    """Root mean square norms; with plus_one, weights are those given + 1."""

    eps: float
    plus_one: bool

    @property
    def attributes(self) -> dict[str, np.generic]:
        return {"eps": np.float32(self.eps), "plus_one": np.bool_(self.plus_one)}


def project(
    x: jax.Array,
    matrices: Sequence[Weights],
    *,
    norm: jax.Array | None = None,
    norms: Norms | None = None,
    dtype=None,
) -> list[jax.Array]:
    """Multiplies x [..., D] by up to three matrices: [..., out] of each, in dtype (x's by default).

    Args:
      norm: weight [D] of a norm before them, of the kind `norms`.

    Raises:
      NotImplementedError: x is neither float32 nor bfloat16, or a matrix is not of x's type.
      ValueError: shapes do not fit, or matrices round x differently.
    """
    _check(x, matrices)
    if len(matrices) > MOST_MATRICES:
        raise ValueError(f"{len(matrices)} matrices, a call has at most {MOST_MATRICES}")
    reason = f"x is {list(x.shape)}"
    for i, w in enumerate(matrices):
        w.check(f"matrix {i}", x.dtype, (w.num_rows, x.shape[-1]), reason)
    if norm is not None:
        check_shape("the weight of a norm", norm.shape, x.shape[-1:], reason)
    asked = jnp.dtype(dtype or x.dtype)
    given = jnp.dtype(jnp.float32) if asked not in (x.dtype, jnp.float32) else asked
    array, rows = jax.ShapeDtypeStruct, x.shape[:-1]
    room, more = arguments(matrices, x.shape[-1:] * len(matrices), x) if matrices[0].adapter else ((), ())
    results = (
        array(x.shape if norm is not None else (0,), x.dtype),
        *rounded_rows(rows, x.shape[-1], matrices[0]),
        *(array((*rows, w.num_rows), given) for w in matrices),
        *room,
    )
    weight = jnp.zeros(0, x.dtype) if norm is None else norm.astype(x.dtype)
    _, _, _, *found = jax.ffi.ffi_call(target("ksana_project"), results)(
        *(x, weight, *(argument for w in matrices for argument in w.arguments(x.dtype)), *more),
        stored=np.int32(STORED[x.dtype.name]),
        asked=np.int32(STORED[given.name]),
        forms=forms(matrices),
        **(norms or Norms(0.0, False)).attributes,
    )
    return [y.astype(asked) for y in found[: len(matrices)]]


def rest_of_layer(
    x: jax.Array,
    attended: jax.Array,
    matrices: tuple[Weights, Weights, Weights, Weights],
    weights: tuple[jax.Array | None, jax.Array | None, jax.Array | None],
    norms: Norms,
    activation: str,
) -> jax.Array:
    """Computes a layer after attention: r = x + norm(output attended), r + norm(down(act(gate m) * up m)), m = norm(r).

    Args:
      x: [..., D], as is the result. attended: [..., N*H].
      matrices: output, gate, up and down.
      weights: [D], of the norms after attention, before the MLP and after it; None for absent ones.
      activation: a name of `ACTIVATIONS`.

    Raises:
      NotImplementedError: x is neither float32 nor bfloat16, or a matrix is not of x's type.
      ValueError: shapes do not fit, matrices round x differently, or the activation is unknown.
    """
    _check(x, matrices)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, must be one of {', '.join(ACTIVATIONS)}")
    reason, d, f = f"x is {list(x.shape)}", x.shape[-1], matrices[1].num_rows
    check_shape("attended", attended.shape[:-1], x.shape[:-1], reason)
    wanted = {"output": (d, attended.shape[-1]), "gate": (f, d), "up": (f, d), "down": (d, f)}
    for w, (name, shape) in zip(matrices, wanted.items(), strict=True):
        w.check(name, x.dtype, shape, f"{reason}, attended {list(attended.shape)}, gate has {f} rows")
    for weight in weights:
        if weight is not None:
            check_shape("the weight of a norm", weight.shape, (d,), reason)
    wide, hidden = (jax.ShapeDtypeStruct((*x.shape[:-1], width), x.dtype) for width in (d, f))
    none = jnp.zeros(0, x.dtype)
    rounded = rounded_rows(x.shape[:-1], max(x.shape[-1], attended.shape[-1], hidden.shape[-1]), matrices[0])
    room, more = arguments(matrices, (attended.shape[-1], d, d, f), x) if matrices[0].adapter else ((), ())
    y, *_ = jax.ffi.ffi_call(target("ksana_rest_of_layer"), (wide, wide, wide, hidden, *rounded, *room))(
        x,
        attended.astype(x.dtype),
        *(none if weight is None else weight.astype(x.dtype) for weight in weights),
        *(argument for w in matrices for argument in w.arguments(x.dtype)),
        *more,
        stored=np.int32(STORED[x.dtype.name]),
        activation=np.int32(ACTIVATIONS[activation]),
        forms=forms(matrices),
        **norms.attributes,
    )
    return y


def rounded_rows(rows: tuple[int, ...], width: int, w: Weights) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Room for the codes of rows and their scales, if a matrix needs them; with blocks, also for two sums of codes."""
    shape, scales = ((*rows, width), rows) if w.rounding else ((0,), (0,))
    if w.rounding == "blocks":
        scales = (*rows, width // BLOCK, 3)
    return jax.ShapeDtypeStruct(shape, jnp.uint8), jax.ShapeDtypeStruct(scales, jnp.float32)


def _check(x: jax.Array, matrices: Sequence[Weights]) -> None:
    if x.dtype.name not in DTYPES:
        raise NotImplementedError(f"activations are {x.dtype}; native products have {' or '.join(DTYPES)}")
    if len(found := {w.rounding for w in matrices}) != 1:
        named = " and ".join(sorted(f"by {rounding}" if rounding else "not at all" for rounding in found))
        raise ValueError(f"matrices want the rows of a call rounded {named}; a call rounds them in one way")
