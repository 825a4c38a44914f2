"""The header of a recording, which describes its engine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax

import ksana_jax
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.engine.engine import Engine
from ksana_jax.engine.fingerprint import digest_of_params


def header(engine: Engine, decisions: bool = True) -> dict[str, Any]:
    """Describes an engine: versions, settings, pool, patterns, attention's implementation, and a digest of the model.

    Args:
      decisions: whether they are recorded. A replay needs them; without them the header has no digest.
    """
    config, opaque = {}, []
    for field in dataclasses.fields(engine.config):
        value = getattr(engine.config, field.name)
        try:
            config[field.name] = json.loads(json.dumps(value, default=dataclasses.asdict))
        except TypeError:
            config[field.name] = repr(value)
            opaque.append(field.name)
    implementation = getattr(engine.executor, "implementation", None)
    return {
        **versions(),
        **source_of(engine),
        **architecture(engine.model),
        "device": jax.devices()[0].device_kind,
        "platform": getattr(engine.executor, "platform", None),
        "implementation": None if implementation is None else implementation.name,
        "patterns": plain_patterns(engine.executor.patterns),
        "num_blocks": engine.scheduler.blocks.num_blocks,
        "block_bytes": engine.scheduler.layout.block_bytes,
        "config": config,
        "opaque": opaque,
        "decisions": decisions,
        "digest": digest(engine) if decisions else None,
    }


def versions() -> dict[str, str]:
    """Returns the versions on which decisions and tokens depend."""
    return {"ksana_jax": ksana_jax.__version__, "jax": jax.__version__}


def source_of(engine: Engine) -> dict[str, Any]:
    """Returns the source of the engine's weights."""
    model, load_format = engine.source or (None, None)
    return {"model": model, "load_format": load_format}


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Returns the family and the size of a model."""
    return {"family": model.family, "num_layers": model.num_layers, "d_model": model.d_model}


def digest(engine: Engine) -> str:
    """Returns a digest of the model's config and weights."""
    params = getattr(engine.executor, "params", None)
    weights = "" if params is None else digest_of_params(params)
    return hashlib.sha256(f"{engine.model} {weights}".encode()).hexdigest()[:32]


def plain_patterns(patterns: Sequence[AttentionPattern]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(pattern) for pattern in patterns]
