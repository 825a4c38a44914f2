"""OLMo 3: OLMo 2 with a sliding window in three of four layers, whose rope is not scaled (arXiv:2512.13961)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.models.families import gemma2, gemma3, olmo2
from ksana_jax.models.families.family import Family, sliding_in, write_windows
from ksana_jax.models.families.fields import Fields
from ksana_jax.models.families.rope import rope_fields

THETA = 5e5
PLAIN = RopeConfig(theta=THETA)


def read(fields: Fields) -> dict[str, Any]:
    return olmo2.read_norms(fields) | {"pattern": sliding_in(fields, gemma2.kinds_in_turn(fields))}


def read_ropes(fields: Fields, max_position: int) -> RopeConfig | tuple[RopeConfig, ...]:
    forms = fields.get("rope_parameters")
    if not forms:
        # Versions of transformers differ in whether sliding layers have it too.
        fields.must_be(
            "rope_theta", (THETA,), f"supported: {THETA:g}, or one in rope_parameters for each kind of layer"
        )
    elif not isinstance(forms, Mapping) or not forms.keys() & {"full_attention", "sliding_attention"}:
        fields.problem("rope_parameters", forms, "must have full_attention and sliding_attention")
    return gemma3.read_ropes(fields, max_position, "rope_theta")


def write(config: ModelConfig) -> dict[str, Any]:
    return olmo2.write(config) | write_windows(config)


def write_ropes(config: ModelConfig) -> dict[str, Any]:
    ropes = {spec.pattern.window is None: spec.rope for spec in (layer.attention for layer in config.layers)}
    full, sliding = ropes.get(True, PLAIN), ropes.get(False, PLAIN)
    if full.theta == THETA and sliding == PLAIN:
        return rope_fields(full)
    found = {"full_attention": rope_fields(full), "sliding_attention": rope_fields(sliding)}
    return {
        "rope_parameters": {
            kind: {"rope_theta": form["rope_theta"], **(form["rope_scaling"] or {"rope_type": "default"})}
            for kind, form in found.items()
        }
    }


OLMO3 = Family(
    model_type="olmo3",
    architectures=("Olmo3ForCausalLM",),
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": THETA,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "eos_token_id": 50279,
    },
    read=read,
    write=write,
    layer_names=olmo2.NAMES,
    read_rope=read_ropes,
    write_rope=write_ropes,
)
