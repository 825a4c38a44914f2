"""The operators of a layer on Hopper in steps of few tokens: products fused with norms, biases, gated activations and
residuals, in one kernel each.

XLA computes a part of a layer that the kernel does not support, or would slow down (`hopper.product.pays`):
another type than bfloat16, weights in 8 bits, more than 64 tokens or no multiple of 8, norms after a product, and of
more than 16 tokens all but the gated product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from ksana_jax.core.layer_spec import PARALLEL, LayerSpec, NormSpec
from ksana_jax.models import layers
from ksana_jax.models.mlp import mlp_kind
from ksana_jax.models.operators import Operators
from ksana_jax.models.params import LayerParams
from pallas_kernels.contract import Kernel, Product
from pallas_kernels.hopper.product import AHEAD_BYTES, pays
from pallas_kernels.registry import PRODUCTS

ACTIVATIONS = ("silu", "gelu_tanh")  # that the kernel has
KERNEL = PRODUCTS["hopper_product"]


def linear(x: jax.Array, w: Any, b: jax.Array | None = None, *, dtype=None) -> jax.Array:
    """Multiplies, in the kernel where it pays; the contract of `models.layers.linear`."""
    out = None if dtype not in (None, x.dtype) else _multiplied(KERNEL, pays, x, w, bias=b)
    return layers.linear(x, w, b, dtype=dtype) if out is None else out


def _multiplied(
    kernel: Kernel[jax.Array], serves: Callable[[Product], bool], x: jax.Array, w: Any, **options: Any
) -> jax.Array | None:
    """Returns the `Product` of x [..., D] and options, or None where XLA is to compute it."""
    if not isinstance(w, jax.Array) or w.ndim != 2:
        return None
    if (residual := options.pop("residual", None)) is not None:
        residual = residual.reshape(-1, residual.shape[-1])
    if not isinstance(ahead := options.pop("ahead", None), jax.Array) or ahead.ndim != 2:
        ahead = None
    flat = x.reshape(-1, x.shape[-1])
    call = Product(flat, w, residual=residual, ahead=ahead, ahead_bytes=AHEAD_BYTES, **options)
    return kernel(call).reshape(*x.shape[:-1], -1) if serves(call) else None


@dataclasses.dataclass(frozen=True)
class FusedOperators(Operators):
    """The contract of `Operators` for one device.

    kernel: of products. serves: whether it computes a product; XLA computes the others.
    """

    kernel: Kernel[jax.Array] = KERNEL
    serves: Callable[[Product], bool] = pays

    def queries_keys_values(self, x: jax.Array, p: LayerParams, spec: LayerSpec):
        with jax.named_scope("qkv"):
            out = self._of_normed(x, p.attn_norm, spec.norms, p.w_qkv, p.b_qkv, ahead=p.w_o)
            if out is not None:
                return self.heads((out,), p, spec)
        return super().queries_keys_values(x, p, spec)

    def after_attention(
        self, x: jax.Array, attended: jax.Array, p: LayerParams, spec: LayerSpec, following: LayerParams | None = None
    ) -> jax.Array:
        if spec.norms.placement in PARALLEL:
            return super().after_attention(x, attended, p, spec, following)
        with jax.named_scope("output"):
            flat = attended.reshape(*x.shape[:-1], -1)
            x = self._added(x, flat, p.w_o, p.b_o, p.post_attn_norm, spec, ahead=p.w_gate_up)
        with jax.named_scope("mlp"):
            if (activation := mlp_kind(spec.mlp.kind).activation) in ACTIVATIONS:
                with jax.named_scope("gate_up"):
                    options = {"activation": activation, "ahead": p.w_down}
                    gated = self._of_normed(x, p.mlp_norm, spec.norms, p.w_gate_up, p.b_gate_up, **options)
                if gated is not None:
                    with jax.named_scope("down"):
                        ahead = None if following is None else following.w_qkv
                        return self._added(x, gated, p.w_down, p.b_down, p.post_mlp_norm, spec, ahead=ahead)
            return self.after_mlp(x, p, spec, x)

    def _of_normed(
        self, x: jax.Array, weight: jax.Array | None, norms: NormSpec, w: Any, bias: jax.Array | None, **options: Any
    ) -> jax.Array | None:
        """Returns the product of rows, normed where there is a norm, or None where XLA is to compute it."""
        if (plus_one := layers.norm_kind(norms.kind).plus_one) is None:
            return None
        of_norm = {} if weight is None else {"norm": weight, "eps": norms.eps, "plus_one": plus_one}
        return _multiplied(self.kernel, self.serves, x, w, bias=bias, **of_norm, **options)

    def _added(
        self,
        x: jax.Array,
        y: jax.Array,
        w: Any,
        bias: jax.Array | None,
        post_norm: jax.Array | None,
        spec: LayerSpec,
        **options: Any,
    ) -> jax.Array:
        """Returns x plus the product of y, which is normed and scaled first where the layer has that."""
        if post_norm is None and spec.residual_scale == 1:
            out = _multiplied(self.kernel, self.serves, y, w, bias=bias, residual=x, **options)
            if out is not None:
                return out
        return self.added(x, self.linear(y, w, bias), post_norm, spec)
