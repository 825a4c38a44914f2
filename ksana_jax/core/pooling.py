"""Embeddings as users ask for them and see them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from ksana_jax.core import checks
from ksana_jax.core.request import SamplingParams

if TYPE_CHECKING:
    import numpy as np


@dataclasses.dataclass(frozen=True)
class PoolingParams:
    """Parameters of an embedding.

    Args:
      pooling_type: "LAST" takes the prompt's last token, "MEAN" the mean of all; of hidden states after the final norm.
      use_activation: scale the embedding to length 1.
      dimensions: None, or the model's own number: embeddings are never truncated.
    """

    pooling_type: str = "LAST"
    use_activation: bool = True
    dimensions: int | None = None

    def __post_init__(self):
        checks.require(
            checks.one_of("pooling_type", self.pooling_type, ("LAST", "MEAN")),
            checks.boolean("use_activation", self.use_activation),
            checks.integer("dimensions", self.dimensions, 1, optional=True),
        )

    def check(self, d_model: int) -> None:
        """Checks `dimensions` against a model's.

        Raises:
          ValueError: it is another number.
        """
        if self.dimensions not in (None, d_model):
            raise ValueError(f"dimensions is {self.dimensions:,}, must be {d_model:,} or absent: nothing is truncated")

    def embedding(self, pooled: np.ndarray | None) -> np.ndarray:
        """Returns the embedding [D] float32 of `RequestOutput.pooled`."""
        assert pooled is not None
        length = float((pooled * pooled).sum()) ** 0.5 if self.use_activation else 1.0
        return pooled / (length or 1.0)


# How a prompt is computed for its hidden states alone.
UNSAMPLED = SamplingParams(temperature=0, max_tokens=1, detokenize=False)


class EmbeddingOutput(NamedTuple):
    embedding: list[float]


class EmbeddingRequestOutput(NamedTuple):
    """The output of `LLM.embed` for a prompt: `outputs.embedding` has D numbers."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
