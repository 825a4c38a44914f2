"""Reads and writes rotary embedding settings of Hugging Face configs, in their older and newer forms.

Older: `rope_theta` next to `rope_scaling: {"type" or "rope_type": ...}`. Newer: all of it in `rope_parameters`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import NO_ROPE, RopeConfig
from ksana_jax.models.families.fields import Fields

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# Far beyond any model's values, yet small enough to multiply with positions and vectors in float32.
RANGES = {
    "rope_theta": (1, 1e15),
    "factor": (1e-3, 1e6),
    "long_factor": (1e-3, 1e6),
    "short_factor": (1e-3, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "attention_factor": (1e-3, 1e3),
    "mscale": (1e-3, 1e3),
    "mscale_all_dim": (1e-3, 1e3),
    "partial_rotary_factor": (1e-3, 1),
}
KNOWN = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "long_factor",
    "short_factor",
    "partial_rotary_factor",
    "mrope_section",  # of images: a text has the same position in each section
    "mrope_interleaved",
    "finetuned",  # only states that the scaled model was trained further
}


def read_rope(fields: Fields, max_position: int) -> RopeConfig:
    """Reads the rope of a config.

    Args:
      max_position: the config's max_position_embeddings, in tokens.
    """
    forms = {name: fields.get(name) for name in ("rope_scaling", "rope_parameters") if fields.get(name)}
    for name, form in forms.items():
        if not isinstance(form, Mapping):
            fields.problem(name, form, "must be an object")
            return RopeConfig()
    if not forms:
        return read_form(fields, "rope_parameters", {}, max_position)
    ropes = [read_form(fields, name, form, max_position) for name, form in forms.items()]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        fields.problems.append("rope_scaling and rope_parameters disagree; give one of them")
    return ropes[0]


def read_form(fields: Fields, where: str, form: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Reads one rope from the entries of `form` and the fields next to it. where: the form's name in the config."""

    def number(name: str) -> float:
        return fields.number(f"{where}.{name}", form.get(name), *RANGES[name])

    unknown = sorted(name for name in form if name not in KNOWN and form[name] is not None)
    if unknown:
        fields.problem(f"{where} field", ", ".join(map(str, unknown)), f"supported: {', '.join(sorted(KNOWN))}")
        return RopeConfig()
    theta = _read_theta(fields, where, form)
    partial = _read_partial(fields, where, form)

    # "su" is LongRoPE's name in the first Phi-3 configs.
    named = ["longrope" if form[name] == "su" else form[name] for name in ("rope_type", "type") if name in form]
    kind = next(iter(named), "default")
    if kind not in KINDS:
        fields.problem(f"{where} type", kind, f"supported: {', '.join(KINDS)}")
        return RopeConfig()
    if named[1:] and named[1] != kind:
        fields.problem(f"{where}.type", form["type"], f"rope_type says {kind!r}; give one of them")
    if kind == "default":
        return RopeConfig(theta=theta, partial_rotary_factor=partial)
    if kind == "linear":
        return RopeConfig("linear", theta, number("factor"), partial_rotary_factor=partial)
    if kind == "dynamic":
        # transformers scales from max_position_embeddings on, and ignores original_max_position_embeddings.
        return RopeConfig("dynamic", theta, number("factor"), max_position, partial_rotary_factor=partial)

    original = fields.get("original_max_position_embeddings")
    if original is None:
        original = form.get("original_max_position_embeddings", max_position)
    if problem := checks.integer(f"{where}.original_max_position_embeddings", original):
        fields.problems.append(problem)
        original = max_position
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if not low < high:
            fields.problem(f"{where}.high_freq_factor", high, f"must exceed low_freq_factor {low}")
        scaled = RopeConfig("llama3", theta, number("factor"), original, low_freq_factor=low, high_freq_factor=high)
        return dataclasses.replace(scaled, partial_rotary_factor=partial)
    if kind == "longrope":
        scaled = _read_longrope(fields, where, form, theta, original, max_position)
        return dataclasses.replace(scaled, partial_rotary_factor=partial)
    yarn = _read_yarn(fields, where, form, theta, original, max_position)
    return dataclasses.replace(yarn, partial_rotary_factor=partial)


def _read_partial(fields: Fields, where: str, form: Mapping[str, Any]) -> float:
    """Reads the rotated fraction of a head; families without a default for it rotate whole heads."""
    name = f"{where}.partial_rotary_factor"
    value = form.get("partial_rotary_factor")
    if value is None:
        name, value = "partial_rotary_factor", fields.get("partial_rotary_factor")
    if "partial_rotary_factor" in fields.defaults:
        return fields.number(name, value, *RANGES["partial_rotary_factor"])
    if value not in (None, 1):
        fields.problem(name, value, "supported: 1.0")
    return 1.0


def _read_theta(fields: Fields, where: str, form: Mapping[str, Any]) -> float:
    if form.get("rope_theta") is not None:
        return fields.number(f"{where}.rope_theta", form["rope_theta"], *RANGES["rope_theta"])
    given = fields.get("rope_theta")
    if given is None and "rope_theta" not in fields.values:
        return 10_000.0
    return fields.number("rope_theta", given, *RANGES["rope_theta"])


def _read_longrope(
    fields: Fields, where: str, form: Mapping[str, Any], theta: float, original: int, max_position: int
) -> RopeConfig:
    def divisors(name: str) -> tuple[float, ...]:
        values = form.get(name)
        if not isinstance(values, list) or any(checks.number(name, value, *RANGES[name]) for value in values):
            fields.problem(f"{where}.{name}", values, "must be a list of numbers from 0.001 to 1e+06")
            return ()
        return tuple(map(float, values))

    factor, scale = form.get("factor"), form.get("attention_factor")
    if original == 1:
        fields.problem("original_max_position_embeddings", original, "longrope needs more than 1")
    return RopeConfig(
        "longrope",
        theta,
        max_position / original if factor is None else fields.number(f"{where}.factor", factor, *RANGES["factor"]),
        original,
        attention_factor=None
        if scale is None
        else fields.number(f"{where}.attention_factor", scale, *RANGES["attention_factor"]),
        factors=divisors("long_factor"),
        short_factors=divisors("short_factor"),
    )


def _read_yarn(
    fields: Fields, where: str, form: Mapping[str, Any], theta: float, original: int, max_position: int
) -> RopeConfig:
    def number(name: str) -> float:
        return fields.number(f"{where}.{name}", form.get(name), *RANGES[name])

    def optional(name: str) -> float | None:
        return number(name) if form.get(name) else None  # transformers treats 0 as "not given" here

    truncate = form.get("truncate", True)
    if not isinstance(truncate, bool):
        fields.problem(f"{where}.truncate", truncate, "must be true or false")
    if theta == 1:
        fields.problem("rope_theta", theta, "yarn needs a base other than 1")
    if "factor" in form and form["factor"] is None:
        factor = max_position / original
    else:
        factor = number("factor")
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=optional("beta_fast") or 32.0,
        beta_slow=optional("beta_slow") or 1.0,
        attention_factor=None if form.get("attention_factor") is None else number("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=truncate is True,
    )


def read_no_rope(fields: Fields, max_position: int) -> RopeConfig:
    """Returns the rope of families that have none."""
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        fields.must_be(name, (), "supported: none")
    return NO_ROPE


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Returns the first layer's rope as config fields, in the older form, which every version of transformers reads."""
    return rope_fields(config.layers[0].attention.rope)


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """Returns a rope as config fields, in the older form."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    extra: dict[str, Any] = {}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_len
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(rope, name) is not None:
                scaling[name] = getattr(rope, name)
    if rope.kind == "longrope":
        scaling |= {"long_factor": list(rope.factors), "short_factor": list(rope.short_factors)}
        if rope.attention_factor is not None:
            scaling["attention_factor"] = rope.attention_factor
        extra["original_max_position_embeddings"] = rope.original_max_len
    return {"rope_theta": rope.theta, "rope_scaling": scaling, **extra}
