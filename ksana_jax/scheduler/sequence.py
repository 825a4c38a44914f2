"""Host-side state of sequences: an object for each sequence, and a row of NumPy arrays while it runs.

A decode step touches only arrays, for any number of sequences. Objects are used for rare events (admission,
preemption, the end), and if a request wants text or log-probabilities in every step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.core.request import FinishReason, SamplingParams
from ksana_jax.kv.state import KVState, Origin
from ksana_jax.scheduler.step.settings import RowSettings

# NumPy adds a Python number to a few hundred others in twice the time.
ONE = np.ones((), np.int32)


@dataclasses.dataclass(eq=False)
class Sequence:
    """One completion of a request.

    Args:
      seq_id: number in order of arrival.
      token_ids: prompt, and tokens generated before a preemption; while it runs, the tokens are in its row.
      params: sampling parameters of its request. stop_ids: ids that end it, including the model's.
      max_len: number of tokens at which it ends, prompt included. seed: seed of its random stream.
      owner: the request that it belongs to; opaque to the scheduler.
      request_id, index: its name for inspection; index is its completion's, or a beam's own.
      bad_words: token ids of its request's bad words, see `scheduler.step.sampling`.
      kv: its state in KV memory.
      is_beam: True if its request, not the scheduler, chooses and appends its tokens (beam search).
      num_question: last tokens of its prompt, see `RequestInput`.
      adapter: of its request, an `adapters.AdapterUse`; None for the model alone.
      matcher: follows its output through a grammar, see `scheduler.step.masks`; None without one.
      steering: of its request, a `methods.steering.Steering`; None without.
      pooling_type: of its prompt's hidden states, see `RequestInput`.

    Attributes:
      row: its row while it runs; None while it waits. rank: its rank in the order of service.
      num_prompt: number of prompt tokens.
      num_scored: prompt tokens whose log-probabilities are already reported. num_pooled: those whose hidden states are.
      awaits_token: a beam that has computed all its tokens and waits for its request to append the next one.
      drafts: number of its verified drafts, of their tokens, and of those accepted.
      forks: sequences of the same prompt that wait until this one has computed it, to share its blocks.
    """

    seq_id: int
    token_ids: np.ndarray
    params: SamplingParams
    stop_ids: tuple[int, ...]
    max_len: int
    seed: int = 0
    owner: Any = None
    request_id: str = ""
    index: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    kv: KVState = dataclasses.field(default_factory=KVState)
    is_beam: bool = False
    num_question: int = 0
    adapter: Any = None
    matcher: Any = None
    steering: Any = None
    pooling_type: str | None = None
    awaits_token: bool = False
    row: int | None = None
    rank: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    num_scored: int = 1
    num_pooled: int = 0
    drafts: tuple[int, int, int] = (0, 0, 0)
    forks: list[Sequence] = dataclasses.field(default_factory=list)
    num_prompt: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.num_prompt = len(self.token_ids)

    @property
    def num_context(self) -> int:
        """Number of prompt tokens before its question."""
        return self.num_prompt - self.num_question

    @property
    def max_cached_tokens(self) -> int:
        """Maximum number of tokens to take from the cache: its last token, and each scored or pooled
        token, must be computed."""
        every = self.params.prompt_logprobs is not None or self.pooling_type == "MEAN"
        return 0 if every else len(self.token_ids) - 1

    @property
    def asks(self) -> bool:
        """True if its steps return more than greedy tokens."""
        p = self.params
        given = (p.logprobs, p.prompt_logprobs, p.forced_token_ids, self.pooling_type) != (None, None, None, None)
        return not p.greedy or self.dense_sampling or given or self.matcher is not None

    @property
    def dense_sampling(self) -> bool:
        """True if sampling needs penalties or biases over the whole vocabulary."""
        return self.params.penalised or (self.params.min_tokens > 0 and bool(self.stop_ids))


class Rows:
    """Running sequences as rows of arrays; R rows, Gk groups of layers with block tables of width P.

    token_ids: [R, longest], grown as needed. num_tokens, num_computed, num_prompt, max_len: [R]; the tokens left to
    compute are num_tokens - num_computed.
    num_known: [R] tokens in token_ids; num_tokens, or less while steps that sample the last ones run (`expect`).
    newest: [R] the last of a row's num_tokens tokens, as in `StepArrays.tokens`: -1 - i if a running step samples it.
    num_evicted: [Gk, R] number of tokens that each group has evicted although its pattern would reach them. A token's
      cache position is its sequence position minus this number; the two are equal if nothing is evicted.
    block_tables, block_starts: [Gk, R, P] live blocks by position, and where in the cache each begins; FAR if absent.
    probes: token ids of the context and the probe of rows that compute one, after which num_tokens is a token further.
    num_rewrites: how often num_evicted or tables of running rows have changed, other than by `RowBlocks.take`.
    block_origins: [Gk, R, P] uint8, `Origin` of each; COMPUTED if absent, the default of newly allocated blocks.
    num_blocks: [Gk, R] number of live blocks.
    allocated_until: [R] sequence position up to which blocks of all groups are allocated.
    prefix_end: [R] `allocated_until` when the sequence was placed: the end of its shared, cached or swapped blocks.
    return_at: [Gk, R] oldest visible position at which the next block may have become invisible; for the first of the
      groups with one live range.
    forked: [R] True if a block that is written to may have other owners, so it must be copied before.
    budgets, num_recent: [Gk, R] maximum tokens that each group caches, and number of newest tokens that it always
      keeps; see `EvictionSchedule`.
    evict_at: [Gk, R] number of computed tokens at which each group evicts next, and where chunks end; FAR for never.
    index_at: [R] number of computed tokens at which the next full block enters the prefix index; FAR if none will.
    snapshot_at: [R] number of computed tokens of which a snapshot is taken, and where a chunk ends; FAR for none.
    cache_at: [R] number of computed tokens after which a row's next state is cached; FAR for none. A chunk may pass it.
    state_from, state_to: [R] slots of the states that a row's next step reads and writes, see `RowStates`; FAR: none.
    state_via: [R] slot of the state after cache_at tokens, which the next step writes in passing; FAR for none.
    is_beam: [R] see `Sequence`.
    stop_ids: [R, width] padded with -1. settings: of rows that ask for more than greedy tokens.
    """

    def __init__(self, num_rows: int, table_width: int, num_groups: int = 1):
        self.num_groups = num_groups
        self.seqs: list[Sequence | None] = [None] * num_rows
        self.token_ids = np.zeros((num_rows, 64), np.int32)
        self._begins = 64 * np.arange(num_rows)  # index of each row's start in the flattened array
        self._longest = 0  # no row is longer
        self.num_tokens = np.zeros(num_rows, np.int32)
        self.num_known = np.zeros(num_rows, np.int32)
        self.newest = np.zeros(num_rows, np.int32)
        self._of_running = -1 - np.arange(num_rows, dtype=np.int32)
        self.num_computed = np.zeros(num_rows, np.int32)
        self.num_prompt = np.full(num_rows, FAR, np.int32)
        self.max_len = np.full(num_rows, FAR, np.int32)
        self.num_evicted = np.zeros((num_groups, num_rows), np.int32)
        self.block_tables = np.zeros((num_groups, num_rows, table_width), np.int32)
        self.block_starts = np.full((num_groups, num_rows, table_width), FAR, np.int32)
        self.block_origins = np.full((num_groups, num_rows, table_width), Origin.COMPUTED, np.uint8)
        self.num_blocks = np.zeros((num_groups, num_rows), np.int32)
        self.probes: dict[int, np.ndarray] = {}
        self.num_rewrites = 0
        self.allocated_until = np.zeros(num_rows, np.int32)
        self.prefix_end = np.zeros(num_rows, np.int32)
        self.return_at = np.zeros((num_groups, num_rows), np.int32)
        self.forked = np.zeros(num_rows, bool)
        self.budgets = np.full((num_groups, num_rows), FAR, np.int32)
        self.num_recent = np.zeros((num_groups, num_rows), np.int32)
        self.evict_at = np.full((num_groups, num_rows), FAR, np.int32)
        self.index_at = np.full(num_rows, FAR, np.int32)
        self.snapshot_at = np.full(num_rows, FAR, np.int32)
        self.cache_at = np.full(num_rows, FAR, np.int32)
        self.state_from, self.state_to, self.state_via = np.full((3, num_rows), FAR, np.int32)
        self.is_beam = np.zeros(num_rows, bool)
        self.stop_ids = np.full((num_rows, 1), -1, np.int32)
        self.min_len = np.zeros(num_rows, np.int32)
        self.settings = RowSettings(num_rows)
        self.num_beams = self.num_steered = 0
        self.alive = np.zeros(num_rows, bool)

    def place(self, seq: Sequence, row: int) -> None:
        """Writes a sequence into a free row, with no tokens computed."""
        assert self.seqs[row] is None and seq.row is None
        count = len(seq.token_ids)
        self.seqs[row], seq.row = seq, row
        self.alive[row] = True
        self._longest = max(self._longest, count)
        if count > self.token_ids.shape[1]:
            self._grow(count)
        self.token_ids[row, :count], self.newest[row] = seq.token_ids, seq.token_ids[-1]
        self.num_tokens[row] = self.num_known[row] = count
        self.num_computed[row], self.num_prompt[row] = 0, seq.num_prompt
        self.max_len[row] = seq.max_len
        self.is_beam[row] = seq.is_beam
        self.num_beams += seq.is_beam
        self.num_steered += seq.steering is not None
        self.min_len[row] = seq.num_prompt + seq.params.min_tokens
        if len(seq.stop_ids) > self.stop_ids.shape[1]:
            extra = len(seq.stop_ids) - self.stop_ids.shape[1]
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, extra)), constant_values=-1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(seq.stop_ids)] = seq.stop_ids
        if seq.asks:
            self.settings.place(row, seq.params, seq.seed, seq.dense_sampling, seq.matcher)
            self.settings.pools[row] = seq.pooling_type is not None

    def clear(self, row: int) -> None:
        """Frees a row and moves its known tokens back to its sequence. Its blocks must have been released."""
        seq = self.seqs[row]
        assert seq is not None
        seq.token_ids = self.token_ids[row, : self.num_known[row]].copy()
        self.seqs[row], seq.row = None, None
        self.num_beams -= seq.is_beam
        self.num_steered -= seq.steering is not None
        self.num_tokens[row] = self.num_known[row] = self.num_computed[row] = 0
        self.num_prompt[row] = self.max_len[row] = FAR
        self.allocated_until[row] = self.prefix_end[row] = 0
        self.num_blocks[:, row] = self.return_at[:, row] = self.num_evicted[:, row] = 0
        self.block_starts[:, row] = FAR
        self.block_tables[:, row] = 0
        self.block_origins[:, row] = Origin.COMPUTED
        self.forked[row] = self.is_beam[row] = False
        self.index_at[row] = self.snapshot_at[row] = self.cache_at[row] = self.evict_at[:, row] = FAR
        self.alive[row] = False
        if seq.asks:
            self.settings.clear(row)

    def next_chunk(self, row: int) -> int:
        """Returns the number of tokens that a row can compute at once: up to its next eviction or snapshot."""
        return int(min(self.num_tokens[row], self.snapshot_at[row], *self.evict_at[:, row]) - self.num_computed[row])

    def expect(self, rows: np.ndarray, places: np.ndarray | slice) -> None:
        """Counts the token of each row that a running step, the last one scheduled, samples at a place among its
        sampled tokens, unless it is the last of its sequence, which is never computed."""
        length, tokens = self.num_computed[rows] + ONE, self._of_running[places]
        goes_on = length < self.max_len[rows]
        if np.count_nonzero(goes_on) < len(rows):
            rows, length, tokens = rows[goes_on], length[goes_on], tokens[goes_on]
        self.newest[rows], self.num_tokens[rows] = tokens, length

    def append(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Appends one token to each row, or gives the expected one."""
        at, width = self.num_known[rows], self.token_ids.shape[1]
        self._longest += 1
        if self._longest > width:
            self._longest = int(self.num_known.max()) + 1
            if self._longest > width:
                self._grow(self._longest)
        # In a flat array: an index of two axes takes twice as long.
        self.token_ids.reshape(-1)[self._begins[rows] + at] = tokens
        self.num_known[rows], self.newest[rows] = at + ONE, tokens
        np.maximum(self.num_tokens, self.num_known, out=self.num_tokens)  # of all rows: cheaper than of some

    def append_several(self, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Appends the first counts [n] of tokens [n, w] to each row."""
        longest = int((self.num_known[rows] + counts).max(initial=0))
        self._longest = max(self._longest, longest)
        if longest > self.token_ids.shape[1]:
            self._grow(longest)
        nth = np.arange(tokens.shape[1])
        new = nth < counts[:, None]
        at = (self._begins[rows] + self.num_known[rows])[:, None] + nth
        self.token_ids.reshape(-1)[at[new]] = tokens[new]
        self.num_known[rows] += counts
        self.newest[rows] = self.token_ids[rows, self.num_known[rows] - 1]
        np.maximum(self.num_tokens, self.num_known, out=self.num_tokens)

    def drop_after(self, row: int, length: int) -> None:
        """Drops a row's tokens after the first `length`; the row is about to end."""
        self.num_known[row] = self.num_tokens[row] = length

    def block_ids(self, row: int) -> np.ndarray:
        """Returns the ids of the blocks that a row holds, group by group."""
        return self.of_blocks(self.block_tables, row)

    def of_blocks(self, values: np.ndarray, row: int) -> np.ndarray:
        """Returns the entries of [Gk, R, P] values for the blocks that a row holds, group by group."""
        return np.concatenate([of[row, :count] for of, count in zip(values, self.num_blocks[:, row], strict=True)])

    def _grow(self, count: int) -> None:
        width = max(count, 2 * self.token_ids.shape[1])
        self.token_ids = np.pad(self.token_ids, ((0, 0), (0, width - self.token_ids.shape[1])))
        self._begins = width * np.arange(len(self.seqs))
