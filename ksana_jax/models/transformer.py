"""One decoder-only forward for all families; layers are described by data, `ModelConfig.layers`.

It knows tokens, and positions only of models that embed them: attention, with its rope and its mask, is the caller's
function `attend`. The engine's writes to the paged cache and reads from it, training's is dense, and
`examples/attention_by_hand.ipynb` writes one.
All other operators of a layer are the caller's `Operators`, so that training has gradients for them.
Layers are unrolled: a scan over layers was 17 times slower on CPU and copies slices of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import AttentionSpec, LayerSpec
from ksana_jax.models.latents import project, values
from ksana_jax.models.layers import Linear, linear, soft_capped
from ksana_jax.models.operators import XLA_OPERATORS, Operators
from ksana_jax.models.params import LayerParams, Params
from ksana_jax.models.recurrent import Recur, from_the_start, mixer

# attend(layer, q [..., N, H], k [..., K, H], v [..., K, H], state) -> (out [..., N, H], state); a layer with an indexer
# adds `models.latents.Indexed`.
# layer is a Python int, q and k are not yet rotated, and state is whatever travels from layer to layer.
# k and v are None in a layer that reads an earlier one's, see `ModelConfig.kv_layers`.
Attend = Callable[..., tuple[jax.Array, Any]]


def forward(
    params: Params,
    tokens: jax.Array,
    attend: Attend,
    state: Any,
    *,
    config: ModelConfig,
    operators: Operators = XLA_OPERATORS,
):
    """Runs the network up to the final norm.

    Args:
      tokens: [...] ids in [0, V), or [..., D] rows of the embedding that were looked up elsewhere.
      attend: attention of one layer; see `Attend`. It decides about rope, mask and softmax.
      state: pytree that attend receives in the first layer and hands on to the next, such as the KV cache.
      operators: implementations of everything else in a layer.

    Returns:
      Hidden states [..., D], and the state after the last layer.
    """
    x = embedded(params, tokens, config=config, operators=operators)
    x, state = run_layers(params.layers, x, attend, state, specs=config.layers, operators=operators)
    return final_norm(params, x, config=config, operators=operators), state


@jax.named_scope("embed")
def embedded(
    params: Params, tokens: jax.Array, at: Any = None, *, config: ModelConfig, operators: Operators = XLA_OPERATORS
) -> jax.Array:
    """Looks up and scales the embedding of tokens: [..., D]; tokens as in `forward`.

    at: positions of the tokens in their text, for models with a table of them; None counts from 0.
    """
    x = operators.embed(params.embed, tokens) if jnp.issubdtype(tokens.dtype, jnp.integer) else tokens
    x = x if config.embed_scale == 1 else x * jnp.asarray(config.embed_scale, x.dtype)
    if params.positions is None:
        return x
    return x + params.positions[(jnp.arange(x.shape[-2]) if at is None else at) + (config.position_offset or 0)]


def run_layers(
    ps: Sequence[LayerParams],
    x: jax.Array,
    attend: Attend,
    state: Any,
    *,
    specs: Sequence[LayerSpec],
    operators: Operators = XLA_OPERATORS,
    after_layer: Callable[[int, jax.Array], jax.Array] | None = None,
    recur: Recur | None = None,
    expands: bool = False,
) -> tuple[jax.Array, Any]:
    """Runs layers, all or some of a network, on hidden states x [..., D]; arguments and results as in `forward`.

    Args:
      after_layer: changes the hidden states after a layer.
      recur: runs recurrent layers on states; None begins whole texts x [..., T, D].
      expands: `attend` expands latents, and returns what their values give.
    """
    following = (*ps[1:], None)
    for index, (p, after, spec) in enumerate(zip(ps, following, specs, strict=True)):
        with jax.named_scope(f"layer{index}"):
            latent = spec.attention.latent
            if spec.recurrent is not None:
                out, state = recurred(x, p, index, recur or from_the_start(spec.recurrent), state, spec, operators)
            else:
                plain = latent is None
                if plain:
                    projected = operators.queries_keys_values(x, p, spec)
                else:
                    projected = project(x, p, spec, operators, expands)
                q, k, v, *indexed = projected
                out, state = attend(index, q, k, v, state, *indexed)
                if spec.attention.out_gate if plain else not expands:
                    out = values(out, x, p, spec, operators)
            x = operators.after_attention(x, out, p, spec, after)
            x = x if after_layer is None else after_layer(index, x)
    return x, state


@jax.named_scope("recurrent")
def recurred(
    x: jax.Array, p: LayerParams, index: int, recur: Recur, state: Any, spec: LayerSpec, operators: Operators
) -> tuple[jax.Array, Any]:
    """Returns the result of a recurrent layer before its output projection, and the state."""
    assert spec.recurrent is not None
    mix = mixer(p, spec.recurrent, operators.linear, operators.normed_projection)
    return recur(index, mix, operators.normed(x, p.attn_norm, spec.norms), state)


def final_norm(params: Params, x: jax.Array, *, config: ModelConfig, operators: Operators = XLA_OPERATORS) -> jax.Array:
    """Normalises hidden states [..., D] after the last layer."""
    return operators.normaliser(config.layers[-1].norms)(x, params.final_norm)


def sink_logits(params: LayerParams, spec: AttentionSpec) -> jax.Array | None:
    """Returns the logits [N] that a layer's softmax adds to its scores, learned or 0; None if it has none."""
    return jnp.zeros(spec.num_heads, jnp.float32) if spec.sinks == "zero" else params.sink_logits


@jax.named_scope("logits")
def logits(params: Params, hidden: jax.Array, *, config: ModelConfig, linear: Linear = linear) -> jax.Array:
    """Computes scores [..., V] in float32 from hidden states [..., D]."""
    head = params.embed if params.head is None else params.head
    scores = linear(hidden, head, dtype=jnp.float32)
    scores = scores if config.logit_scale == 1 else scores * config.logit_scale
    return scores if config.logit_soft_cap is None else soft_capped(scores, config.logit_soft_cap)
