"""The description of a model family, and the config fields that families share. Knows no arrays, no files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.layer_spec import NormPlacement, RopeConfig
from ksana_jax.core.patterns import AttentionPattern, per_layer
from ksana_jax.models.families.fields import MAX_HEADS, MAX_INTEGER, MAX_LAYERS, Fields
from ksana_jax.models.families.rope import read_rope, write_rope

T = TypeVar("T")

# Fields of configs whose layers share keys and values, and values with which they do not.
SHARES_KV = {"use_cla": (False,), "cla_kv_cache_map": (), "num_kv_shared_layers": (0,)}

# Hugging Face names by field of Params and LayerParams. If a name has {}, a weight is stacked from several tensors, for
# instance one per expert: {} counts along the first axis.
TOP_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "w_q": "self_attn.q_proj.weight",
    "b_q": "self_attn.q_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "w_k": "self_attn.k_proj.weight",
    "b_k": "self_attn.k_proj.bias",
    "k_norm": "self_attn.k_norm.weight",
    "w_v": "self_attn.v_proj.weight",
    "b_v": "self_attn.v_proj.bias",
    "w_o": "self_attn.o_proj.weight",
    "b_o": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "w_gate": "mlp.gate_proj.weight",
    "b_gate": "mlp.gate_proj.bias",
    "w_up": "mlp.up_proj.weight",
    "b_up": "mlp.up_proj.bias",
    "w_down": "mlp.down_proj.weight",
    "b_down": "mlp.down_proj.bias",
}


# Buffers that older versions of transformers saved with the weights; they are derived from the config.
BUFFERS = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


class View(NamedTuple):
    """A weight that is a part of a stored tensor, or its transpose.

    tensor: Hugging Face name. Its rows are groups, all of the same form: rows of each field, one after the other. Of
      experts, it is a stack of such matrices.
    fields: of LayerParams, such as w_q, w_k and w_v of a fused projection; empty where it has this weight alone.
    groups: field of ModelConfig that counts the groups, such as "num_heads" if each head has its q, k and v together,
      or "recurrent.num_key_heads"; None for a single group.
    transposed: True if it is stored as [in, out].
    """

    tensor: str
    fields: tuple[str, ...] = ()
    groups: str | None = None
    transposed: bool = False


Name = str | tuple[str, ...] | View


def with_bias(name: str) -> tuple[str, str]:
    """Returns the names of a norm's factors and bias."""
    return f"{name}.weight", f"{name}.bias"


@dataclasses.dataclass(frozen=True)
class Family:
    """Describes the configs and checkpoints of one model family.

    Args:
      model_type: its name in Hugging Face configs.
      architectures: class names of its causal language model; the first is written on export.
      defaults: values that its config class in transformers assumes for absent fields.
      read: returns the ModelConfig fields in which it differs from a plain Llama.
      write: returns those fields as config fields.
      top_names, layer_names: Hugging Face names of the weights, by field of Params and of LayerParams; of the latter,
        also views. A tuple names the tensors that are the rows of a weight, such as a norm's factors and bias.
      norm_names: by placement of norms, names that take the place of those in layer_names.
      plain_names: names that take the place of those in layer_names, in layers without experts among others.
      recurrent_names: the same in recurrent layers.
      stored_shapes: shapes of tensors of weights [n] that have dimensions of 1 besides, by field; -1 stands for n.
      layer_prefix: what names of layers begin with; {} is the layer.
      renamed: what some versions of transformers write instead of the beginning of a name: regular expression, and the
        beginning that is used here.
      buffers: regular expression of names of tensors that are not weights, which loading leaves out.
      fields: config fields that have other names than a Llama's, by those; None for one that its configs lack, which
        then has its default, and is not written.
      activation: config field that names the activation of the MLP.
      mlps: kind of MLP (`models.mlp.MLPS`) by the activation's name; the first is written on export.
      read_rope: returns a config's rope, given its max_position_embeddings: one for all layers, or one per layer.
      write_rope: returns the ropes as config fields.
      rotates_neighbours: True if the rotation pairs 2 i with 2 i + 1 of a head, not i with i + dims/2. Loading reorders
        rows of queries and keys, see `models.frequencies.row_order`.
      example: fields that every config of it has beyond sizes, with any valid value.

    A family that may rotate a part of each head has a default for `partial_rotary_factor`.
    """

    model_type: str
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any]
    read: Callable[[Fields], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    top_names: Mapping[str, str | tuple[str, ...]] = dataclasses.field(default_factory=lambda: TOP_NAMES)
    layer_names: Mapping[str, Name] = dataclasses.field(default_factory=lambda: LAYER_NAMES)
    norm_names: Mapping[str, Mapping[str, Name]] = dataclasses.field(default_factory=dict)
    plain_names: Mapping[str, Name] = dataclasses.field(default_factory=dict)
    recurrent_names: Mapping[str, Name] = dataclasses.field(default_factory=dict)
    stored_shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    layer_prefix: str = "model.layers.{}."
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    buffers: str = BUFFERS
    fields: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    activation: str = "hidden_act"
    mlps: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"silu": "swiglu", "swish": "swiglu"})
    read_rope: Callable[[Fields, int], RopeConfig | tuple[RopeConfig, ...]] = read_rope
    write_rope: Callable[[ModelConfig], dict[str, Any]] = write_rope
    rotates_neighbours: bool = False
    example: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def name(
        self,
        field: str,
        layer: int | None = None,
        placement: NormPlacement = "before",
        plain: bool = False,
        recurrent: bool = False,
    ) -> Name:
        """Returns the Hugging Face name of a weight, the names of its rows, or its view.

        Args:
          field: of LayerParams if a layer is given, else of Params. placement: of the model's norms.
          plain: True for a layer without experts among others. recurrent: True for a recurrent layer.

        Raises:
          ConfigError: the family has no name for it.
        """
        names = self.top_names
        if layer is not None:
            names = {**self.layer_names, **self.norm_names.get(placement, {}), **(self.plain_names if plain else {})}
            names |= self.recurrent_names if recurrent else {}
        if field not in names:
            raise ConfigError(f"family {self.model_type} names no tensor for weight {field}")
        name, prefix = names[field], "" if layer is None else self.layer_prefix.format(layer)
        if isinstance(name, View):
            return name._replace(tensor=prefix + name.tensor)
        return prefix + name if isinstance(name, str) else tuple(prefix + row for row in name)


def read_config(family: Family, values: Mapping[str, Any], source: str) -> ModelConfig:
    """Reads a parsed config of a known family.

    Raises:
      ConfigError: fields are invalid or unsupported; one line names all of them.
    """
    activation = next(iter(family.mlps))
    defaults = {"rms_norm_eps": 1e-6, family.activation: activation, **family.defaults}
    fields = Fields(values, source, defaults, family.fields)
    fields.must_be(family.activation, tuple(family.mlps), f"supported: {activation}")

    for name, harmless in SHARES_KV.items():
        fields.must_be(name, harmless, "layers share keys and values in llama_cla only, by kv_layers")

    width, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads", most=MAX_HEADS)
    num_kv_heads = num_heads if fields.get("num_key_value_heads") is None else fields.integer("num_key_value_heads")
    sound = not fields.problems
    if sound and num_heads % num_kv_heads:
        fields.problem(
            "num_attention_heads",
            num_heads,
            f"must be a multiple of {fields.shown('num_key_value_heads')} {num_kv_heads}",
        )
    if fields.get("head_dim") is not None:
        head_dim = fields.integer("head_dim")
    else:
        head_dim = max(width // num_heads, 1)
        if sound and width % num_heads:
            fields.problem(
                "hidden_size",
                width,
                f"must be a multiple of num_attention_heads {num_heads} where head_dim is not given",
            )
    max_position = fields.integer("max_position_embeddings")
    ropes = family.read_rope(fields, max_position)
    for rope in dict.fromkeys(ropes if isinstance(ropes, tuple) else (ropes,)):
        if rope.kind == "yarn":
            # In some configs, this is the length before rope scaling, in others the length after it.
            max_position = max(max_position, int(min(rope.factor * (rope.original_max_len or 0), MAX_INTEGER)))
    bos_id, eos_ids = read_special_ids(fields)
    shape = {
        "family": family.model_type,
        "vocab_size": fields.integer("vocab_size"),
        "d_model": width,
        "num_layers": fields.integer("num_hidden_layers", most=MAX_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "d_ff": fields.integer("intermediate_size"),
        "norm_eps": fields.number("rms_norm_eps", fields.get("rms_norm_eps")),
        "rope": ropes,
        "mlp": family.mlps.get(str(fields.get(family.activation)), family.mlps[activation]),
        "tie_embeddings": fields.flag("tie_word_embeddings"),
        "max_position": max_position,
        "bos_id": bos_id,
        "eos_ids": eos_ids,
    }
    shape |= family.read(fields)
    fields.check()
    try:
        return ModelConfig(**shape).validate()
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def read_special_ids(fields: Fields) -> tuple[int | None, tuple[int, ...]]:
    """Returns the BOS id and the EOS ids; a config has one id, a list or null.

    -1 stands for no id. A BOS beyond the vocabulary counts as none too: only the tokenizer would use it.
    """
    vocab_size = fields.get("vocab_size")

    def ids(name: str) -> tuple[int, ...]:
        value = fields.get(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        listed = [i for i in listed if not checks.is_integer(i) or i != -1]
        most = vocab_size - 1 if checks.is_integer(vocab_size) else None
        found = [i for i in listed if checks.integer("id", i, 0, most) is None]
        harmless = name == "bos_token_id" and all(checks.is_integer(i) for i in listed)
        if len(found) < len(listed) and name in fields.values and not harmless:
            fields.problem(name, value, f"ids must be integers from 0 to vocab_size {vocab_size} - 1")
        return tuple(dict.fromkeys(found))

    return next(iter(ids("bos_token_id")), None), ids("eos_token_id")


def layer_windows(fields: Fields) -> dict[str, Any]:
    """Returns the layers' patterns in families with sliding layers, if `use_sliding_window` is true.

    `layer_types` names the kind of each layer; without it, layers from index `max_window_layers` on slide.
    """
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    window = fields.get("sliding_window") if fields.flag("use_sliding_window") else None
    if window is not None:
        window = fields.integer("sliding_window")
    first = fields.get("max_window_layers")
    if not checks.is_integer(first) or first < 0:
        if fields.get("layer_types") is None:
            fields.problem("max_window_layers", first, "must be an integer from 0")
        first = num_layers
    kinds = ["full_attention"] * min(first, num_layers)
    kinds += ["full_attention" if window is None else "sliding_attention"] * (num_layers - len(kinds))
    kinds = layer_kinds(fields, kinds)
    if "sliding_attention" in kinds and window is None:
        fields.problem("layer_types", kinds, "sliding_attention needs use_sliding_window true and a sliding_window")
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return {"pattern": one_or_each([AttentionPattern(window=window) for window in windows])}


def sliding_in(fields: Fields, kinds: Sequence[str]) -> AttentionPattern | tuple[AttentionPattern, ...]:
    """Returns the patterns of layers of these kinds; sliding ones have the window `sliding_window`."""
    slide = AttentionPattern(window=fields.integer("sliding_window") if "sliding_attention" in kinds else None)
    return one_or_each([slide if kind == "sliding_attention" else AttentionPattern() for kind in kinds])


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """Returns the layers' windows as config fields; of several window sizes, the first is written."""
    windows = [pattern.window for pattern in per_layer(config.pattern, config.num_layers)]
    return {
        "sliding_window": next((window for window in windows if window is not None), None),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
    }


def layer_kinds(fields: Fields, otherwise: list[str]) -> list[str]:
    """Returns the kind of each layer from `layer_types`, "full_attention" or "sliding_attention", or `otherwise`."""
    kinds = otherwise if fields.get("layer_types") is None else fields.get("layer_types")
    allowed = ("full_attention", "sliding_attention")
    if isinstance(kinds, list) and len(kinds) == len(otherwise) and all(kind in allowed for kind in kinds):
        return kinds
    fields.problem(
        "layer_types", kinds, f"must list full_attention or sliding_attention for each of {len(otherwise)} layers"
    )
    return otherwise


def refuse_windows(fields: Fields, kinds: tuple[str, ...] = ("full_attention",)) -> None:
    """Records a problem if a config asks for sliding layers and its family has none; kinds: of layers that it has.

    transformers ignores these fields in such a config, but the author of the file expects a window.
    """
    fields.must_be(
        "sliding_window", (), "supported by mistral, ministral, qwen2, qwen3, gemma2, gemma3_text, olmo3, phi3"
    )
    found = fields.get("layer_types")
    if found is not None and (not isinstance(found, list) or any(kind not in kinds for kind in found)):
        fields.problem("layer_types", found, f"supported: {', '.join(kinds)}")


def one_or_each(values: Sequence[T]) -> T | tuple[T, ...]:
    """Returns a single value if all layers agree, else a tuple with one value per layer."""
    return values[0] if len(set(values)) == 1 else tuple(values)


def write_config(family: Family, config: ModelConfig) -> dict[str, Any]:
    """Returns the config fields of a model; the caller checks that they read back as an equal model."""
    eos: Any = list(config.eos_ids) if len(config.eos_ids) > 1 else next(iter(config.eos_ids), None)
    values = {
        "architectures": [family.architectures[0]],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_ff,
        family.activation: next((name for name, kind in family.mlps.items() if kind == config.mlp), None),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_position,
        "bos_token_id": config.bos_id,
        "eos_token_id": eos,
        "pad_token_id": None,  # the default of some families is beyond a small vocabulary
        **family.write_rope(config),
        **family.write(config),
    }
    named = {family.fields.get(name, name): value for name, value in values.items()}
    return {name: value for name, value in named.items() if name is not None}
