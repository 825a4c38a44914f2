"""Steps with a long chunk of one row and nothing else, `StepShape.alone`, which attends to keys and values expanded
from the row's latents, see `ops.expanded`. No jax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.core.dtypes import DTYPE_BYTES

# Most bytes of a layer's expanded keys and values. Only one layer's exist at a time.
MOST_BYTES = 2**29


class LoneChunks(NamedTuple):
    """Sizes of chunks that expand latents.

    least: tokens. widest: block table for which a layer's keys and values take at most MOST_BYTES.
    """

    least: int
    widest: int

    def hold(self, counts: Sequence[int], width: int) -> bool:
        """True if a step of chunks of some tokens, with block tables of a width, is one of them."""
        return len(counts) == 1 and counts[0] >= self.least and width <= self.widest


def lone_chunks(model: ModelConfig, config: EngineConfig) -> LoneChunks | None:
    """Returns the chunks of an engine that expand latents, or None.

    With `numerics: invariant` none does: a token's bits would depend on its chunk. Methods that evict or select read
    latents.

    Args:
      config: completed by `EngineConfig.for_model`.
    """
    latent = model.latent
    if latent is None or latent.least_expanded is None or config.numerics == "invariant":
        return None
    if latent.indexer or config.kv_eviction or config.kv_selection or config.max_repositioned_sinks:
        return None
    of_token = 2 * model.num_heads // config.tensor_parallel_size * latent.expanded_dim * DTYPE_BYTES[config.dtype]
    return LoneChunks(latent.least_expanded, MOST_BYTES // (of_token * config.block_size))
