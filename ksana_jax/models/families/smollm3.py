"""SmolLM3: a Llama without rotary embedding in every fourth layer (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import NO_ROPE, PLAIN_ROPE, RopeConfig
from ksana_jax.models.families import llama
from ksana_jax.models.families.family import Family, one_or_each
from ksana_jax.models.families.fields import MAX_LAYERS, Fields
from ksana_jax.models.families.rope import read_rope, rope_fields


def read(fields: Fields) -> dict[str, Any]:
    fields.must_be("use_sliding_window", (False,), "supported: false")
    return llama.read(fields)


def read_ropes(fields: Fields, max_position: int) -> RopeConfig | tuple[RopeConfig, ...]:
    """Returns the rope of each layer: `no_rope_layers` has 1 for a layer with a rope and 0 for one without; where it
    is absent, every `no_rope_layer_interval`-th layer has none."""
    rope, count = read_rope(fields, max_position), fields.integer("num_hidden_layers", most=MAX_LAYERS)
    every = fields.integer("no_rope_layer_interval")
    rotates = fields.get("no_rope_layers")
    if rotates is None:
        rotates = [int((i + 1) % every != 0) for i in range(count)]
    if not isinstance(rotates, list) or len(rotates) != count or any(value not in (0, 1) for value in rotates):
        fields.problem("no_rope_layers", rotates, f"must list 0 or 1 for each of {count} layers")
        return rope
    return one_or_each([rope if value else NO_ROPE for value in rotates])


def write_ropes(config: ModelConfig) -> dict[str, Any]:
    ropes = [layer.attention.rope for layer in config.layers]
    rope = next((rope for rope in ropes if rope != NO_ROPE), PLAIN_ROPE)
    return {**rope_fields(rope), "no_rope_layers": [int(rope != NO_ROPE) for rope in ropes]}


SMOLLM3 = Family(
    model_type="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    defaults={
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    read=read,
    write=llama.write,
    read_rope=read_ropes,
    write_rope=write_ropes,
)
