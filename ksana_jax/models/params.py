"""Parameters of a model: shapes derived from the layer specs, counts, and random initialisation. No forward."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.struct import field

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.layer_spec import NORM_PLACEMENTS, AttentionSpec, LatentSpec, LayerSpec
from ksana_jax.models.int8_matrix import QUANTISERS
from ksana_jax.models.layers import norm_kind
from ksana_jax.models.matrix import Matrix
from ksana_jax.models.mlp import mlp_kind, unstated
from ksana_jax.models.recurrent import recurrent_shapes
from ksana_jax.models.weight import KEY, Weight, matrix, of_experts, vector

# Number of random weights drawn at a time. Drawing needs six times the memory of its result on top of it, and is
# faster if that fits the processor's cache (250M weights on two cores: 3.9 s; 6.9 s with sixteen times as many).
DRAWN_AT_ONCE = 2**16
# Fields of LayerParams that a layer lacks that reads another layer's keys and values.
OF_KEYS_AND_VALUES = ("w_k", "b_k", "k_norm", "k_proj_norm", "w_v", "b_v")
# Few rows, whose products decide what is computed: they keep their bits.
ROUTER = {KEY: Weight("whole", "normal", quantises=False)}
# Multiplied head by head, not through `linear`.
OF_LATENTS = {KEY: Weight("rows", "normal", quantises=False)}
# A few numbers for each channel.
OF_CHANNELS = {KEY: Weight("rows", "normal", quantises=False)}
OF_HEADS = {KEY: Weight("heads", "normal", quantises=False)}


@flax.struct.dataclass(kw_only=True)
class LayerParams:
    """Weights of one layer. A field is None if the family has no such weight; its metadata is a `Weight`.

    Matrices w_x are [out, in], with biases b_x, and may each be a `Matrix`. An engine may keep those with the same
    input as one, in fields that no family has: see `models.joined`. Norms [D] are [2, D] if their kind has a bias.
    """

    attn_norm: jax.Array | None = field(default=None, metadata=vector("whole", "identity"))  # [D]
    w_q: jax.Array | None = field(default=None, metadata=matrix("heads", joins="w_qkv"))  # [N*H, D]
    w_k: jax.Array | None = field(default=None, metadata=matrix("heads", joins="w_qkv"))  # [K*H, D]
    w_v: jax.Array | None = field(default=None, metadata=matrix("heads", joins="w_qkv"))  # [K*H, D]
    w_o: jax.Array = field(metadata=matrix("columns", starts="residual"))  # [D, N*H]
    mlp_norm: jax.Array | None = field(default=None, metadata=vector("whole", "identity"))  # [D]
    w_gate: jax.Array | None = field(default=None, metadata=matrix("rows", joins="w_gate_up"))  # [F, D]
    w_up: jax.Array | None = field(default=None, metadata=matrix("rows", joins="w_gate_up"))  # [F, D]
    w_down: jax.Array | None = field(default=None, metadata=matrix("columns", starts="residual"))  # [D, F]
    b_q: jax.Array | None = field(default=None, metadata=vector("rows", "zeros"))  # [N*H]
    b_k: jax.Array | None = field(default=None, metadata=vector("heads", "zeros"))  # [K*H]
    b_v: jax.Array | None = field(default=None, metadata=vector("heads", "zeros"))  # [K*H]
    b_o: jax.Array | None = field(default=None, metadata=vector("once", "zeros"))  # [D]
    b_gate: jax.Array | None = field(default=None, metadata=vector("rows", "zeros"))  # [F]
    b_up: jax.Array | None = field(default=None, metadata=vector("rows", "zeros"))  # [F]
    b_down: jax.Array | None = field(default=None, metadata=vector("once", "zeros"))  # [D]
    q_norm: jax.Array | None = field(default=None, metadata=vector("whole", "identity"))  # [H]
    k_norm: jax.Array | None = field(default=None, metadata=vector("whole", "identity"))  # [H]
    sink_logits: jax.Array | None = field(default=None, metadata=vector("rows", "zeros"))  # [N]; see `sink_logits`
    post_attn_norm: jax.Array | None = field(default=None, metadata=vector("whole", "identity"))  # [D]
    post_mlp_norm: jax.Array | None = field(default=None, metadata=vector("whole", "identity"))  # [D]
    w_qkv: jax.Array | None = field(default=None, metadata=matrix("rows"))  # [(N + 2*K)*H, D]
    b_qkv: jax.Array | None = field(default=None, metadata=vector("rows", "zeros"))  # [(N + 2*K)*H]
    w_gate_up: jax.Array | None = field(default=None, metadata=matrix("rows"))  # [2*F, D]
    b_gate_up: jax.Array | None = field(default=None, metadata=vector("rows", "zeros"))  # [2*F]
    q_proj_norm: jax.Array | None = field(default=None, metadata=vector("rows", "identity"))  # [N*H]
    k_proj_norm: jax.Array | None = field(default=None, metadata=vector("heads", "identity"))  # [K*H]
    w_router: jax.Array | None = field(default=None, metadata=ROUTER)  # [E, D]
    w_gate_experts: jax.Array | None = field(default=None, metadata=of_experts("rows"))  # [E, F, D]
    w_up_experts: jax.Array | None = field(default=None, metadata=of_experts("rows"))  # [E, F, D]
    w_down_experts: jax.Array | None = field(  # [E, D, F]
        default=None, metadata=of_experts("columns", starts="residual")
    )
    w_shared_gate: jax.Array | None = field(default=None, metadata=ROUTER)  # [1, D]
    b_router: jax.Array | None = field(default=None, metadata=vector("whole", "zeros"))  # [E]
    b_gate_experts: jax.Array | None = field(default=None, metadata=vector("rows", "zeros", stacked=True))  # [E, F]
    b_up_experts: jax.Array | None = field(default=None, metadata=vector("rows", "zeros", stacked=True))  # [E, F]
    b_down_experts: jax.Array | None = field(default=None, metadata=vector("once", "zeros", stacked=True))  # [E, D]
    choice_bias: jax.Array | None = field(default=None, metadata=vector("whole", "zeros", float32=True))  # [E]
    # Models with latents, see `LatentSpec`, have w_q_plain, or w_q_a and w_q_b, instead of w_q.
    w_q_plain: jax.Array | None = field(default=None, metadata=matrix("rows"))  # [N*(plain + rotated), D]
    w_q_a: jax.Array | None = field(default=None, metadata=matrix("whole"))  # [query_rank, D]
    q_a_norm: jax.Array | None = field(default=None, metadata=vector("whole", "identity"))  # [query_rank]
    w_q_b: jax.Array | None = field(default=None, metadata=matrix("rows"))  # [N*(plain + rotated), query_rank]
    w_kv_a: jax.Array | None = field(default=None, metadata=matrix("whole"))  # [rank + rotated, D]
    kv_a_norm: jax.Array | None = field(default=None, metadata=vector("whole", "identity"))  # [rank]
    w_uk: jax.Array | None = field(default=None, metadata=OF_LATENTS)  # [N*plain, rank]
    w_uv: jax.Array | None = field(default=None, metadata=OF_LATENTS)  # [N*value, rank]
    # Lightning indexers, see `IndexerSpec`.
    w_index_q: jax.Array | None = field(default=None, metadata=matrix("whole"))  # [heads*head_dim, query_rank]
    w_index_k: jax.Array | None = field(default=None, metadata=matrix("whole"))  # [head_dim, D]
    index_k_norm: jax.Array | None = field(default=None, metadata=vector("whole", "identity"))  # [2, head_dim]
    w_index_weights: jax.Array | None = field(default=None, metadata=ROUTER)  # [heads, D]
    w_out_gate: jax.Array | None = field(default=None, metadata=matrix("rows"))  # [as many as w_o has columns, D]
    # Short convolutions, see `ShortConvSpec`, have three matrices w_in_x and w_conv instead of w_q, w_k and w_v.
    w_in_b: jax.Array | None = field(default=None, metadata=matrix("rows", joins="w_in"))  # [D, D]
    w_in_c: jax.Array | None = field(default=None, metadata=matrix("rows", joins="w_in"))  # [D, D]
    w_in_x: jax.Array | None = field(default=None, metadata=matrix("rows", joins="w_in"))  # [D, D]
    b_in_b: jax.Array | None = field(default=None, metadata=vector("rows", "zeros"))  # [D]
    b_in_c: jax.Array | None = field(default=None, metadata=vector("rows", "zeros"))  # [D]
    b_in_x: jax.Array | None = field(default=None, metadata=vector("rows", "zeros"))  # [D]
    w_in: jax.Array | None = field(default=None, metadata=matrix("rows"))  # [3*D, D]
    b_in: jax.Array | None = field(default=None, metadata=vector("rows", "zeros"))  # [3*D]
    w_conv: jax.Array | None = field(default=None, metadata=OF_CHANNELS)  # [D, 1, kernel]
    b_conv: jax.Array | None = field(default=None, metadata=vector("rows", "zeros"))  # [D]
    # Delta rules, see `DeltaRuleSpec`, have w_q, w_k and w_v, Hk heads of queries and of keys, and Hv of values.
    w_decay: jax.Array | None = field(default=None, metadata=matrix("rows"))  # [Hv, D]
    w_beta: jax.Array | None = field(default=None, metadata=matrix("rows"))  # [Hv, D]
    log_decay: jax.Array | None = field(default=None, metadata=vector("rows", "zeros", float32=True))  # [Hv]
    b_decay: jax.Array | None = field(default=None, metadata=vector("rows", "zeros", float32=True))  # [Hv]
    w_conv_q: jax.Array | None = field(default=None, metadata=OF_HEADS)  # [Hk*key_dim, 1, kernel]
    w_conv_k: jax.Array | None = field(default=None, metadata=OF_HEADS)  # [Hk*key_dim, 1, kernel]
    w_conv_v: jax.Array | None = field(default=None, metadata=OF_HEADS)  # [Hv*value_dim, 1, kernel]
    delta_norm: jax.Array | None = field(default=None, metadata=vector("whole", "ones"))  # [value_dim]
    # With a rank r: w_decay [Hv*key_dim, r], w_out_gate [Hv*value_dim, r], b_decay [Hv*key_dim].
    w_decay_a: jax.Array | None = field(default=None, metadata=matrix("whole"))  # [r, D]
    w_out_gate_a: jax.Array | None = field(default=None, metadata=matrix("whole"))  # [r, D]
    # Mamba-2, see `Mamba2Spec`, has these weights but w_beta and delta_norm.
    skip: jax.Array | None = field(default=None, metadata=vector("rows", "ones", float32=True))  # [Hv]
    mamba_norm: jax.Array | None = field(default=None, metadata=vector("rows", "ones"))  # [Hv*value_dim]
    b_conv_q: jax.Array | None = field(default=None, metadata=vector("heads", "zeros"))  # [Hk*key_dim]
    b_conv_k: jax.Array | None = field(default=None, metadata=vector("heads", "zeros"))  # [Hk*key_dim]
    b_conv_v: jax.Array | None = field(default=None, metadata=vector("heads", "zeros"))  # [Hv*value_dim]


@flax.struct.dataclass
class Params:
    """Weights of a model. head is None if it is tied to the embedding, which then may be a `PackedMatrix`.

    embed is a NumPy array if it is kept on the host; compiled programs must then not use it.
    """

    embed: jax.Array = field(metadata={KEY: Weight("vocabulary", "normal", quantises=False)})  # [V, D]
    layers: tuple[LayerParams, ...]
    final_norm: jax.Array = field(metadata=vector("whole", "identity"))  # [D]
    head: jax.Array | None = field(  # [V, D]
        default=None, metadata={KEY: Weight("vocabulary", "normal", quantises=False, packs=True)}
    )
    positions: jax.Array | None = field(  # [position_offset + max_position, D]
        default=None, metadata={KEY: Weight("whole", "normal", quantises=False)}
    )


def weight_fields() -> dict[str, Weight | None]:
    """Returns the `Weight` of each field of LayerParams and Params, by name; None if the field states none."""
    fields = (*dataclasses.fields(LayerParams), *dataclasses.fields(Params))
    return {f.name: f.metadata.get(KEY) for f in fields if f.name != "layers"}


def stated(name: str, setting: str) -> Weight:
    """Returns a field's `Weight`.

    Args:
      setting: the setting that needs it.

    Raises:
      ConfigError: the field states none.
    """
    if (weight := weight_fields()[name]) is None:
        raise ConfigError(
            f"weight {name} does not state what {setting} must know: its field's metadata lacks a Weight, see "
            "ksana_jax/models/weight.py"
        )
    return weight


def heads_of(name: str, spec: LayerSpec | None) -> int:
    """Returns the number of heads that a field's rows belong to in a layer, if `Weight.divides` is "heads"; 1 outside
    layers."""
    if spec is None:
        return 1
    if spec.recurrent is not None:
        return getattr(spec.recurrent, "num_key_heads" if name[-1] in "qk" else "num_value_heads", 1)
    return spec.attention.num_heads if name == "w_q" else spec.attention.num_kv_heads


def dtype_of(name: str, dtype: Any) -> Any:
    """Returns the dtype of a field's weight in an engine with a dtype."""
    weight = weight_fields()[name]
    return jnp.dtype("float32") if weight is not None and weight.float32 else dtype


def weights_of(params: LayerParams | Params) -> dict[str, Any]:
    """Returns the weights that are present, of one layer or outside all layers, by field."""
    names = [f.name for f in dataclasses.fields(params) if f.name != "layers"]
    return {name: w for name in names if (w := getattr(params, name)) is not None}


def attention_shapes(d_model: int, spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layer's query, key, value and output projections, by field of LayerParams; of queries
    and output alone where it reads another layer's keys and values."""
    h, d = spec.head_dim, d_model
    if (latent := spec.latent) is not None:
        return latent_shapes(d, spec.num_heads, latent)
    n, k = spec.num_heads * h, spec.num_kv_heads * h
    shapes = {"w_q": (n, d), "w_k": (k, d), "w_v": (k, d), "w_o": (d, n)}
    if spec.qkv_bias:
        shapes |= {"b_q": (n,), "b_k": (k,), "b_v": (k,)}
    if spec.out_bias:
        shapes |= {"b_o": (d,)}
    if spec.qk_norm == "head":
        shapes |= {"q_norm": (h,), "k_norm": (h,)}
    if spec.qk_norm == "projection":
        shapes |= {"q_proj_norm": (n,), "k_proj_norm": (k,)}
    if spec.out_gate:
        shapes |= {"w_out_gate": (n, d)}
    if spec.sinks == "learned":
        shapes |= {"sink_logits": (spec.num_heads,)}
    return shapes if spec.own_kv else {name: x for name, x in shapes.items() if name not in OF_KEYS_AND_VALUES}


def latent_shapes(d_model: int, num_heads: int, latent: LatentSpec) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the matrices and norms around a layer's attention to latents, by field of LayerParams."""
    d, r, of_queries = d_model, latent.rank, num_heads * (latent.plain + latent.rotated)
    shapes: dict[str, tuple[int, ...]] = {"w_kv_a": (latent.head_dim, d), "kv_a_norm": (r,)}
    shapes |= {"w_uk": (num_heads * latent.plain, r), "w_uv": (num_heads * latent.value, r)}
    shapes |= {"w_o": (d, num_heads * latent.value)}
    if latent.query_rank is None:
        return shapes | {"w_q_plain": (of_queries, d)}
    q = latent.query_rank
    if (indexer := latent.indexer) is not None:
        h = indexer.head_dim
        shapes |= {"w_index_q": (indexer.num_heads * h, q), "w_index_k": (h, d), "index_k_norm": (2, h)}
        shapes |= {"w_index_weights": (indexer.num_heads, d)}
    return shapes | {"w_q_a": (q, d), "q_a_norm": (q,), "w_q_b": (of_queries, q)}


def param_shapes(config: ModelConfig) -> Params:
    """Returns the shape of every weight, as a Params whose leaves are tuples of int.

    Raises:
      ConfigError: a layer has an unknown kind of MLP or norm, or its MLP a weight that LayerParams has no field for.
    """
    d, vocab, fields = config.d_model, config.vocab_size, weight_fields()
    norm = (2, d) if norm_kind(config.norm).bias else (d,)
    layers: list[Any] = []
    for layer in config.layers:
        spec = layer.recurrent
        mixer = attention_shapes(d, layer.attention) if spec is None else recurrent_shapes(d, spec)
        shapes = mixer | mlp_kind(layer.mlp.kind).shapes(d, layer.mlp)
        if unknown := [name for name in shapes if name not in fields]:
            raise ConfigError(f"mlp {layer.mlp.kind!r} has {', '.join(unknown)}, for which LayerParams has no field")
        norms = dict.fromkeys(NORM_PLACEMENTS[layer.norms.placement], norm)
        layers.append(LayerParams(**norms, **shapes))  # pyright: ignore[reportArgumentType]
    head: Any = None if config.tie_embeddings else (vocab, d)
    positions: Any = None if config.position_offset is None else (config.position_offset + config.max_position, d)
    return Params((vocab, d), tuple(layers), norm, head, positions)  # pyright: ignore[reportArgumentType]


def num_params(config: ModelConfig) -> int:
    """Counts the model's parameters; tied embeddings count once."""
    return sum(map(math.prod, jax.tree.leaves(param_shapes(config), is_leaf=is_shape)))


def num_active_params(config: ModelConfig) -> int:
    """Counts the parameters that a token passes through: of experts, those that are chosen for it."""
    if config.experts is None:
        return num_params(config)
    fields, (number, chosen) = weight_fields(), (config.experts.num_experts, config.experts.num_chosen)
    stacks = [
        math.prod(shape)
        for layer in param_shapes(config).layers
        for name, shape in weights_of(layer).items()
        if (weight := fields[name]) is not None and weight.stacked
    ]
    return num_params(config) - sum(stacks) // number * (number - chosen)


def is_shape(x: Any) -> bool:
    """True if x is a leaf of `param_shapes`; for jax.tree.map's is_leaf."""
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def check_quantises(config: ModelConfig, quantization: str | None) -> None:
    """Checks that a model's weights can be quantised.

    Raises:
      ConfigError: a weight or a kind of MLP does not state whether it can.
    """
    if quantization is None:
        return
    if reason := unstated(config, "quantises"):
        raise ConfigError(f"quantization is {quantization!r}: {reason}")
    for name in dict.fromkeys(name for layer in param_shapes(config).layers for name in weights_of(layer)):
        stated(name, "quantization")


def quantised(params: Params, quantization: str | None) -> Params:
    """Returns the weights with all matrices of layers quantised; embedding, output head, norms and biases stay.

    Args:
      params: their matrices may be quantised or packed already, and then stay as they are.
      quantization: as in `EngineConfig`: a name in `QUANTISERS`; others leave the weights as they are.

    Raises:
      ConfigError: a weight does not state whether it quantises.
    """
    if quantization in (None, "stored"):
        return params
    layers = []
    for layer in params.layers:
        found: dict[str, Any] = {
            name: QUANTISERS[quantization](w)
            for name, w in weights_of(layer).items()
            if stated(name, "quantization").quantises and not isinstance(w, Matrix)
        }
        layers.append(layer.replace(**found))  # pyright: ignore[reportAttributeAccessIssue]
    return params.replace(layers=tuple(layers))  # pyright: ignore[reportAttributeAccessIssue]


def owned(params: Params, num_devices: int = 1) -> Params:
    """Returns weights whose NumPy arrays are copies, which their caller cannot change; arrays of jax are shared.

    Args:
      num_devices: of several, each takes its part from host memory.
    """
    copy = jnp.array if num_devices == 1 else np.array
    return jax.tree.map(lambda x: copy(x) if isinstance(x, np.ndarray) else x, params)


def check_undeleted(params: Params) -> None:
    """Raises RuntimeError if a weight has been deleted; names it."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise RuntimeError(
                f"weight params{jax.tree_util.keystr(path)} has been deleted, as by a training step to which it was "
                "donated: an engine shares arrays of jax. Give it the new weights with update_weights"
            )


def init_params(
    config: ModelConfig,
    seed: int = 0,
    dtype=jnp.float32,
    std: float = 0.02,
    place: Callable[[Any, jax.Array], jax.Array] = lambda path, leaf: leaf,
) -> Params:
    """Draws random weights: normal matrices with deviation `std`, identity norms, zero biases and sink logits.

    Projections back into the residual stream are scaled down by sqrt(2 L) (GPT-2's initialisation). Weights are drawn
    one after the other, in place and in pieces, so that peak memory barely exceeds the weights.

    Args:
      place: called with each weight's path, from `jax.tree_util`, and the weight; returns it on its devices.

    Raises:
      ConfigError: a weight does not state its initialisation.
    """
    key = jax.random.key(seed)
    paths, tree = jax.tree.flatten_with_path(param_shapes(config), is_leaf=is_shape)
    leaves, index = [], 0
    for path, shape in paths:
        name = path[-1].name
        index += name != "sink_logits"  # so that models that differ only in them start from the same matrices
        starts = stated(name, "random initialisation").starts
        if starts == "identity":
            leaf = jnp.full(shape, norm_kind(config.norm).identity, dtype)
            leaf = leaf if leaf.ndim == 1 else leaf.at[1].set(0)  # the bias of a norm
        elif starts in ("zeros", "ones"):
            leaf = jnp.full(shape, starts == "ones", dtype_of(name, dtype))
        else:
            scale = std / (2 * config.num_layers) ** 0.5 if starts == "residual" else std
            leaf = _draw(jax.random.fold_in(key, index - 1), scale, shape=shape, dtype=dtype)
        leaves.append(jax.block_until_ready(place(path, leaf)))
    return jax.tree.unflatten(tree, leaves)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _draw(key: jax.Array, scale: float, *, shape: tuple[int, int], dtype) -> jax.Array:
    """Draws normal numbers with standard deviation `scale`."""
    num_rows = max(DRAWN_AT_ONCE // math.prod(shape[1:]), 1)
    if num_rows >= shape[0]:
        return (jax.random.normal(key, shape) * scale).astype(dtype)

    def piece(index, out):
        rows = (jax.random.normal(jax.random.fold_in(key, index), (num_rows, *shape[1:])) * scale).astype(dtype)
        # The last piece overlaps the previous one if the rows are not a multiple of its size.
        return jax.lax.dynamic_update_slice_in_dim(out, rows, jnp.minimum(index * num_rows, shape[0] - num_rows), 0)

    return jax.lax.fori_loop(0, -(-shape[0] // num_rows), piece, jnp.zeros(shape, dtype))
