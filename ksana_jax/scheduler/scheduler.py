"""Iteration-level scheduling (ORCA, OSDI 2022): decides before every step which rows compute how many tokens.

Knows rows and counts, and asks `kv.memory` for blocks; no token values beyond stop ids, no jax, no clock. A row's
remaining work is num_tokens - num_computed: a whole prompt, the rest after a prefix hit, a chunk, one token of decode
and a restart after preemption are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ksana_jax.core.request import FinishReason
from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.owner import check_memory
from ksana_jax.kv.prefix_index import Scope
from ksana_jax.kv.state_snapshots.base import SnapshotPolicy
from ksana_jax.scheduler.drafting import Drafting
from ksana_jax.scheduler.forking import fork_prompts
from ksana_jax.scheduler.policies import make_policy
from ksana_jax.scheduler.row_blocks import RowBlocks
from ksana_jax.scheduler.row_checks import check_row_blocks
from ksana_jax.scheduler.row_eviction import Measure, RowEviction
from ksana_jax.scheduler.row_indexing import index_full
from ksana_jax.scheduler.row_returns import return_invisible
from ksana_jax.scheduler.row_sharing import swap_out
from ksana_jax.scheduler.row_states import RowStates
from ksana_jax.scheduler.running import Provision, Running, StepBudget
from ksana_jax.scheduler.sequence import ONE, Rows, Sequence
from ksana_jax.scheduler.speculative.speculation import Speculation
from ksana_jax.scheduler.step.ladders import most_tiles
from ksana_jax.scheduler.step.types import NO_ROWS, ScheduledBatch
from ksana_jax.scheduler.waiting import Admission, WaitingQueue


class Scheduler:
    """Waiting sequences in the order of a policy, running ones in rows.

    Args:
      memory: allocates blocks. max_num_seqs: maximum rows. max_num_batched_tokens: maximum tokens of a step.
      query_tile: maximum tokens of one row that share a tile in a step, see `scheduler.step.ladders.most_tiles`.
      max_model_len: maximum tokens of a sequence.
      layout: of the pool, with the positions that stay visible to later tokens in each group of layers.
      policy: a key of SCHEDULING_POLICIES, or see `find_scheduling_policy`.
      speculation: drafts tokens for steps of decodes; None for none.
      measure: see `RowEviction`.
      state_snapshots: where states of recurrent layers are cached; None caches none.
    """

    def __init__(
        self,
        memory: KVMemory,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        query_tile: int,
        max_model_len: int,
        layout: KVLayout,
        policy: Any = "fcfs",
        speculation: Speculation | None = None,
        measure: Measure = None,
        state_snapshots: SnapshotPolicy | None = None,
    ):
        self.memory = memory
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.tiles = list(most_tiles(max_num_batched_tokens, query_tile))
        self.query_tile, self.max_model_len = query_tile, max_model_len
        self.num_preemptions = 0
        self.speculation = speculation
        self.state_snapshots = state_snapshots
        self._policy, self._measure = policy, measure
        self._make_books(layout, memory.index.scope)

    def _make_books(self, layout: KVLayout, scope: Scope) -> None:
        self.blocks = self.memory.blocks
        self.queue = WaitingQueue(self.memory, make_policy(self._policy, self.max_num_seqs))
        self.running = Running(self.max_num_seqs)
        self._unsettled: list[ScheduledBatch] = []  # steps that are scheduled
        self.set_layout(layout, scope)

    def reset(self, layout: KVLayout, scope: Scope, *host: np.ndarray | None) -> None:
        """Drops all sequences and blocks after a failure that may have left them inconsistent; see `KVMemory.reset`."""
        self.memory.reset(*host)
        if self.speculation is not None:
            self.speculation.end_all(self.rows)
        self._make_books(layout, scope)

    def set_layout(self, layout: KVLayout, scope: Scope | None = None) -> None:
        """Changes the visible positions, and the scope of cached blocks. Only while nothing runs or waits."""
        assert not self.has_work, "the attention pattern of running sequences cannot change"
        self.layout = layout
        self.memory.set_layout(layout, scope or self.memory.index.scope)
        most_tokens = self.max_num_batched_tokens
        self.rows = Rows(self.max_num_seqs, layout.table_width(self.max_model_len, most_tokens), len(layout.groups))
        blocks = self.row_blocks = RowBlocks(self.rows, self.memory, layout)
        self.eviction = RowEviction.of(layout.eviction, blocks, self.running, self._preempt, self._measure)
        self.provision = Provision(self.memory, self.running, blocks, self._preempt, self.queue.reclaim_shared)
        states = self.states = RowStates.of(self.rows, self.memory, self.state_snapshots)
        self.drafting = None
        if self.speculation is not None:
            self.drafting = Drafting(blocks, self.speculation, most_tokens, states)
        self.admission = Admission(
            self.memory, self.queue, self.running, blocks, layout, most_tokens, self.eviction, states
        )

    @property
    def order(self) -> np.ndarray:
        """Running rows, the first to be served first."""
        return self.running.order

    @property
    def waiting(self) -> list[tuple[Any, int, Sequence]]:
        """(rank, seq_id, sequence) of waiting sequences, sorted."""
        return self.queue.entries

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or len(self.order) > 0

    def add(self, seq: Sequence) -> None:
        """Queues a sequence; `seq.forks` wait until it has computed its prompt."""
        self.queue.add(seq)

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a sequence, whatever its state; a finished one is left alone."""
        if seq.finish_reason is not None:
            return
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if seq.row is not None:
            self._leave(np.array([seq.row]))
        else:
            self.queue.remove(seq)
        for fork in self.queue.pop_forks(seq):
            self.queue.add(fork)

    def schedule(self) -> ScheduledBatch | None:
        """Chooses the tokens of the next step and takes blocks for them; None when there is nothing to compute: no
        work, or all of it waits for the disk (`memory.disk_reads`)."""
        reads = self.memory.disk_reads
        if reads is not None:
            reads.poll()
        if self.eviction is not None:
            self.eviction.evict_shared()
        batch = self._schedule()
        # Beams that wait for their request's others compute nothing, and may hold all blocks. A finished read may
        # belong to a sequence that waits behind them.
        while batch is None and len(self.order) and self.waiting and not (reads is not None and reads.num_reading):
            self._preempt(int(self.order[-1]))
            batch = self._schedule()
        return batch

    def schedule_ahead(self, running: ScheduledBatch) -> ScheduledBatch | None:
        """Chooses the step after the last one scheduled, which has advanced and is not settled, or returns None: it has
        nothing to compute, or depends on the tokens that `running` samples. Then settle first.

        The step decodes sampled tokens that only the device knows, see `Rows.expect`. It preempts no row: the tokens
        of a preempted sequence must be known. Sequences found to have ended leave their rows as usual (`gone`).
        """
        r = self.rows
        if running.drafts is not None or self._needs_tokens():
            return None
        sampled = running.sampled
        places: np.ndarray | slice = slice(len(sampled))
        if running.gone:
            places = running.stay(sampled).nonzero()[0]
            sampled = sampled[places]
        r.expect(sampled, places)
        return self._schedule(ahead=True)

    def _needs_tokens(self) -> bool:
        """True if the next step depends on the tokens of the running one beyond decoding them: beams are chosen by
        scores, forks begin with a computed prompt, penalties and biases count tokens, moves to the host are confirmed
        step by step, blocks enter the prefix index before windows and evictions make room, and drafts need them.
        """
        r, memory = self.rows, self.memory
        waits = memory.host is not None or bool(self.queue.leaders)
        waits |= self.speculation is not None and self.speculation.may_draft(r, self.order)
        waits |= memory.prefixes.enabled and bool(self.row_blocks.windowed)
        waits |= self.eviction is not None and self.eviction.waits
        return waits or bool(r.num_beams + r.settings.num_dense)

    def _schedule(self, ahead: bool = False) -> ScheduledBatch | None:
        """Chooses a step; ahead: None if blocks might be missing for tokens of running rows."""
        rows, order, most = self.rows, self.order, self.max_num_batched_tokens
        preempted_before = self.num_preemptions
        # Over all rows, which is cheaper than over some. Free rows have neither tokens nor blocks.
        left, short = rows.num_tokens - rows.num_computed, (rows.num_tokens > rows.allocated_until).nonzero()[0]
        decodes, only_decodes = order, np.count_nonzero(left == 1) == len(order)
        if ahead and self.provision.num_missing(short, only_decodes) > self.blocks.num_available:
            return None
        if not only_decodes or len(order) > most:
            decodes = order[left[order] == 1][:most]
            short = decodes[rows.num_computed[decodes] >= rows.allocated_until[decodes]]
        decodes, new = self.provision.to_decodes(decodes, short)
        chunks: list[tuple[int, int]] = []
        admitted: list[tuple[int, int]] = []
        budget = StepBudget(most - len(decodes), self.tiles)
        if len(decodes) < len(order):
            for row in order[left[order] > 1].tolist():
                if count := self.provision.to_chunk(row, budget):
                    chunks.append((row, count))
        if self.num_preemptions == preempted_before:
            if self.waiting:
                self.queue.reorder()
                computing = np.append(decodes, np.array([row for row, _ in chunks], np.intp))
                admitted = self.admission.admit(budget, computing)
                chunks += admitted
        else:
            decodes = decodes[rows.alive[decodes]]
        if not chunks and not len(decodes):
            return None
        if chunks and self.states is not None:
            self.states.split(chunks)
        batch = self._with_chunks(decodes, chunks) if chunks else ScheduledBatch(decodes, NO_ROWS, NO_ROWS, None, new)
        if admitted:
            batch.admitted = [row for row, _ in admitted]
            if self.speculation is not None:
                self.speculation.begin(self.rows, batch.admitted)
        if self.drafting is not None and not ahead and not chunks:
            batch.drafts = self.drafting.draft(decodes)
        self._unsettled.append(batch)
        return batch

    def _with_chunks(self, decodes: np.ndarray, chunks: list[tuple[int, int]]) -> ScheduledBatch:
        """Returns the batch of decodes and (row, tokens) of other rows; a row with one token is a decode too."""
        alone = [row for row, count in chunks if count == 1]
        longer = np.array([c for c in chunks if c[1] > 1], np.intp).reshape(-1, 2)
        batch = ScheduledBatch(np.append(decodes, np.array(alone, np.intp)), longer[:, 0], longer[:, 1])
        batch.samples = self.rows.num_computed[batch.rows] + batch.num_per_row == self.rows.num_tokens[batch.rows]
        return batch

    def _preempt(self, row: int) -> None:
        """Swaps a row's blocks to the host or drops them; its sequence waits again, at its old rank."""
        seq = self.rows.seqs[row]
        assert seq is not None
        self.memory.device.needed_by = seq
        seq.kv.swapped = swap_out(self.row_blocks, row)
        self._leave(np.array([row]))
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.queue.add(seq)

    def advance(self, batch: ScheduledBatch) -> None:
        """Records, once, facts of a step known before its tokens: its number of tokens, the blocks that it frees."""
        if batch.advanced:
            return
        batch.advanced, rows = True, batch.rows
        counts = batch.num_per_row if len(batch.chunks) else ONE
        if batch.gone:
            stay = batch.stay(rows)
            rows, counts = rows[stay], batch.num_per_row[stay]
        self.rows.num_computed[rows] += counts
        self.row_blocks.num_ahead = 0
        if self.drafting is not None and len(batch.chunks):
            self.drafting.keep_up(rows, self.order)
        if self.eviction is not None:
            self.eviction.evict(rows)
        if self.states is not None and batch.drafts is None:
            self.states.advance(rows)
        # Blocks enter the prefix index, and forks share their leader's, before they are returned: see `settle`.
        if self.row_blocks.windowed and not self.memory.prefixes.enabled and not self.queue.leaders:
            return_invisible(self.row_blocks, rows)

    def settle(
        self, batch: ScheduledBatch, tokens: np.ndarray, num_accepted: np.ndarray | None = None
    ) -> list[Sequence]:
        """Applies a step's tokens: appends them, caches full blocks, removes sequences that have ended.

        Returns:
          All sequences that have ended. `batch` has the new tokens.

        Args:
          tokens: for each of `batch.sampled`, the token sampled. A negative one ends its sequence with
            FinishReason.ERROR. With drafts [n, w], the tokens sampled for the row and for each of its draft tokens.
          num_accepted: with drafts, number of each row's accepted ones; that many tokens and one more follow.
        """
        r, rows = self.rows, batch.rows
        sampled, batch.beams, batch.num_new = batch.sampled, NO_ROWS, None
        self._unsettled.remove(batch)
        if batch.gone:
            stay = batch.stay(sampled)
            rows, sampled, tokens = rows[batch.stay(rows)], sampled[stay], tokens[stay]
        if r.num_beams and np.count_nonzero(r.is_beam[sampled]):
            by_request = r.is_beam[sampled]
            batch.beams, sampled, tokens = sampled[by_request], sampled[~by_request], tokens[~by_request]
            for row in batch.beams:
                r.seqs[row].awaits_token = True
        finished: list[Sequence] = []
        runs = tokens
        if num_accepted is not None:
            assert self.drafting is not None
            tokens, batch.num_new = self.drafting.append(batch, tokens, num_accepted)
            if self.eviction is not None:
                self.eviction.evict(batch.decodes)
        if np.count_nonzero(tokens < 0):
            finished += self._fail(sampled[tokens < 0])
            sampled, tokens, rows = sampled[tokens >= 0], tokens[tokens >= 0], rows[r.alive[rows]]
        if num_accepted is None:
            r.append(sampled, tokens)
        if self.memory.prefixes.enabled:
            index_full(self.row_blocks, rows)
        if self.states is not None:
            self.states.index()
        if self.queue.leaders:
            fork_prompts(self.queue, self.row_blocks, self.eviction, self.states, sampled)
        if self.row_blocks.windowed:
            return_invisible(self.row_blocks, rows)
        batch.live_blocks = self.blocks.num_used - self.row_blocks.num_ahead
        batch.settled, batch.new_tokens = (sampled, tokens) if num_accepted is None else (batch.sampled, runs)
        return finished + self._end(sampled, tokens)

    def _end(self, rows: np.ndarray, tokens: np.ndarray) -> list[Sequence]:
        """Ends the sequences whose newest token is a stop token or the last that they may have; returns them."""
        r = self.rows
        is_stop = r.stop_ids.take(rows, axis=0) == tokens[:, None]
        # Lengths of all rows: cheaper than of some.
        if not np.count_nonzero(is_stop) and not np.count_nonzero(r.num_known >= r.max_len):
            return []
        length = r.num_known[rows]
        stopped = is_stop.any(axis=1) & (length > r.min_len[rows])
        ended, finished = stopped | (length >= r.max_len[rows]), []
        for row, token, by_id in zip(rows[ended], tokens[ended], stopped[ended], strict=True):
            seq = r.seqs[row]
            assert seq is not None
            seq.finish_reason = FinishReason.STOP if by_id else FinishReason.LENGTH
            seq.stop_reason = int(token) if by_id else None
            finished.append(seq)
        if finished:
            self._leave(rows[ended])
        return finished

    def _fail(self, rows: np.ndarray) -> list[Sequence]:
        seqs = [seq for row in rows if (seq := self.rows.seqs[row]) is not None]
        for seq in seqs:
            self.finish(seq, FinishReason.ERROR)
        return seqs

    def _leave(self, leaving: np.ndarray) -> None:
        """Removes rows and releases their blocks."""
        r = self.rows
        if self.eviction is not None:
            self.eviction.leave(leaving, self._unsettled)
        if self.states is not None:
            self.states.leave(leaving)
        self.row_blocks.release(leaving)
        self.running.leave(leaving)
        for batch in self._unsettled:
            batch.gone.update(leaving.tolist())
        for row in leaving.tolist():
            seq = r.seqs[row]
            assert seq is not None
            if self.memory.prefixes.enabled:
                self.memory.prefixes.expect_no_more(seq.kv)
            seq.kv.leave_index()
            r.clear(row)
            if self.speculation is not None:
                self.speculation.end(row, seq)

    def check(self) -> None:
        """Checks that the accounting of blocks agrees with the rows' tables and the blocks of waiting sequences.

        Raises:
          AssertionError: see `KVMemory.check` and `check_row_blocks`; or rows and their order differ.
        """
        order, waiting = self.order.tolist(), [seq.kv for _, _, seq in self.waiting]
        owned = [self.rows.block_ids(row) for row in order] + [kv.shared.ids for kv in waiting if kv.shared]
        check_memory(self.memory, owned, [kv.swapped.ids for kv in waiting if kv.swapped])
        if self.states is not None:
            self.states.check(waiting)
        self.running.check(self.rows.alive)
        check_row_blocks(self.row_blocks, self.layout, self.blocks, order)
