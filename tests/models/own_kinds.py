"""Kinds of MLPs and norms, and a weight, that are not the package's: with all statements, and without any."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import ExpertsSpec, LatentSpec, RopeConfig
from ksana_jax.core.recurrent import DeltaRuleSpec, Mamba2Spec, ShortConvSpec
from ksana_jax.models import params as model_params
from ksana_jax.models.layers import NORMS, Norm
from ksana_jax.models.mlp import MLP, MLPS, gated_shapes
from ksana_jax.models.params import LayerParams, init_params
from ksana_jax.models.weight import matrix


@flax.struct.dataclass
class Unstated(LayerParams):
    """Adds a field without a statement."""

    w_new: jax.Array | None = None  # [F, D]


@flax.struct.dataclass
class Stated(LayerParams):
    """Adds a field with its statement."""

    w_new: jax.Array | None = flax.struct.field(default=None, metadata=matrix("rows"))  # [F, D]


def shapes(d_model, spec):
    return gated_shapes(d_model, spec) | {"w_new": (spec.d_ff, d_model)}


def triple(x, p, linear, spec):
    hidden = jax.nn.relu(linear(x, p.w_gate, p.b_gate)) * linear(x, p.w_up, p.b_up) * jnp.tanh(linear(x, p.w_new))
    return linear(hidden, p.w_down, p.b_down)


def squared(x, p, linear, spec):
    return linear(jax.nn.relu(linear(x, p.w_up)) ** 2, p.w_down)


def without_linear(x, p, linear, spec):
    hidden = jax.nn.silu(jnp.einsum("...d,fd->...f", x, p.w_gate)) * jnp.einsum("...d,fd->...f", x, p.w_up)
    return jnp.einsum("...f,df->...d", hidden, p.w_down)


def bounded(x, weight, eps):
    """Dynamic tanh without its scale (arXiv:2503.10622): a function of single numbers, so rows are independent."""
    return weight * jnp.tanh(x)


def centred(x, weight, eps):
    """Layer norm without a bias."""
    x32 = x.astype(jnp.float32)
    x32 -= x32.mean(-1, keepdims=True)
    return weight * (x32 * jax.lax.rsqrt((x32 * x32).mean(-1, keepdims=True) + eps)).astype(x.dtype)


OWN_MLPS = {
    "triple": MLP(shapes, triple, divides=True, quantises=True, row_by_row=True),
    # Without a gate.
    "squared": MLP(
        lambda d, spec: {"w_up": (spec.d_ff, d), "w_down": (d, spec.d_ff)},
        squared,
        **dict.fromkeys(("divides", "quantises", "row_by_row"), True),
    ),
    "unstated": MLP(gated_shapes, without_linear),
}
OWN_NORMS = {"bounded": Norm(bounded, 1.0, row_by_row=True), "centred": Norm(centred, 1.0)}

TINY = ModelConfig(
    vocab_size=97, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48, max_position=64
)
CONFIGS = {
    # With every weight that a family has, but norms over all heads.
    "everything": dataclasses.replace(
        TINY,
        **{"mlp": "geglu", "norm": "rms_plus_one", "sinks": "learned", "norm_placement": "both", "qk_norm": "head"},
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True),
    ),
    "after": dataclasses.replace(TINY, norm_placement="after", qk_norm="projection"),
    "scaled": dataclasses.replace(TINY, residual_scale=0.3, logit_scale=0.25),
    "parallel": dataclasses.replace(
        TINY,
        **{"mlp": "gelu", "norm": "layer", "norm_placement": "parallel", "position_offset": 2},
        alibi=(0.5, 0.25, 0.125, 0.0625),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True),
    ),
    "shared": dataclasses.replace(TINY, norm_placement="parallel_shared"),
    "experts": dataclasses.replace(TINY, mlp="swiglu_experts", experts=ExpertsSpec(5, 2, False, shared_d_ff=16)),
    "clamped": dataclasses.replace(
        TINY,
        **{"mlp": "clamped_swiglu_experts", "mlp_bias": True, "sinks": "learned"},
        experts=ExpertsSpec(5, 2, sigmoid_factor=1.7, limit=0.5),
    ),
    "mixed": dataclasses.replace(
        TINY, mlp="swiglu_experts", experts=ExpertsSpec(5, 2, shared_d_ff=16, plain_layers=(0,), plain_d_ff=40)
    ),
    # With latents, of both kinds of queries.
    "latent": dataclasses.replace(
        TINY,
        **{"num_kv_heads": 1, "head_dim": 20, "attention_scale": 0.3, "mlp": "swiglu_experts"},
        latent=LatentSpec(12, 8, 6, 10, query_rank=16),
        rope=RopeConfig(partial_rotary_factor=0.4),
        experts=ExpertsSpec(
            8, 2, shared_d_ff=16, shared_gate=False, scoring="sigmoid", choice_bias=True, num_groups=4, groups_chosen=2
        ),
    ),
    "dense_latent": dataclasses.replace(
        TINY,
        **{"num_kv_heads": 1, "head_dim": 20, "latent": LatentSpec(12, 8, 6, 10, interleaved=False)},
        rope=RopeConfig(partial_rotary_factor=0.4),
    ),
    "gated": dataclasses.replace(TINY, out_gate=True, recurrent=DeltaRuleSpec((0,), 2, 4, 8, 4)),
    "delta": dataclasses.replace(TINY, recurrent=DeltaRuleSpec((0,), 2, 4, 8, 4, norm_placement="after")),
    "low_rank": dataclasses.replace(TINY, recurrent=DeltaRuleSpec((0,), 2, 4, 8, 4, rank=3)),
    "mamba": dataclasses.replace(TINY, recurrent=Mamba2Spec((0,), 2, 4, 8, 4)),
    "recurrent": dataclasses.replace(TINY, recurrent=ShortConvSpec((0,), bias=True)),
    "reads": dataclasses.replace(TINY, num_layers=3, kv_layers=(0, 0, 0), qkv_bias=True, qk_norm="head"),
    "own": dataclasses.replace(TINY, mlp="triple", norm="bounded", mlp_bias=True),
    "squared": dataclasses.replace(TINY, mlp="squared"),
    "unstated": dataclasses.replace(TINY, mlp="unstated", norm="centred"),
}


def register(patch: pytest.MonkeyPatch, layer_params: type[LayerParams] = Stated) -> None:
    """Puts the kinds into their registries, and takes LayerParams with the field."""
    for registry, own in ((MLPS, OWN_MLPS), (NORMS, OWN_NORMS)):
        for name, kind in own.items():
            patch.setitem(registry, name, kind)
    patch.setattr(model_params, "LayerParams", layer_params)


@functools.cache
def weights(name: str) -> Any:
    """Weights of one of CONFIGS, with vectors and norms that are neither 0 nor 1."""
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        params = init_params(CONFIGS[name], seed=3, std=0.4)
    rng = np.random.default_rng(0)

    def changed(path, w):
        is_vector = w.size <= 2 * w.shape[-1] or path[-1].name.startswith("b_")
        return w + jnp.asarray(0.3 * rng.standard_normal(w.shape), w.dtype) if is_vector else w

    return jax.tree_util.tree_map_with_path(changed, params)
