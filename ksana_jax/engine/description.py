"""An engine's model, pool and settings in one line, for `repr` of an `LLM`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana_jax.core.units import byte_size
from ksana_jax.models.params import num_params

if TYPE_CHECKING:
    from ksana_jax.engine.engine import Engine
    from ksana_jax.runner.runner import Runner


def described(name: object, engine: Engine, runner: Runner, num_requests: int) -> str:
    """Returns the line of an engine whose executor is a runner; name: of its model."""
    model, config, num_blocks = engine.model, engine.config, engine.scheduler.blocks.num_blocks
    stored = "" if config.kv_dtype == config.dtype else f", KV in {config.kv_dtype}"
    pool = byte_size(num_blocks * runner.layout.block_bytes)
    eviction = engine.scheduler.layout.eviction
    evicts = eviction and f", evicted by {type(eviction.method).__name__} to a budget of {eviction.method.budget}"
    parts = (
        f"{name}: {model.family}, {num_params(model):,} weights, {config.dtype}{stored}",
        f"{num_blocks:,} KV blocks of {config.block_size} tokens ({pool})",
        f"max_model_len {config.max_model_len:,}",
        f"attention {' | '.join(dict.fromkeys(map(str, runner.patterns)))}{evicts or ''}",
        f"{num_requests} requests",
    )
    return "; ".join(parts)
