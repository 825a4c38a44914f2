"""All that crosses between host and device in a step. NumPy only; knows neither policies nor kernels.

A step is a ragged batch of packed tokens, without any flag for prefill or decode. It is a list of parts, each of so
many query tiles of one width; the tokens of a tile belong to one row. Tokens that are alone in their row (decode) come
first, in tiles of one token; longer chunks follow in wider tiles. So the parts (3, 1) and (2, 4), when row a computes
six tokens and the last tile is half empty:

    token   0  1  2   3 .. 6        7 .. 10
    tile    0  1  2   3             4
    row     b  c  d   a, a, a, a    a, a, -, -

The S = 5 tiles have a block table each. Kernels get tiles of equal work; a reference needs no more than reshapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from ksana_jax.kv.moves import Moves
from ksana_jax.patterns import AttentionPattern


@dataclasses.dataclass
class ScheduledBatch:
    """What a step computes: one token of each row in `decodes`, `counts` tokens of each row in `chunks`.

    Attributes:
      decodes: [D] rows with one token to compute: the newest of their text, or what a cached prefix leaves of a prompt.
      chunks, counts: [chunks] rows and their numbers of tokens, more than one each.
      samples: [D + chunks] whether the step computes the last token of the row, so that its next one is sampled;
        None where it does of all.
    """

    decodes: np.ndarray
    chunks: np.ndarray
    counts: np.ndarray
    samples: np.ndarray | None = None

    @property
    def rows(self) -> np.ndarray:
        """Decodes, then chunks."""
        return np.concatenate([self.decodes, self.chunks]) if len(self.chunks) else self.decodes

    @property
    def num_per_row(self) -> np.ndarray:
        """Tokens computed of each of `rows`."""
        ones = np.ones(len(self.decodes), np.int32)
        return np.concatenate([ones, self.counts]) if len(self.chunks) else ones

    @functools.cached_property
    def sampled(self) -> np.ndarray:
        """Those of `rows` whose next token is sampled."""
        return self.rows if self.samples is None else self.rows[self.samples]

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + int(self.counts.sum())


class Part(NamedTuple):
    """`count` query tiles of `width` tokens each."""

    count: int
    width: int


def most_tiles(max_num_batched_tokens: int, query_tile: int) -> tuple[Part, ...]:
    """Most tiles of a step for longer chunks, in tiles of one width: as many as its tokens fill, the widest first.

    Short chunks would leave most of a tile of query_tile tokens empty, so there are tiles of a quarter of it, too.
    """
    widths = (query_tile, query_tile // 4) if query_tile >= 8 else (query_tile,)
    return tuple(Part(-(-max_num_batched_tokens // width), width) for width in widths)


class StepShape(NamedTuple):
    """What a compiled step is specialised on.

    parts: tiles of one token come first. table_width: P, entries of a block table. max_sampled: J, most tokens whose
    logits are wanted. shared_rows: tiles of the first part, of one token each, in a group that may share leading
    blocks; 0 where none do.
    """

    parts: tuple[Part, ...]
    table_width: int
    max_sampled: int
    shared_rows: int = 0

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return sum(count * width for count, width in self.parts)

    @property
    def num_tiles(self) -> int:
        """S, those of one token included."""
        return sum(part.count for part in self.parts)

    @property
    def num_groups(self) -> int:
        """C, groups of single tokens that may share leading blocks."""
        return -(-self.parts[0].count // self.shared_rows) if self.shared_rows else 0

    def places(self) -> Iterator[tuple[Part, slice, slice]]:
        """Each part with its place among the T tokens and among the S tiles."""
        token = tile = 0
        for part in self.parts:
            tokens, tiles = part.count * part.width, part.count
            yield part, slice(token, token + tokens), slice(tile, tile + tiles)
            token, tile = token + tokens, tile + tiles


# NumPy on the host, jax inside a compiled step.
Array: TypeAlias = Any


class StepArrays(NamedTuple):
    """A step as padded int32 arrays; see `StepShape` for T, S, P, J and C.

    tokens: [T] ids; within an executor whose embedding rests on the host, their rows of it [T, D].
    positions: [T] text positions, at which queries and keys are rotated; -1 where padded.
    cache_positions: [Gk, T] positions in the cache of each group of layers, at which patterns and masks see the tokens:
      text positions less `Rows.num_evicted`. -1 where padded.
    slots: [Gk, T] where the token's keys and values of each group of layers go: block * B + offset; M*B where padded.
    block_tables: [Gk, S, P] blocks of each group that the tile's row can see, by rising position; any valid id where
      absent.
    block_starts: [Gk, S, P] cache position of each block's first slot; FAR where absent.
    sampled: [J] indices in [0, T) of the tokens whose logits are wanted; 0 where padded.
    shared_tables, shared_starts: [Gk, C, P] blocks that all of tokens g * shared_rows and following see, in addition to
      their own tables and before them in the text; None where shape.shared_rows is 0. Attention over them runs once for
      the group. They hold no repositioned sinks.
    """

    tokens: Array
    positions: Array
    cache_positions: Array
    slots: Array
    block_tables: Array
    block_starts: Array
    sampled: Array
    shared_tables: Array | None = None
    shared_starts: Array | None = None

    def of_group(self, group: int) -> StepArrays:
        """What attention in the layers of one group sees: without the axis Gk."""
        found = self._replace(
            cache_positions=self.cache_positions[group],
            slots=self.slots[group],
            block_tables=self.block_tables[group],
            block_starts=self.block_starts[group],
        )
        if self.shared_tables is None or self.shared_starts is None:
            return found
        return found._replace(shared_tables=self.shared_tables[group], shared_starts=self.shared_starts[group])


class SamplingArrays(NamedTuple):
    """Settings [n] of the first n sampled tokens; see `request.SamplingParams`. Padding has defaults.

    seeds: [n, 2] uint32, high and low word. num_outputs: [n] tokens already generated: the random stream's position.
    counts: [n, V] int32 times each token was generated, or None when no row has penalties or biases.
    in_prompt: [n, V] bool, or None likewise. bias: [n, V] float32 added to the logits, or None likewise.
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

    num_sampled: how many of the J sampled tokens count, from a bucket; 0 wants no logits.
    sampling: settings of num_sampled tokens; None means that all are greedy.
    num_logprobs: top tokens to report for sampled tokens; None for no log-probabilities.
    targets: [T] the token that follows each packed token in its prompt, -1 where none; None scores no prompt.
    num_prompt_logprobs: top tokens to report for scored prompt tokens.
    moves: None where no block is copied.
    """

    shape: StepShape
    arrays: StepArrays
    num_sampled: int
    sampling: SamplingArrays | None = None
    num_logprobs: int | None = None
    targets: np.ndarray | None = None
    num_prompt_logprobs: int = 0
    moves: Moves | None = None


@dataclasses.dataclass
class StepOutput:
    """What an executor returns: the tokens [num_sampled] that follow the sampled ones, and the scores asked for.

    A token is -1 where the scores are not finite, so that none can be chosen.

    move_s: seconds that the step's moves took, where they were waited for; 0 where that is not known.
    """

    tokens: np.ndarray
    scores: TokenScores | None = None
    prompt_scores: TokenScores | None = None
    move_s: float = 0.0

    def result(self) -> StepOutput:
        """Returns itself: an executor that computes a step at once has nothing pending."""
        return self


class Pending(Protocol):
    """A step that was submitted."""

    def result(self) -> StepOutput:
        """Waits until the step is computed; called once, and in the order in which steps were submitted."""
        ...


class Executor(Protocol):
    """Runs steps: the compiled model, a simulator, or a test's fake. After an exception only `reset` may be called."""

    @property
    def patterns(self) -> Seq[AttentionPattern]:
        """What each layer attends to."""
        ...

    @property
    def host_blocks(self) -> np.ndarray | None:
        """The host's blocks [slots, ...], which `Moves` name; None without host memory."""
        ...

    def submit(self, step: StepInput) -> Pending:
        """Starts to make the step's moves and then to compute it; may return before either is done."""
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

    def reset(self) -> None:
        """Reallocates the pool, which a failed step may have consumed, and the host's blocks: reads from disk that are
        under way still write to the old ones."""
        ...
