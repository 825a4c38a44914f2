"""Steps with a long chunk of one row, which attends to keys and values expanded from its latents. No jax."""

from __future__ import annotations

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.core.dtypes import DTYPE_BYTES

# Most bytes of a layer's expanded keys and values. Only one layer's exist at a time.
MOST_BYTES = 2**29


def lone_chunks(model: ModelConfig, config: EngineConfig) -> tuple[int, int] | None:
    """Returns the least tokens of a chunk that expands latents, and the largest width of its block table for which
    expanded keys and values take at most MOST_BYTES; None if no step expands them.

    Chunks next to decodes or to other chunks do not. With `numerics: invariant` none does: a token's bits would depend
    on its chunk. Methods that evict or select read latents.

    Args:
      config: completed by `EngineConfig.for_model`.
    """
    latent = model.latent
    reads_latents = config.kv_eviction or config.kv_selection or config.max_repositioned_sinks
    if latent is None or latent.least_expanded is None or reads_latents or config.numerics == "invariant":
        return None
    of_token = 2 * model.num_heads // config.tensor_parallel_size * latent.expanded_dim * DTYPE_BYTES[config.dtype]
    return latent.least_expanded, MOST_BYTES // (of_token * config.block_size)
