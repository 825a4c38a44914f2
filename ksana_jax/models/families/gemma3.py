"""Gemma-3 text models: Gemma-2 with query and key norms instead of soft caps, and separate ropes for sliding and full
layers (arXiv:2503.19786)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.models.families import gemma2
from ksana_jax.models.families.family import Family, one_or_each
from ksana_jax.models.families.fields import Fields
from ksana_jax.models.families.rope import RANGES, read_form, read_rope, rope_fields


def read(fields: Fields) -> dict[str, Any]:
    # transformers ignores it in a Gemma-3 config, but the author of the file expects a cap.
    fields.must_be("attn_logit_softcapping", (), "supported by gemma2")
    return {**gemma2.read(fields), "qk_norm": "head"}


def read_ropes(
    fields: Fields, max_position: int, sliding_theta: str = "rope_local_base_freq"
) -> RopeConfig | tuple[RopeConfig, ...]:
    """Returns the rope of each layer, by its kind.

    Older configs have `rope_theta` and `rope_scaling` for full layers, and a field for the theta of sliding layers,
    which are not scaled; newer ones have both in `rope_parameters`, by kind.
    """
    local, forms = fields.get(sliding_theta), fields.get("rope_parameters")
    if isinstance(forms, Mapping) and forms.keys() & {"full_attention", "sliding_attention"}:
        if fields.get("rope_scaling"):
            fields.problems.append("rope_scaling and rope_parameters disagree; give one of them")
        thetas = {"full_attention": fields.get("rope_theta"), "sliding_attention": local}
        if unknown := sorted(map(str, forms.keys() - thetas.keys())):
            fields.problem("rope_parameters field", ", ".join(unknown), f"supported: {', '.join(thetas)}")
        ropes = {}
        for kind, theta in thetas.items():
            form = forms.get(kind) or {}
            if not isinstance(form, Mapping):
                fields.problem(f"rope_parameters.{kind}", form, "must be an object")
                form = {}
            ropes[kind] = read_form(fields, f"rope_parameters.{kind}", {"rope_theta": theta, **form}, max_position)
    else:
        sliding = RopeConfig(theta=fields.number(sliding_theta, local, *RANGES["rope_theta"]))
        ropes = {"full_attention": read_rope(fields, max_position), "sliding_attention": sliding}
    return one_or_each([ropes[kind] for kind in gemma2.kinds_in_turn(fields) if kind in ropes])


def write_ropes(config: ModelConfig) -> dict[str, Any]:
    """Returns both ropes as config fields, in the older form."""
    ropes = {spec.pattern.window is None: spec.rope for spec in (layer.attention for layer in config.layers)}
    full, sliding = ropes.get(True, RopeConfig(theta=1e6)), ropes.get(False, RopeConfig())
    return {**rope_fields(full), "rope_local_base_freq": sliding.theta}


GEMMA3 = Family(
    model_type="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    defaults=gemma2.DEFAULTS | {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    read=read,
    write=gemma2.write,
    layer_names=gemma2.NAMES,
    activation="hidden_activation",
    mlps={"gelu_pytorch_tanh": "geglu"},
    read_rope=read_ropes,
    write_rope=write_ropes,
)
