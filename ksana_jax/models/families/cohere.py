"""Command R and R7B (Cohere, Cohere 2): attention and MLP of the same normalised hidden states, neighbours rotated,
scaled logits; in Cohere 2, layers with a rope have a window, and each fourth has neither (arXiv:2504.00698)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import NO_ROPE, PLAIN_ROPE, RopeConfig
from ksana_jax.models.families import gemma2
from ksana_jax.models.families.family import Family, one_or_each, refuse_windows, sliding_in, write_windows
from ksana_jax.models.families.fields import Fields
from ksana_jax.models.families.granite import RANGE
from ksana_jax.models.families.rope import read_rope, rope_fields

DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": 255001,
}
NAMED = {"rms_norm_eps": "layer_norm_eps"}


def read_block(fields: Fields) -> dict[str, Any]:
    fields.must_be("use_qk_norm", (False,), "supported: false")
    fields.must_be("rotary_pct", (1.0,), "supported: 1")
    for name in ("use_parallel_block", "use_gated_activation"):
        fields.must_be(name, (True,), "supported: true")
    bias = fields.flag("attention_bias")
    return {
        "norm": "layer_no_bias",
        "norm_placement": "parallel_shared",
        "qkv_bias": bias,
        "out_bias": bias,
        "logit_scale": fields.number("logit_scale", fields.get("logit_scale"), *RANGE),
    }


def read(fields: Fields) -> dict[str, Any]:
    refuse_windows(fields)
    return read_block(fields)


def read2(fields: Fields) -> dict[str, Any]:
    if not fields.problems:  # transformers writes the field and does not read it
        width = fields.get("hidden_size") // fields.get("num_attention_heads")
        fields.must_be("head_dim", (width,), f"supported: {width}, hidden_size / num_attention_heads")
    return read_block(fields) | {"pattern": sliding_in(fields, gemma2.kinds_in_turn(fields))}


def read_ropes(fields: Fields, max_position: int) -> RopeConfig | tuple[RopeConfig, ...]:
    rope = read_rope(fields, max_position)
    return one_or_each([rope if "sliding" in kind else NO_ROPE for kind in gemma2.kinds_in_turn(fields)])


def write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "logit_scale": config.logit_scale}


def write2(config: ModelConfig) -> dict[str, Any]:
    return write(config) | write_windows(config)


def write_ropes(config: ModelConfig) -> dict[str, Any]:
    ropes = [layer.attention.rope for layer in config.layers]
    return rope_fields(next((rope for rope in ropes if rope != NO_ROPE), PLAIN_ROPE))


COHERE = Family(
    model_type="cohere",
    architectures=("CohereForCausalLM",),
    defaults=DEFAULTS | {"rope_theta": 5e5},
    read=read,
    write=write,
    fields=NAMED,
    rotates_neighbours=True,
)
COHERE2 = Family(
    model_type="cohere2",
    architectures=("Cohere2ForCausalLM",),
    defaults=DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4},
    read=read2,
    write=write2,
    fields=NAMED,
    read_rope=read_ropes,
    write_rope=write_ropes,
    rotates_neighbours=True,
)
