"""Shared by all methods of speculative decoding: settings, and the proposer that drafts tokens. NumPy.

A method is a frozen dataclass: its fields are the settings under `speculative_config`. A proposer is the state of one
engine. It sees texts and guesses their next tokens; the engine checks its guesses with one step of the model for all of
them, so a wrong one costs time and never a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.config import EngineConfig
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.kv.layout import KVLayout
from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.step.buckets import Buckets
from ksana_jax.scheduler.step.drafts import Drafts
from ksana_jax.tokenizers import Tokenizer

# Draft tokens of a row in one step.
MAX_DRAFTS = 31
# Unlimited rows.
ANY_ROWS = 2**31


class Texts(NamedTuple):
    """The texts of all rows of an engine, prompt and output; a proposer reads their new tokens.

    token_ids: [R, longest] int32. lengths: [R] tokens of each.
    rows: with their block tables, for proposers that compute on the device.
    """

    token_ids: np.ndarray
    lengths: np.ndarray
    rows: Rows | None = None


class ProposerContext(NamedTuple):
    """The engine that a proposer serves.

    config: complete. layout: of its pool. patterns: of its layers, which may change later, see
      `Proposer.set_patterns`. buckets: of its steps. tokenizer: None without one.
    """

    config: EngineConfig
    vocab_size: int
    layout: KVLayout
    patterns: Sequence[AttentionPattern]
    buckets: Buckets
    tokenizer: Tokenizer | None = None


class Proposer(Protocol):
    """Drafts tokens for the rows of an engine.

    Attributes:
      needs_blocks: True if rows must have the blocks of their draft tokens before these are drafted.
      needs_grammars: True if it never drafts for rows without a grammar, which then need not wait for their tokens.
      drawn_shapes: possible shapes of the first axes of `Drafts.drawn_from`.
    """

    needs_blocks: bool = False
    needs_grammars: bool = False
    drawn_shapes: Sequence[tuple[int, int]] = ()

    def warm_up(self, max_width: int, samples: bool, workers: int) -> None:
        """Compiles all programs for drafts, with `workers` threads.

        Args:
          max_width: of block tables. samples: True if rows will sample.
        """

    def set_patterns(self, patterns: Sequence[AttentionPattern]) -> None:
        """Called when the layers of the target get other patterns, while no text is in a row."""

    def keep_up(self, texts: Texts, rows: np.ndarray) -> None:
        """Called when a step with chunks has computed tokens of rows [n], before these return the blocks that no
        later token of theirs sees. Not called for steps without drafts, see `SpeculativeMethod.most_at`."""

    def begin(self, row: int, token_ids: np.ndarray, num_prompt: int, salt: str) -> None:
        """Called when a text enters a row: a new request, or one that was preempted.

        Args:
          token_ids: [length] the text so far. num_prompt: tokens of its prompt.
          salt: texts of different salts must not learn from each other.
        """
        ...

    def propose(self, texts: Texts, rows: np.ndarray, most: np.ndarray) -> Drafts:
        """Drafts tokens that follow the texts of some rows.

        Args:
          rows: [n] rows. most: [n] maximum draft tokens of each, 0 for none.

        Returns:
          Drafts of at most `most` tokens.
        """
        ...

    def observe(self, rows: np.ndarray, drafts: Drafts) -> None:
        """Called with the tokens that the model sampled after its drafts, for rows [n] with unchanged texts.

        Args:
          drafts: of the rows, perhaps fewer tokens than it has proposed, with `sampled`.
        """

    def end(self, row: int, token_ids: np.ndarray, completed: bool) -> None:
        """Called when a text leaves its row: it has ended, or waits again after a preemption.

        Args:
          token_ids: [length] the whole text. completed: True if it finished, not if it was aborted or preempted.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeMethod:
    """Decides which tokens are drafted, and how many. Base of all methods.

    Attributes:
      rules: allowed values of `acceptance`.
      has_model: True if a model drafts, with a separate pool.
      short_rows: maximum rows of steps whose drafts are often all at most half of the maximum length; such steps
        are compiled too.

    Args:
      num_speculative_tokens: maximum draft tokens of a row in a step.
      acceptance: "sampled" accepts draft tokens that equal the model's samples in their place, so that texts are the
        same as without speculation, whatever the sampling parameters. "rejection" (arXiv:2211.17192) and "block"
        (arXiv:2403.10444) accept more tokens of a draft model; texts have the same distribution as without speculation,
        but differ, except that greedy ones are equal.
      num_speculative_tokens_per_batch_size: entries [from, to, K], both inclusive: steps of that many rows draft at
        most K tokens; others draft num_speculative_tokens. None has no entries.
      adaptive: "goodput" chooses how many tokens are drafted, none if that is fastest, by the tokens per second that
        recent steps of about as many rows yielded with each length. "off" drafts as many as it may, so that steps are
        the same from run to run.
    """

    rules: ClassVar[tuple[str, ...]] = ("sampled", "rejection", "block")
    has_model: ClassVar[bool] = False
    short_rows: ClassVar[int] = ANY_ROWS

    num_speculative_tokens: int
    acceptance: str = "sampled"
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None
    adaptive: Literal["off", "goodput"] = "off"

    def __post_init__(self):
        checks.require(
            checks.integer("speculative_config: num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFTS),
            checks.one_of("speculative_config: acceptance", self.acceptance, self.rules),
            checks.one_of("speculative_config: adaptive", self.adaptive, ("off", "goodput")),
            error=ConfigError,
        )
        object.__setattr__(self, "num_speculative_tokens_per_batch_size", self._ranges())

    def _ranges(self) -> tuple[tuple[int, int, int], ...] | None:
        given: Any = self.num_speculative_tokens_per_batch_size
        if given is None:
            return None
        name, most = "num_speculative_tokens_per_batch_size", self.num_speculative_tokens
        if not isinstance(given, (list, tuple)):
            raise ConfigError(f"speculative_config: {name} is {given!r:.60}, must be a list of [from, to, K]")
        found, last = [], 0
        for entry in given:
            valid = isinstance(entry, (list, tuple)) and len(entry) == 3 and all(map(checks.is_integer, entry))
            if not valid or not last < entry[0] <= entry[1] or not 0 <= entry[2] <= most:
                raise ConfigError(
                    f"speculative_config: {name} has {entry!r:.60}, must be [from, to, K] with K from 0 to {most}, "
                    f"from above {last} and at most to"
                )
            last = entry[1]
            found.append(tuple(entry))
        return tuple(found)

    def most_at(self, num_rows: int) -> int:
        """Returns the maximum draft tokens of a row in a step of num_rows rows."""
        for low, high, most in self.num_speculative_tokens_per_batch_size or ():
            if low <= num_rows <= high:
                return most
        return self.num_speculative_tokens

    @property
    def draft_lengths(self) -> dict[int, int]:
        """Returns the numbers of draft tokens for which steps are compiled, with the maximum rows of each; a draft
        takes the next one."""
        most = {self.num_speculative_tokens, *(k for *_, k in self.num_speculative_tokens_per_batch_size or ())}
        # Trees fill the step that they are given, and have two kinds of steps for each length.
        short = {-(-self.num_speculative_tokens // 2): 0 if self.draws_trees else self.short_rows}
        return {length: rows for length, rows in (short | dict.fromkeys(most, ANY_ROWS)).items() if length and rows}

    @property
    def draws_trees(self) -> bool:
        """True if its drafts may branch, so that steps with trees are compiled."""
        return False

    def proposer(self, context: ProposerContext) -> Proposer:
        """Creates the proposer of an engine."""
        raise NotImplementedError

    def block_bytes(self, config: EngineConfig) -> int:
        """Returns the device bytes that it needs in addition to each block of the target's pool."""
        return 0

    def weights_bytes(self, config: EngineConfig) -> int:
        """Returns the bytes of its weights on the device."""
        return 0
