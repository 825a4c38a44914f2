"""The table of model families and their features, for `ksana list models --markdown` and docs/reference/models.md."""

from __future__ import annotations

from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.patterns import per_layer
from ksana_jax.loading.gguf_config import ARCHITECTURES, SHARED
from ksana_jax.models.families import FAMILIES, config_from_hf
from ksana_jax.models.families.family import Family
from ksana_jax.models.layers import norm_kind
from ksana_jax.models.mlp import unstated
from ksana_jax.ops.norm import native_kinds

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
# norms: placement and kind, and whether layers have windows. invariant: `numerics`.
COLUMNS = ("family", "positions", "norms", "MLP", "invariant", "GGUF")


def example(family: Family) -> ModelConfig:
    """Returns a small model of a family, with the family's defaults."""
    named = {family.fields.get(name, name): value for name, value in SIZES.items()}
    values: dict[str, Any] = {name: value for name, value in named.items() if name is not None}
    return config_from_hf({"model_type": family.model_type, **family.example, **values}, family.model_type)


def row(family: Family) -> tuple[str, ...]:
    """Returns the cells of a family, in the order of COLUMNS."""
    config = example(family)
    norm, windows = norm_kind(config.norm), {pattern.window for pattern in per_layer(config.pattern, config.num_layers)}
    row_by_row = (norm.row_by_row or config.norm in native_kinds()) and not unstated(config, "row_by_row")
    own = {model_type: name for name, model_type in ARCHITECTURES.items()}
    return (
        f"`{family.model_type}`",
        _positions(config),
        ", ".join([config.norm_placement, config.norm, *["windows"] * (windows != {None})]),
        config.mlp,
        "yes" if row_by_row and config.alibi is None and not _indexes(config) else "no",
        f"`{gguf}`" if (gguf := (own | SHARED).get(family.model_type)) else "no",
    )


def _indexes(config: ModelConfig) -> bool:
    return config.latent is not None and config.latent.indexer is not None


def _positions(config: ModelConfig) -> str:
    ropes = [layer.attention.rope for layer in config.layers]
    kinds = ["ALiBi"] * (config.alibi is not None) + ["table"] * (config.position_offset is not None)
    if rotated := [rope for rope in ropes if rope.kind != "none"]:
        part = rotated[0].partial_rotary_factor
        kinds.append("rope" if part == 1 or config.latent is not None else f"rope of {part:g} of a head")
        kinds += ["none in some layers"] * (len(rotated) < len(ropes))
    kinds += ["latents"] * (config.latent is not None) + ["indexer"] * _indexes(config)
    return ", ".join(kinds + ["recurrent layers"] * (config.recurrent is not None))


def table() -> str:
    """Returns the table as Markdown."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(row, FAMILIES.values())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
