"""A draft model on the block tables of an engine's rows: computes their missing tokens, and decodes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ksana_jax.core.patterns import FAR, AttentionPattern
from ksana_jax.engine.draft_models.held_keys import HeldKeys
from ksana_jax.kv.visible_range import VisibleRange
from ksana_jax.runner.decode_loop import LoopKey, Stop, only_decodes
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.running import StepBudget
from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.speculative.base import ProposerContext
from ksana_jax.scheduler.step.builder import BatchBuilder
from ksana_jax.scheduler.step.drafts import Drafts
from ksana_jax.scheduler.step.ladders import draft_buckets, largest_tiles, plain_shapes
from ksana_jax.scheduler.step.settings import RowSettings, SamplingArrays
from ksana_jax.scheduler.step.types import ScheduledBatch, StepInput, StepShape, TileGroup
from ksana_jax.scheduler.step.verification import verification_arrays

_NO_ROWS = np.zeros(0, np.intp)
# Its steps return what `decode` asks for, not what the rows do.
_NO_SETTINGS = RowSettings(0)


class SmallModel:
    """Keys and values of a draft model, in blocks with the ids of the target's.

    It has the pattern of the target's layer that attends farthest back, and shares the blocks of its group.

    Args:
      runner: of the draft model.
      context: the engine that it drafts for.

    Attributes:
      num_computed: [R] tokens of each row whose keys and values are stored, as far as the row still has blocks
        for them.
      num_sampled: J, see `StepShape.max_sampled`.
      forgets: whether rows return blocks before they end.
    """

    def __init__(self, runner: Runner, context: ProposerContext):
        config, buckets = context.config, draft_buckets(context.buckets, context.config)
        assert config.num_blocks is not None
        self.runner, self._buckets, self._num_blocks, self._size = runner, buckets, config.num_blocks, config.block_size
        self._most_tokens, self.num_sampled = config.max_num_batched_tokens, buckets.decodes[-1]
        self._tiles = largest_tiles(buckets)
        self._builder = BatchBuilder(buckets, self._size, self._num_blocks, runner.config.vocab_size)
        self._places, self._held = context.layout.places, HeldKeys(config.num_blocks, config.block_size)
        self.num_computed = np.zeros(config.max_num_seqs, np.int32)
        self.set_patterns(context.patterns)

    def set_patterns(self, patterns: Sequence[AttentionPattern]) -> None:
        """Takes over the patterns of the target's layers."""
        windows = [VisibleRange.of([pattern]).window for pattern in patterns]
        layer = max(range(len(patterns)), key=lambda at: windows[at] or FAR)
        self._group, self.resets_scores = self._places[layer][0], windows[layer] is not None
        self.runner.set_patterns((patterns[layer],) * self.runner.config.num_layers)
        self._held.clear()

    def warm_up(
        self,
        max_width: int,
        length: int,
        samples: bool,
        distributions: bool,
        workers: int,
        scores: bool = False,
    ) -> None:
        """Compiles what drafts of up to `length` tokens can need, for block tables up to a width.

        Args:
          samples, distributions: see `LoopKey`. scores: whether drafts end at improbable tokens.
        """
        shapes = plain_shapes(self._buckets, max_width)
        # Texts are computed in chunks, even a single token.
        keys: list[Any] = [shape for shape in shapes if not only_decodes(shape)]
        for shape in filter(only_decodes, shapes):
            for some in {False, samples}:
                keys.append(LoopKey(shape, length + 1, some, 0 if scores else None, some and distributions, True))
        self.runner.compile(keys, workers)

    def catch_up(self, rows: Rows, which: np.ndarray) -> None:
        """Computes the tokens of some rows that the target has computed, and this model has not.

        Where a row no longer has all blocks that these tokens would attend to, their keys and values are approximate.
        """
        if not len(which):
            return
        view = self._view(rows)
        until = np.minimum(rows.num_computed, rows.num_known)[which]
        begun = np.zeros(len(which), bool)
        while True:
            since = np.minimum(self.num_computed[which], until)
            missing = self._held.first_missing(view, which, until, since)
            # Slots after a missing token belong to another sequence.
            goes_on = begun & self._has_block(view, which, since)
            self.num_computed[which] = np.where(goes_on, since, missing)
            behind = self.num_computed[which] < until
            if not np.count_nonzero(behind):
                return
            of_rows, counts = self._chunks(view, which[behind].tolist(), until[behind].tolist())
            batch = ScheduledBatch(_NO_ROWS, of_rows, counts, samples=np.zeros(len(of_rows), bool))
            step, _ = self._builder.build(batch, view)
            self.runner.submit(step).result()
            self._held.note(step.arrays.slots[0], step.arrays.positions, step.arrays.tokens)
            self.num_computed[of_rows] += counts
            begun |= np.isin(which, of_rows)

    def _has_block(self, view: Rows, which: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns whether each of some rows has the block of a sequence position."""
        starts, at = view.block_starts[0][which], positions[:, None]
        there = np.arange(starts.shape[1]) < view.num_blocks[0, which][:, None]
        return (there & (starts <= at) & (at - self._size < starts)).any(axis=1)

    def _chunks(self, view: Rows, which: list[int], until: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows and how many tokens they compute next, in adjacent blocks of the sequence that no other row
        writes to."""
        budget, taken = StepBudget(self._most_tokens, list(self._tiles)), set()
        of_rows, counts = [], []
        for row, end in zip(which, until, strict=True):
            start, held = int(self.num_computed[row]), int(view.num_blocks[0, row])
            starts, ids = view.block_starts[0, row, :held], view.block_tables[0, row, :held]
            at = int(np.searchsorted(starts, start, side="right")) - 1
            gaps = np.flatnonzero(np.diff(starts[at:]) > self._size)
            last = at + int(gaps[0]) if len(gaps) else held - 1
            left = min(int(starts[last]) + self._size, end) - start
            blocks = ids[at : last + 1].tolist()
            # A chunk is of a tile, even if it is one token.
            count = min(left, budget.most(max(left, 2))) if taken.isdisjoint(blocks) else 0
            if count:
                budget.take(max(count, 2))
                taken.update(blocks)
                of_rows.append(row)
                counts.append(count)
        return np.array(of_rows, np.intp), np.array(counts, np.intp)

    def _view(self, rows: Rows) -> Rows:
        """Returns rows for a step of this model: with one group of blocks, as it has computed them, not steered."""
        view, mine = copy.copy(rows), slice(self._group, self._group + 1)
        view.num_computed, view.settings, view.num_groups, view.num_steered = self.num_computed, _NO_SETTINGS, 1, 0
        for name in ("block_tables", "block_starts", "num_blocks", "num_evicted"):
            setattr(view, name, getattr(rows, name)[mine])
        return view

    def decode(
        self,
        rows: Rows,
        which: np.ndarray,
        most: np.ndarray,
        length: int,
        distributions: bool,
        least: np.float32 | None = None,
    ) -> Drafts:
        """Decodes up to `length` tokens after the newest one of each row, and computes all that are drafts.

        Args:
          which: [n] rows, with blocks for `most` [n] tokens more. Beyond these a row's tokens are arbitrary.
          distributions: whether the distributions that they were drawn from are wanted, of rows that sample.
          least: a draft ends before a token with a smaller log-probability, and all tokens are the most probable ones;
            None ends no draft.

        Returns:
          At most `most` tokens of each row. Nothing is decoded once all drafts have ended.
        """
        steps, slots = self._steps(rows, which, most, length + 1)
        stop = Stop(np.full(steps[0].shape.num_tokens, -1, np.int32), least)
        stop.most[: len(which)] = most
        if least is not None:
            steps = [dataclasses.replace(step, sampling=None, num_logprobs=0) for step in steps]
        distributions &= steps[0].sampling is not None
        submitted, drawn_from = self.runner.run_loop(steps, distributions, stop)
        outputs = [step.result() for step in submitted[:length]]
        ids = np.stack([output.tokens for output in outputs], axis=1)[: len(which)]
        usable = ids >= 0  # A token without finite scores is -1, which is no draft.
        if least is not None:
            logprobs = np.stack([output.scores.logprob for output in outputs if output.scores is not None], axis=1)
            usable &= logprobs[: len(which)] >= least
        ids, counts = np.maximum(ids, 0), np.minimum(most, np.cumprod(usable, axis=1).sum(axis=1)).astype(np.int32)
        self.num_computed[which] = rows.num_computed[which] + 1 + counts
        nth = np.arange(length + 1)
        positions = np.where(nth <= counts[:, None], rows.num_computed[which, None] + nth, -1)
        self._held.note(slots, positions, np.concatenate([rows.newest[which, None], ids], axis=1))
        return Drafts(ids, counts, drawn_from)

    def _steps(self, rows: Rows, which: np.ndarray, most: np.ndarray, count: int) -> tuple[list[StepInput], np.ndarray]:
        """Returns `count` steps of decodes, each of which takes the tokens that the one before it samples.

        Returns:
          The steps, and the slots [n, count] that they write to.
        """
        view = self._view(rows)
        view.num_computed = rows.num_computed
        n, width = len(which), int(view.num_blocks[:, which].max())
        shape = self._buckets.shape(n, (), width)
        num_tiles = shape.num_tiles
        wide = StepShape((TileGroup(num_tiles, count),), shape.table_width, shape.max_sampled)
        drafts = Drafts(np.zeros((n, count - 1), np.int32), most)
        whole = verification_arrays(wide, which, drafts, view, self._size, self._num_blocks)
        num_sampled = self._buckets.num_sampled(n)
        fed = np.where(np.arange(num_tiles) < n, -1 - np.arange(num_tiles), 0).astype(np.int32)
        sampled = np.zeros(shape.max_sampled, np.int32)
        sampled[:n] = np.arange(n)
        steps = []
        for at in range(count):
            arrays = whole._replace(
                tokens=whole.tokens.reshape(num_tiles, count)[:, at] if at == 0 else fed,
                positions=whole.positions.reshape(num_tiles, count)[:, at],
                cache_positions=whole.cache_positions.reshape(-1, num_tiles, count)[:, :, at],
                slots=whole.slots.reshape(-1, num_tiles, count)[:, :, at],
                sampled=sampled,
            )
            sampling = self._sampling(rows, which, num_sampled, at)
            steps.append(StepInput(shape, arrays, num_sampled, sampling=sampling))
        return steps, whole.slots.reshape(num_tiles, count)[:n]

    @staticmethod
    def _sampling(rows: Rows, which: np.ndarray, size: int, at: int) -> SamplingArrays | None:
        """Returns the target's settings of tokens whose place is `at` further, without penalties and biases."""
        if not np.count_nonzero(rows.settings.samples[which]):
            return None
        return rows.settings.of_tokens(which, (rows.num_tokens - rows.num_prompt)[which] + np.int32(at), size)
