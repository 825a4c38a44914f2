"""A step between scheduler and executor. NumPy only; knows neither policies nor kernels.

A step is a ragged batch of packed tokens, without a flag for prefill or decode. It is a list of parts, each a number of
query tiles of one width; the tokens of a tile belong to one row. Rows that compute one token (decodes) come first, in
tiles of one token; longer chunks follow in wider tiles. For example, parts (3, 1) and (2, 4), where row a computes six
tokens and the last tile is half empty:

    token   0  1  2   3 .. 6        7 .. 10
    tile    0  1  2   3             4
    row     b  c  d   a, a, a, a    a, a, -, -

Each of the S = 5 tiles has a block table. Kernels get tiles of equal work; a reference needs only reshapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ksana_jax.kv.moves import Moves
from ksana_jax.scheduler.step.drafts import Drafts
from ksana_jax.scheduler.step.settings import SamplingArrays

# Rows are np.intp throughout: NumPy copies index arrays of any other type, which takes longer than using them.
NO_ROWS = np.zeros(0, np.intp)
NO_TOKENS = np.zeros(0, np.int32)


class NewBlocks(NamedTuple):
    """Blocks that rows have taken, at most one in each group of layers: flat arrays [Gk * rows], group by group.

    of_group: group * R + row. entries: their places in the block tables. ids, starts: the new values.
    """

    of_group: np.ndarray
    entries: np.ndarray
    ids: np.ndarray
    starts: np.ndarray


@dataclasses.dataclass(eq=False)
class ScheduledBatch:
    """Rows and tokens of a step: one token of each row in `decodes`, `counts` tokens of each row in `chunks`.

    With drafts, a step has no chunks, and computes the draft tokens of each row after its newest one.

    Attributes:
      decodes: [D] rows with one token to compute: the newest token, or the last of a prompt with a cached prefix.
      chunks, counts: [chunks] rows and their numbers of tokens, more than one each.
      samples: [D + chunks] True if the step computes the row's last token, so that its next one is sampled; None: all.
      new: blocks that decodes have taken; None if they took none, or otherwise than at the end of their tables.
      gone: rows that their sequences have left since the step was scheduled. Results for these rows are ignored, and
        other sequences may have taken them.
      advanced: True once the scheduler has recorded how much it computes.
      admitted: rows that sequences have entered with this step.
      drafts: tokens that may follow those in `decodes`; None without any.

    Set by `Scheduler.settle`:
      settled, new_tokens: rows that got tokens, and each row's token; with drafts [n, w], the first num_new of them.
      num_new: number of each row's new tokens; None where it is 1.
      beams: rows that have computed all their tokens and whose request chooses the next one.
      live_blocks: blocks in use once no query needs more, before ended sequences released theirs.
    """

    decodes: np.ndarray
    chunks: np.ndarray
    counts: np.ndarray
    samples: np.ndarray | None = None
    new: NewBlocks | None = None
    gone: set[int] = dataclasses.field(default_factory=set)
    advanced: bool = False
    admitted: Seq[int] = ()
    drafts: Drafts | None = None
    settled: np.ndarray = dataclasses.field(init=False)
    new_tokens: np.ndarray = dataclasses.field(init=False)
    num_new: np.ndarray | None = dataclasses.field(init=False)
    beams: np.ndarray = dataclasses.field(init=False)
    live_blocks: int = dataclasses.field(init=False)

    def stay(self, rows: np.ndarray) -> np.ndarray:
        """Returns whether each of some rows of the step still holds the sequence that it was scheduled for."""
        return ~np.isin(rows, list(self.gone)) if self.gone else np.ones(len(rows), bool)

    @property
    def rows(self) -> np.ndarray:
        """Rows of the step: decodes, then chunks."""
        return np.concatenate([self.decodes, self.chunks]) if len(self.chunks) else self.decodes

    @property
    def num_per_row(self) -> np.ndarray:
        """Number of tokens computed in each of `rows`."""
        ones = np.ones(len(self.decodes), np.int32)
        if self.drafts is not None:
            return ones + self.drafts.counts
        return np.concatenate([ones, self.counts]) if len(self.chunks) else ones

    @property
    def sampled(self) -> np.ndarray:
        """The entries of `rows` whose next token is sampled."""
        return self.rows if self.samples is None else self.rows[self.samples]

    @property
    def num_tokens(self) -> int:
        more = 0 if self.drafts is None else int(self.drafts.counts.sum())
        return len(self.decodes) + more + (int(self.counts.sum()) if len(self.chunks) else 0)

    @property
    def num_new_tokens(self) -> int:
        """Number of new tokens of all rows."""
        return len(self.new_tokens) if self.num_new is None else int(self.num_new.sum())

    def new_tokens_of(self, nth: int) -> list[int]:
        """Returns the new tokens of the row at an index of `settled`."""
        if self.num_new is None:
            return [int(self.new_tokens[nth])]
        return self.new_tokens[nth, : self.num_new[nth]].tolist()


class TileGroup(NamedTuple):
    """`count` query tiles of `width` tokens each."""

    count: int
    width: int

    @property
    def num_texts(self) -> int:
        """The most texts in them, see `per_token.StateArrays`: a snapshot may cut the text of a wide tile in two."""
        return self.count * (1 + (self.width > 1))


class StepShape(NamedTuple):
    """The sizes for which a step is compiled.

    parts: tiles of one token come first. table_width: P, entries of a block table. max_sampled: J, most tokens whose
    logits are computed. shared_rows: one-token tiles in a group that may share leading blocks; 0 if none do. tree: a
    tile's tokens are nodes of a tree, see `StepArrays.ancestors`. steered: S of `Steered`. alone: see `lone_chunks`.
    """

    parts: tuple[TileGroup, ...]
    table_width: int
    max_sampled: int
    shared_rows: int = 0
    tree: bool = False
    steered: int = 0
    alone: bool = False

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens including padding."""
        return sum(count * width for count, width in self.parts)

    @property
    def num_tiles(self) -> int:
        """S, the number of tiles, one-token tiles included."""
        return sum(part.count for part in self.parts)

    @property
    def num_texts(self) -> int:
        """R of `per_token.StateArrays`."""
        return sum(part.num_texts for part in self.parts)

    @property
    def num_groups(self) -> int:
        """C, the number of groups of one-token tiles that may share leading blocks."""
        return -(-self.parts[0].count // self.shared_rows) if self.shared_rows else 0

    def most_full(self, block_size: int) -> int:
        """Returns the maximum blocks of one group of layers that a step can fill."""
        # A chunk of c tokens fills at most ceil(c / B) blocks, and a tile of w tokens has room for ceil(w / B) of them.
        return sum(part.count * -(-part.width // block_size) for part in self.parts)

    def places(self) -> Iterator[tuple[TileGroup, slice, slice]]:
        """Yields each part with its slices of the T tokens and of the S tiles."""
        token = tile = 0
        for part in self.parts:
            tokens, tiles = part.count * part.width, part.count
            yield part, slice(token, token + tokens), slice(tile, tile + tiles)
            token, tile = token + tokens, tile + tiles


# NumPy on the host, jax inside a compiled step.
Array: TypeAlias = Any


class StepArrays(NamedTuple):
    """A step as padded int32 arrays; see `StepShape` for T, S, P, J and C.

    tokens: [T] ids; -1 - i is the i-th token that the previously submitted step samples, see
      `fed`. In an executor with the embedding on the host, their embedding rows [T, D].
    positions: [T] sequence positions, at which queries and keys are rotated; -1 for padding.
    cache_positions: [Gk, T] positions in the cache of each group of layers, which patterns and masks compare:
      sequence positions minus `Rows.num_evicted`. -1 for padding.
    slots: [Gk, T] slots for the token's keys and values in each group of layers: block * B + offset; M*B for padding.
    block_tables: [Gk, S, P] blocks of each group that the tile's row attends to, by position; any valid id if absent.
      When the next step is built, tables of decodes may gain blocks that begin after all tokens of this one.
    block_starts: [Gk, S, P] cache position of each block's first slot; FAR if absent.
    sampled: [J] indices in [0, T) of the tokens whose logits are computed; 0 for padding.
    shared_tables, shared_starts: [Gk, C, P] blocks that all tokens of a group attend to, in addition to their own
      tables and before them in the sequence; group g is tokens g * shared_rows to (g + 1) * shared_rows - 1. None if
      shape.shared_rows is 0. Attention over them runs once for the group. They hold no repositioned sinks.
    query_numbers: [Gk, T] float32, of `query_numbers` of an eviction or selection method; None if it gives none.
    full_blocks: [Gk, F] blocks of each group that this step fills, of the same tokens in all groups, M beyond their
      number; F is `StepShape.most_full`. None without a block codec.
    ancestors: [T] for a tile whose tokens are nodes of a tree, first its root, what each of them attends to: bit j for
      the j-th token of the tile. The slot of the j-th is j positions after the root's; `cache_positions` has its key's
      visible position. Tokens before the root are attended to as usual. None unless shape.tree.
    adapters: [T] slot of the token's adapter, -1 for none; None in an engine without adapters.
    steering: a `methods.steering.Steered`; None unless shape.steered.
    states: a `per_token.StateArrays`; None in a model without recurrent layers.
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
    query_numbers: Array | None = None
    full_blocks: Array | None = None
    ancestors: Array | None = None
    adapters: Array | None = None
    steering: Any = None
    states: Any = None

    def of_group(self, group: Array) -> StepArrays:
        """Returns the arrays for the layers of one group, without the axis Gk. group: an index, traced or not."""
        found = self._replace(
            cache_positions=self.cache_positions[group],
            slots=self.slots[group],
            block_tables=self.block_tables[group],
            block_starts=self.block_starts[group],
        )
        if self.query_numbers is not None:
            found = found._replace(query_numbers=self.query_numbers[group])
        if self.full_blocks is not None:
            found = found._replace(full_blocks=self.full_blocks[group])
        if self.shared_tables is None or self.shared_starts is None:
            return found
        return found._replace(shared_tables=self.shared_tables[group], shared_starts=self.shared_starts[group])


def fed(tokens: Array, previous: Array, xp: Any) -> Array:
    """Returns the ids [T] of a step's tokens, given the previous step's sampled ones. xp: numpy or jax.numpy."""
    # A row without a finite score has sampled -1: any token will do, since its sequence ends.
    sampled = xp.maximum(previous[xp.maximum(-1 - tokens, 0)], 0)
    return xp.where(tokens < 0, sampled, tokens)


class TokenScores(NamedTuple):
    """Log-probabilities of given tokens and of the most probable ones; the leading axis is over tokens.

    logprob, rank: of the given token (rank 1 is the most probable). top_ids, top_logprobs: [..., k].
    """

    logprob: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def padded(values: np.ndarray, shape: tuple[int, ...], fill: float) -> np.ndarray:
    """Returns values in the corner of an array of a shape that may be larger; themselves if it is not."""
    if values.shape == shape:
        return values
    out = np.full(shape, fill, values.dtype)
    out[tuple(slice(size) for size in values.shape)] = values
    return out


@dataclasses.dataclass
class StepInput:
    """The input of an executor for one step.

    num_sampled: number of the J sampled tokens that are used, from a bucket; 0 computes no logits.
    num_attended: sum over the tokens of the cached tokens up to each, itself included, as a mean over groups of layers.
    sampling: settings of num_sampled tokens; None if all are greedy.
    mask: [num_sampled, ceil(V / 32)] int32, which tokens may be sampled (see `masks.Matcher.allow`), or a function that
      returns it: called once, after the step before has been settled. None allows all.
    num_logprobs: number of top tokens to report for sampled tokens; None for no log-probabilities.
    targets: [T] the token that follows each packed token in its prompt, -1 for none; None scores no prompt.
    num_prompt_logprobs: number of top tokens to report for scored prompt tokens.
    pools: whether to report hidden states.
    moves: block copies to make before the step; None without any.
    drafts: for each tile of the step's only part, whose tokens are all sampled: draft tokens that follow its first one,
      as many of which are accepted as `StepOutput.num_accepted` says. None in other steps.
    acceptance: the rule that accepts them, see `SpeculativeMethod`.
    """

    shape: StepShape
    arrays: StepArrays
    num_sampled: int
    num_attended: int = 0
    sampling: SamplingArrays | None = None
    num_logprobs: int | None = None
    targets: np.ndarray | None = None
    num_prompt_logprobs: int = 0
    pools: bool = False
    moves: Moves | None = None
    drafts: Drafts | None = None
    acceptance: str = "sampled"
    mask: Array | Callable[[], Array] | None = None


@dataclasses.dataclass
class StepOutput:
    """The output of an executor for one step: sampled tokens [num_sampled], and the requested scores.

    A token is -1 if its scores are not finite.

    num_accepted: [tiles] with drafts, number of each tile's accepted draft tokens. The tile yields its first
      num_accepted + 1 tokens: these and one that the model has sampled.
    sampled: [num_sampled] with drafts that branch, the tokens in the order of the step, unlike `tokens`.
    hidden: [T, D], if requested: the step's tokens after the final norm; an array of any library.
    move_s: seconds that the step's moves took, if the host waited for them; 0 if unknown.
    compiled: True if a program was compiled for the step.
    fetch: waits for the device and fills in tokens and scores; None once they are here.
    """

    tokens: np.ndarray
    scores: TokenScores | None = None
    prompt_scores: TokenScores | None = None
    hidden: Any = None
    move_s: float = 0.0
    compiled: bool = False
    num_accepted: np.ndarray | None = None
    sampled: np.ndarray | None = None
    fetch: Callable[[StepOutput], None] | None = None

    def result(self) -> StepOutput:
        """Returns itself, complete; see `executor.Pending`."""
        if (fetch := self.fetch) is not None:
            self.fetch = None
            fetch(self)
        return self
