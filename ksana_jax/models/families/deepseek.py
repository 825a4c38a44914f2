"""DeepSeek V2 and V3: latents, and small experts, of which some serve all tokens (arXiv:2405.04434, 2412.19437). V3.2:
a V3 with indexers (arXiv:2512.02556)."""

from __future__ import annotations

import dataclasses
from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import IndexerSpec
from ksana_jax.models.families import latents, routing
from ksana_jax.models.families.family import BUFFERS, Family, with_bias
from ksana_jax.models.families.fields import MAX_LAYERS, Fields

GROUPED = "group_limited_greedy"
KINDS = ("dense", "sparse")
INDEXER = {"index_n_heads": "num_heads", "index_head_dim": "head_dim", "index_topk": "top_k"}


def read2(fields: Fields) -> dict[str, Any]:
    fields.must_be("scoring_func", ("softmax",), "supported: softmax")
    fields.must_be("norm_topk_prob", (False,), "supported: false")
    fields.must_be("topk_method", ("greedy", GROUPED), f"supported: greedy, {GROUPED}")
    routes: dict[str, Any] = latents.read_groups(fields, 1) if fields.get("topk_method") == GROUPED else {}
    return latents.read_latents(fields) | latents.read_experts(fields, normalised=False, **routes)


def write2(config: ModelConfig) -> dict[str, Any]:
    method = GROUPED if config.experts and config.experts.num_groups > 1 else "greedy"
    return latents.write_latents(config) | latents.write_experts(config) | {"topk_method": method}


def read3(fields: Fields) -> dict[str, Any]:
    fields.must_be("scoring_func", ("sigmoid",), "supported: sigmoid")
    fields.must_be("topk_method", ("noaux_tc",), "supported: noaux_tc")
    return latents.read_latents(fields) | read_sigmoid_experts(fields)


def read32(fields: Fields) -> dict[str, Any]:
    fields.must_be("scoring_func", ("sigmoid",), "supported: sigmoid")
    fields.must_be("topk_method", ("noaux_tc",), "supported: noaux_tc")
    found = latents.read_latents(fields, kinds=("indexed_attention",))
    spec = IndexerSpec(**{field: fields.integer(name) for name, field in INDEXER.items()})
    plain = None if fields.get("mlp_layer_types") is None else read_plain_layers(fields, 0)
    return found | {"latent": dataclasses.replace(found["latent"], indexer=spec)} | read_sigmoid_experts(fields, plain)


def read_plain_layers(fields: Fields, first: int) -> tuple[int, ...]:
    """Returns the layers without experts from `mlp_layer_types`, the first few where it is absent."""
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    kinds = fields.get("mlp_layer_types") or [KINDS[layer >= first] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in KINDS for kind in kinds):
        fields.problem("mlp_layer_types", kinds, f"must list dense or sparse for each of {num_layers} layers")
        return ()
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")


def write_plain_layers(config: ModelConfig) -> dict[str, Any]:
    plain = config.experts.plain_layers if config.experts else ()
    return {"mlp_layer_types": [KINDS[layer not in plain] for layer in range(config.num_layers)]}


def read_sigmoid_experts(fields: Fields, plain_layers: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Returns experts that are chosen by sigmoids and a bias."""
    routes = {"normalised": fields.flag("norm_topk_prob"), "scoring": "sigmoid", "choice_bias": True}
    return latents.read_experts(fields, plain_layers, **routes, **latents.read_groups(fields, 2))


def write3(config: ModelConfig) -> dict[str, Any]:
    return latents.write_latents(config) | latents.write_experts(config)


def write32(config: ModelConfig) -> dict[str, Any]:
    spec = (config.latent and config.latent.indexer) or IndexerSpec(1, 1, 1)
    indexer = {name: getattr(spec, field) for name, field in INDEXER.items()}
    return write3(config) | write_plain_layers(config) | indexer


DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    defaults={
        **latents.DEFAULTS,
        "intermediate_size": 11008,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=read2,
    write=write2,
    layer_names=latents.EXPERTS,
    plain_names=routing.PLAIN_NAMES,
    fields=latents.FIELDS,
    mlps=routing.MLPS,
    read_rope=latents.read_rope,
    # The default width of experts, 1,407, is odd.
    example={"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    defaults={
        **latents.DEFAULTS,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    read=read3,
    write=write3,
    layer_names=latents.EXPERTS,
    plain_names=routing.PLAIN_NAMES,
    fields=latents.FIELDS,
    mlps=routing.MLPS,
    read_rope=latents.read_rope,
    # Layer 61 guesses the token after next; it is no layer of the model.
    buffers=rf"{BUFFERS}|model\.layers\.61\..*",
)
DEEPSEEK_V32 = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    architectures=("DeepseekV32ForCausalLM",),
    defaults={**DEEPSEEK_V3.defaults, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
    read=read32,
    write=write32,
    layer_names=latents.EXPERTS
    | {
        "w_index_q": "self_attn.indexer.wq_b.weight",
        "w_index_k": "self_attn.indexer.wk.weight",
        "index_k_norm": with_bias("self_attn.indexer.k_norm"),
        "w_index_weights": "self_attn.indexer.weights_proj.weight",
    },
)
