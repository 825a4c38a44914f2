"""When rows evict and how many tokens: arithmetic on lengths, for many rows at once. NumPy only."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.patterns import FAR
from ksana_jax.kv.eviction.base import EvictionMethod


@dataclasses.dataclass(frozen=True)
class EvictionSchedule:
    """The evictions of an engine; Gk groups of layers, n rows.

    A group has evicted equally many tokens from all rows of one length and prompt, whatever happened to them.

    Args:
      shares: [Gk] of `EvictionMethod.shares`, for each group; None if the group evicts nothing.
      block_size: B, the default interval.
      heads_apart: KV heads of a layer that are groups of their own; 1 if a group has all heads.
      exact, first: newest tokens that stay because queries may read them exactly, see `Sealing.num_exact`, and first
        ones that must be sinks for that reason.

    Raises:
      ConfigError: the groups would need their next blocks at different tokens, or the budget holds no interval.
    """

    method: EvictionMethod
    shares: tuple[float | None, ...]
    block_size: int
    heads_apart: int = 1
    exact: int = 0
    first: int = 0

    def __post_init__(self):
        m, interval = self.method, self.interval
        if len(self.shares) > 1 and interval % self.block_size:
            raise ConfigError(
                f"kv_eviction: interval is {interval}, must be a multiple of block_size {self.block_size} where layers "
                f"have different budgets or patterns: {len(self.shares)} groups of layers take their blocks together"
            )
        if m.across_layers and len(self.shares) > 1 and not m.measures:
            raise ConfigError(
                f"kv_eviction: layerwise is false, but there are {len(self.shares)} groups of layers: one budget for "
                "all layers needs full attention in all of them"
            )
        if m.sinks < self.first:
            raise ConfigError(f"kv_eviction: sinks is {m.sinks}, but kv_cache_dtype keeps first {self.first} exact")
        if not isinstance(m.budget, float) and m.budget < self.least:
            raise ConfigError(
                f"kv_eviction: a budget of {m.budget} tokens is too small: {m.sinks} sinks and an interval of "
                f"{interval}{f' and {self.exact} exact tokens' if self.exact else ''} need {self.least}"
            )

    @property
    def interval(self) -> int:
        """Tokens that are evicted at a time."""
        return self.method.interval or self.block_size

    @property
    def least(self) -> int:
        """The smallest budget, to which fractions of short prompts are raised: at least one token stays."""
        return self.method.sinks + self.exact + self.interval

    @property
    def counts_prompt(self) -> bool:
        """True if a row's evictions depend on the length of its prompt, not only on its tokens so far."""
        return isinstance(self.method.budget, float) or self.method.prompts != "streamed"

    @functools.cached_property
    def _shares(self) -> np.ndarray:
        return np.array([np.nan if share is None else share for share in self.shares])[:, None]

    def _shared_out(self, base: np.ndarray, num_prompt: np.ndarray) -> np.ndarray:
        """Returns how many tokens of a mean budget, base [n], go to groups by their shares: [n]."""
        m = self.method
        # An eviction leaves up to interval - 1 tokens fewer than the budget; sinks and recent ones are among them.
        always = m.sinks + self.interval - 1 + (0 if isinstance(m.recent, float) else m.recent)
        tokens, most = np.maximum(base - always, 0), max((s for s in self.shares if s is not None), default=1)
        if most > 1 and (m.once or isinstance(m.budget, float)):
            # base + (most - 1) * tokens, the first layer's budget, is at most the prompt.
            tokens = np.minimum(tokens, np.maximum(num_prompt - base, 0) / (most - 1))
        return tokens

    def budgets(self, num_prompt: np.ndarray) -> np.ndarray:
        """Returns the maximum tokens that each group caches of rows with prompts of num_prompt [n] tokens: [Gk, n]; FAR
        for groups that evict nothing. A whole prompt may exceed it until it is complete."""
        budget = self.method.budget
        base = budget * np.asarray(num_prompt) if isinstance(budget, float) else np.full(np.shape(num_prompt), budget)
        tokens = np.rint(base + (self._shares - 1) * self._shared_out(base, num_prompt))
        tokens = np.maximum(tokens, self.least)
        return np.where(np.isnan(tokens), FAR, tokens).astype(np.int32)

    def evictions(self, length: np.ndarray, budgets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns for rows at length [n] how many tokens each group has evicted after an eviction, and the length at
        which it evicts next; [Gk, n] each. budgets: [Gk, n]."""
        evicted = -(-np.maximum(length - budgets, 0) // self.interval) * self.interval
        if self.method.once:
            return evicted, np.full_like(budgets, FAR)
        return evicted, np.minimum(evicted + budgets + 1, FAR)

    def num_evicted(self, length: np.ndarray, num_prompt: np.ndarray) -> np.ndarray:
        """Returns how many tokens each group has evicted of rows that have computed length [n] tokens: [Gk, n]. Hidden
        tokens count too, although their memory is not freed."""
        if self.method.once:
            length = np.where(length < num_prompt, 0, num_prompt)
        elif self.method.prompts == "whole":
            length = np.where(length < num_prompt, 0, length)
        return self.evictions(length, self.budgets(num_prompt))[0]

    def next_at(self, length: np.ndarray, num_prompt: np.ndarray) -> np.ndarray:
        """Returns the length at which each group evicts next from rows that have computed length [n] tokens: [Gk, n];
        FAR if it never does."""
        full = self.num_evicted(length, num_prompt) + self.budgets(num_prompt).astype(np.int64) + 1
        if self.method.prompts == "whole" or self.method.once:
            full = np.maximum(full, num_prompt)
        if self.method.once:
            full = np.where((length < num_prompt) & (full == num_prompt), num_prompt, FAR)
        return np.minimum(full, FAR).astype(np.int32)

    def first_at(self, num_prompt: int) -> int:
        """Returns the length at which a row first evicts; FAR if it never does."""
        return int(self.next_at(np.zeros(1, np.int32), np.array([num_prompt])).min())

    def num_recent(self, budgets: np.ndarray) -> np.ndarray:
        """Returns the minimum number of newest tokens that each group keeps, for budgets [Gk, n]: [Gk, n]."""
        recent = self.method.recent
        found = recent * budgets if isinstance(recent, float) else np.full_like(budgets, recent)
        return np.maximum(np.rint(found), self.exact).astype(np.int32)

    def can_serve(self, num_prompt: int, max_len: int) -> bool:
        """Returns True if the method knows enough of a text to evict from it.

        Args:
          max_len: tokens at which the text ends; the last one is sampled and not computed.
        """
        evicts = self.first_at(num_prompt) < max_len
        return not (self.method.needs_full_text and evicts) or max_len - 1 <= self.method.num_known

    def max_cached(self, group: int, max_tokens: int, num_prompt: int | None = None) -> int:
        """Returns the maximum tokens that a group caches of a row that ends at max_tokens.

        Args:
          num_prompt: of the row; None assumes the worst.
        """
        if self.method.hides:
            return max_tokens
        whole = self.method.prompts == "whole" or self.method.once
        prompt = np.array([max_tokens if num_prompt is None else num_prompt])
        after = int(self.budgets(prompt)[group, 0]) + 1
        if self.method.once:
            after += max_tokens - (0 if num_prompt is None else num_prompt)
        return min(max(after, int(prompt[0]) if whole else 0), max_tokens)
