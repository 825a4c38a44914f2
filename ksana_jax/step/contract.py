"""All that crosses between host and device in a step. NumPy only; knows neither policies nor kernels.

A step is a ragged batch of packed tokens, without any flag for prefill or decode. Tokens that are alone in their row
(decode) come first, one each; longer chunks follow in query tiles of Q tokens that belong to one row. So with D singles
and two tiles of Q = 4, of which the second is half empty:

    token   0 .. D-1      D .. D+3        D+4 .. D+7
    tile    0 .. D-1      D               D+1
    row     one each      a, a, a, a      a, a, -, -

and S = D + 2 tiles share S block tables. Kernels get tiles of equal work; a reference needs no more than reshapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from ksana_jax.kv.moves import Moves
from ksana_jax.patterns import AttentionPattern


@dataclasses.dataclass
class ScheduledBatch:
    """What a step computes: one token of each row in `singles`, `counts` tokens of each row in `chunks`.

    Attributes:
      singles: [D] rows.
      chunks, counts: [chunks] rows and their numbers of tokens, more than one each.
    """

    singles: np.ndarray
    chunks: np.ndarray
    counts: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """Singles, then chunks."""
        return np.concatenate([self.singles, self.chunks]) if len(self.chunks) else self.singles

    @property
    def num_per_row(self) -> np.ndarray:
        """Tokens computed of each of `rows`."""
        ones = np.ones(len(self.singles), np.int32)
        return np.concatenate([ones, self.counts]) if len(self.chunks) else ones

    @property
    def num_tokens(self) -> int:
        return len(self.singles) + int(self.counts.sum())


class StepShape(NamedTuple):
    """What a compiled step is specialised on: D singles, tiles of Q tokens, width P of the block tables.

    shared_rows: singles of a group that may share leading blocks; 0 where none do.
    """

    num_singles: int
    num_tiles: int
    query_tile: int
    table_width: int
    shared_rows: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_singles + self.num_tiles * self.query_tile

    @property
    def num_groups(self) -> int:
        """C, groups of singles that may share leading blocks."""
        return -(-self.num_singles // self.shared_rows) if self.shared_rows else 0


# NumPy on the host, jax inside a compiled step.
Array: TypeAlias = Any


class StepArrays(NamedTuple):
    """A step as padded int32 arrays; T = D + tiles * Q, S = D + tiles.

    tokens: [T] ids; within an executor whose embedding rests on the host, their rows of it [T, D].
    positions: [T] text positions, -1 where padded.
    slots: [T] where the token's keys and values go: block * B + offset; M*B where padded.
    block_tables: [S, P] blocks that the tile's row can see, by rising text position; any valid id where absent.
    block_starts: [S, P] text position of each block's first slot; FAR where absent.
    last: [S] index in [0, T) of the tile's last token.
    shared_tables, shared_starts: [C, P] blocks that all of singles g * shared_rows and following see, in addition to
      their own tables and before them in the text; None where shape.shared_rows is 0. Attention over them runs once for
      the group. They hold no sinks that are seen from elsewhere.
    """

    tokens: Array
    positions: Array
    slots: Array
    block_tables: Array
    block_starts: Array
    last: Array
    shared_tables: Array | None = None
    shared_starts: Array | None = None


class SamplingArrays(NamedTuple):
    """Per-tile sampling settings [S]; see `request.SamplingParams`. Tiles that do not sample hold defaults.

    seeds: [S, 2] uint32, high and low word. num_outputs: [S] tokens already generated: the random stream's position.
    counts: [S, V] int32 times each token was generated, or None when no row has penalties or biases.
    in_prompt: [S, V] bool, or None likewise. bias: [S, V] float32 added to the logits, or None likewise.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seeds: Array
    num_outputs: Array
    repetition_penalty: Array
    presence_penalty: Array
    frequency_penalty: Array
    counts: Array | None = None
    in_prompt: Array | None = None
    bias: Array | None = None


class TokenScores(NamedTuple):
    """Log-probabilities of given tokens and of the most probable ones; leading axis as the tokens'.

    logprob, rank: of the given token (rank 1 is the most probable). top_ids, top_logprobs: [..., k].
    """

    logprob: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclasses.dataclass
class StepInput:
    """What an executor gets.

    sampling: None means that all rows are greedy.
    num_logprobs: top tokens to report for sampled tokens; None for no log-probabilities.
    targets: [T] the token that follows each packed token in its prompt, -1 where none; None scores no prompt.
    num_prompt_logprobs: top tokens to report for scored prompt tokens.
    moves: None where no block is copied.
    """

    shape: StepShape
    arrays: StepArrays
    sampling: SamplingArrays | None = None
    num_logprobs: int | None = None
    targets: np.ndarray | None = None
    num_prompt_logprobs: int = 0
    moves: Moves | None = None


@dataclasses.dataclass
class StepOutput:
    """What an executor returns: tokens [S] sampled after each tile's last token, and the scores asked for.

    A token is -1 where the scores are not finite, so that none can be chosen.

    move_s: seconds that the step's moves took, where they were waited for; 0 where that is not known.
    """

    tokens: np.ndarray
    scores: TokenScores | None = None
    prompt_scores: TokenScores | None = None
    move_s: float = 0.0


class Executor(Protocol):
    """Runs steps: the compiled model, a simulator, or a test's fake. After an exception only `reset` may be called."""

    @property
    def patterns(self) -> Seq[AttentionPattern]:
        """What each layer attends to."""
        ...

    def execute(self, step: StepInput) -> StepOutput:
        """Makes the step's moves, then computes it."""
        ...

    def move(self, moves: Moves) -> None:
        """Makes moves outside a step."""
        ...

    def set_patterns(self, patterns: Seq[AttentionPattern]) -> None:
        """Changes what each layer attends to.

        Raises:
          ValueError: it cannot serve these patterns; nothing is changed.
        """
        ...

    def reset(self) -> np.ndarray | None:
        """Reallocates the pool, which a failed step may have consumed, and the host's blocks.

        Returns:
          The new blocks of the host; reads from disk that are under way still write to the old ones.
        """
        ...
