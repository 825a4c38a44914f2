"""Converts a Llama's attention to gated delta rules and to Qwen3.5's gated attention, for further training."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from experiments.training.to_latents import hidden_states
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.recurrent import DeltaRuleSpec
from ksana_jax.models.layers import rms_norm
from ksana_jax.models.params import LayerParams, Params, init_params

# Softplus of b_decay at the start: states keep from 90 to 99 % of each token's step.
SLOWEST, FASTEST = 0.01, 0.1


def to_hybrid(params: Params, found: ModelConfig, wanted: ModelConfig, texts: jax.Array, seed: int) -> Params:
    """Converts the weights of `found` to those of `wanted`, which has gated delta rules in some layers.

    A head of keys and values becomes a head of the delta rule, with the mean of its queries and the sum of its outputs;
    gates are drawn, and small at first. Attention stays, but that norms give its queries and keys their mean size.

    texts: [sequences, T], whose hidden states give these sizes.

    Raises:
      ConfigError: the delta rule's heads differ from the heads of keys in number or size.
    """
    spec, heads = wanted.recurrent, (found.num_kv_heads, found.head_dim, found.head_dim)
    assert isinstance(spec, DeltaRuleSpec)
    if (sizes := (spec.num_key_heads, spec.key_dim, spec.value_dim)) != heads:
        raise ConfigError(f"hybrid has num_heads, key_dim and value_dim {sizes}, must be those of keys: {heads}")
    drawn = with_decays(init_params(wanted, seed), wanted)
    states = hidden_states(params, found, texts)
    layers = []
    for layer, (p, new) in enumerate(zip(params.layers, drawn.layers, strict=True)):
        of_kind = _delta_rule(p, found) if layer in spec.layers else attention_from(p, found, states[layer])
        norms = {name: getattr(p, name) - 1 for name in ("attn_norm", "mlp_norm")}
        mlp = {name: getattr(p, name) for name in ("w_gate", "w_up", "w_down")}
        layers.append(dataclasses.replace(new, **of_kind, **norms, **mlp))
    return dataclasses.replace(drawn, embed=params.embed, layers=tuple(layers), final_norm=params.final_norm - 1)


def with_decays(params: Params, config: ModelConfig) -> Params:
    """Returns weights whose delta rules start with slow decays, from head to head a constant factor apart, and
    with convolutions that pass on the token itself."""
    assert config.recurrent is not None

    def changed(p: LayerParams) -> LayerParams:
        if p.b_decay is None:
            return p
        rates = jnp.geomspace(SLOWEST, FASTEST, len(p.b_decay))
        names = ("w_conv_q", "w_conv_k", "w_conv_v")
        taps = {name: jnp.zeros_like(getattr(p, name)).at[..., -1].set(1) for name in names}
        return dataclasses.replace(p, b_decay=jnp.log(jnp.expm1(rates)), **taps)

    return dataclasses.replace(params, layers=tuple(map(changed, params.layers)))


def _delta_rule(p: LayerParams, config: ModelConfig) -> dict[str, jax.Array]:
    kv, h, d = config.num_kv_heads, config.head_dim, config.d_model
    w_q = jnp.asarray(p.w_q).reshape(kv, -1, h, d).mean(axis=1).reshape(-1, d)
    w_o = jnp.asarray(p.w_o).reshape(d, kv, -1, h).sum(axis=2).reshape(d, -1)
    return {"w_q": w_q, "w_k": jnp.asarray(p.w_k), "w_v": jnp.asarray(p.w_v), "w_o": w_o}


def attention_from(p: LayerParams, config: ModelConfig, x: jax.Array) -> dict[str, jax.Array]:
    assert p.attn_norm is not None and p.w_q is not None
    x, h = rms_norm(x, p.attn_norm, config.norm_eps), config.head_dim
    sizes = [jnp.sqrt(((x @ jnp.asarray(w).T) ** 2).mean()) for w in (p.w_q, p.w_k)]
    q_norm, k_norm = (jnp.full(h, size - 1) for size in sizes)
    # Gates of 0 halve the result.
    gate, w_o = jnp.zeros_like(p.w_q), 2 * jnp.asarray(p.w_o)
    return {name: getattr(p, name) for name in ("w_q", "w_k", "w_v")} | {
        "w_o": w_o,
        "w_out_gate": gate,
        "q_norm": q_norm,
        "k_norm": k_norm,
    }
