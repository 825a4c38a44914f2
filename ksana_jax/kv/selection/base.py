"""The protocol of KV selection: a summary of each block's keys, and scores by which queries choose the blocks that they
read. Knows no pools; NumPy and jax.numpy run the same formulas.

A method with `by_token` has neither: the model's indexer scores single tokens.

Every block of a text stays in the pool. A summary depends only on the block's keys, so it is copied, shared, swapped
and cached with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from ksana_jax.core import checks, refusals
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.patterns import FULL, AttentionPattern

Array: TypeAlias = Any  # NumPy in tests, jax in a compiled program


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionMethod:
    """Decides which blocks each query reads in each kv head. Base of all methods; fields are settings.

    A query always reads the first block of its text, and the newest, whose summary is not complete yet.

    Args:
      budget: tokens that a query reads in a kv head; rounded down to whole blocks, of which it needs two.
      full_layers: first layers in which queries read all blocks.
      prompts: "whole" reads all blocks while a prompt is computed, and selects for generated tokens. "streamed" selects
        for every token of a prompt too, as if it had been generated, so that scoring a text measures the method.
    """

    by_token: ClassVar[bool] = False

    budget: int = 1024
    full_layers: int = 0
    prompts: Literal["whole", "streamed"] = "whole"

    def __post_init__(self):
        name = f"kv_selection {type(self).__name__}"
        checks.require(
            checks.integer(f"{name}: budget", self.budget, 1),
            checks.integer(f"{name}: full_layers", self.full_layers, 0),
            checks.one_of(f"{name}: prompts", self.prompts, ("whole", "streamed")),
            error=ConfigError,
        )

    def summary_shape(self, head_dim: int) -> tuple[int, ...]:
        """Returns the shape of the summary of one block in one kv head, float32."""
        raise NotImplementedError

    def summarise(self, keys: Array, used: Array, xp: Any) -> Array:
        """Returns the summaries [n, K, `summary_shape`] of blocks.

        Args:
          keys: [n, K, B, H], rotated at their sequence positions. used: [n, B], whether a slot holds a key; the others
            may hold anything.
          xp: numpy or jax.numpy.
        """
        raise NotImplementedError

    def scores(self, q: Array, summaries: Array, visible: Array, xp: Any) -> Array:
        """Returns the scores [S, Q, K, P] of blocks; queries read those with the highest.

        Args:
          q: [S, Q, K, G, H] float32, queries of the G heads that share a kv head, rotated and scaled.
          summaries: [S, K, P, `summary_shape`] of the blocks of each row.
          visible: [S, Q, 1, P], blocks that are whole and older than a query's newest; others may have any summary.
          xp: numpy or jax.numpy.
        """
        raise NotImplementedError

    @property
    def weights_queries(self) -> bool:
        """True if some queries select and others do not, as `query_numbers` says."""
        return self.prompts == "whole"

    def query_numbers(self, until_eviction: np.ndarray, num_outputs: np.ndarray) -> np.ndarray:
        """Returns 1 for each query [T] of a step that selects and 0 for others.

        Args:
          num_outputs: [T] tokens generated up to this one; 0 or less in a prompt.
        """
        return (num_outputs > 0).astype(np.float32)

    def num_blocks(self, block_size: int) -> int:
        """Returns the number of blocks that a query reads.

        Raises:
          ConfigError: the budget does not hold two.
        """
        if self.budget < 2 * block_size:
            raise ConfigError(
                f"kv_selection: a budget of {self.budget} tokens is too small: the first and the newest block of "
                f"{block_size} tokens take {2 * block_size}"
            )
        return self.budget // block_size

    def num_tokens(self, block_size: int) -> int:
        """Returns the number of tokens that a query reads of a long text."""
        return self.num_blocks(block_size) * block_size

    def in_layers(self, num_layers: int) -> tuple[SelectionMethod | None, ...]:
        """Returns the method for each layer; None for those that read all blocks.

        Raises:
          ConfigError: all of them do.
        """
        if self.full_layers >= num_layers:
            raise ConfigError(
                f"kv_selection {type(self).__name__}: full_layers is {self.full_layers}, the model has {num_layers} "
                "layers: none would select"
            )
        return (None,) * self.full_layers + (self,) * (num_layers - self.full_layers)


def selecting_layers(method: SelectionMethod, patterns: Sequence[AttentionPattern]) -> tuple[int, ...]:
    """Returns the layers with full attention in which queries select.

    Args:
      patterns: of each layer.

    Raises:
      ConfigError: there is none.
    """
    methods = method.in_layers(len(patterns))
    found = tuple(layer for layer, pattern in enumerate(patterns) if methods[layer] is not None and pattern == FULL)
    refusals.check({"kv_selection": True, refusals.NO_FULL_LAYER: not found})
    return found
