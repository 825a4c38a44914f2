"""The sizes that decide the time of a step, and a builder that makes only these. NumPy only."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from ksana_jax.kv.moves import Moves
from ksana_jax.scheduler.sequence import ONE, Rows
from ksana_jax.scheduler.step.builder import BatchBuilder
from ksana_jax.scheduler.step.types import ScheduledBatch, StepArrays, StepInput, StepShape


class StepSize(NamedTuple):
    """The numbers on which the time of a step depends.

    shape: the padded sizes for which it is compiled. num_sampled: padded number of tokens whose logits are computed.
    num_tokens: tokens computed, without padding; num_chunked: tokens of these in chunks. num_attended: sum over these
    tokens of the cached tokens up to each, see `StepInput`. num_rows: sequences.
    num_saved, num_copied, num_loaded: blocks that move to the host, on the device and from the host.
    after_chunk: whether the step before it had chunks: its arrays are then rebuilt, and CPU caches are cold.
    """

    shape: StepShape
    num_sampled: int
    num_tokens: int
    num_chunked: int
    num_attended: int
    num_rows: int
    num_saved: int = 0
    num_copied: int = 0
    num_loaded: int = 0
    after_chunk: bool = False

    def with_moves(self, moves: Moves | None) -> StepSize:
        if moves is None:
            return self
        return self._replace(num_saved=len(moves.saves), num_copied=len(moves.copies), num_loaded=len(moves.loads))


class Tokens(Protocol):
    """Source of the tokens that steps will sample."""

    def of(self, batch: ScheduledBatch, lengths: np.ndarray, rows: Rows) -> np.ndarray:
        """Returns the next token of each sampled row, given how many tokens each of `batch.rows` has computed then."""
        ...


_NO_ARRAYS = StepArrays(*[np.zeros(0, np.int32)] * 7)


@dataclasses.dataclass
class SizedStep(StepInput):
    """A step without arrays: its size, and the tokens that it will sample."""

    size: StepSize = dataclasses.field(kw_only=True)
    tokens: np.ndarray = dataclasses.field(kw_only=True)


@dataclasses.dataclass(eq=False, kw_only=True)
class SizeBuilder(BatchBuilder):
    """Builds steps that are only timed: instead of arrays they have a size.

    Args:
      tokens: asked for the tokens of each step when it is built: only then are the rows known.
      sized: called with the size of each step, its moves not included.
    """

    tokens: Tokens
    sized: Callable[[StepSize], None]
    _after_chunk: bool = dataclasses.field(default=False, init=False)

    @classmethod
    def like(cls, builder: BatchBuilder, tokens: Tokens, sized: Callable[[StepSize], None]) -> SizeBuilder:
        """Returns a builder with the settings of another one."""
        settings = {f.name: getattr(builder, f.name) for f in dataclasses.fields(builder) if f.init}
        return cls(**settings, tokens=tokens, sized=sized)

    def build(self, batch: ScheduledBatch, rows: Rows) -> tuple[StepInput, np.ndarray]:
        running = batch.rows
        computed, counts = rows.num_computed[running], batch.num_per_row if len(batch.chunks) else ONE
        lengths = computed + counts
        shape = self._shape(batch, rows)
        num_sampled = self.buckets.num_sampled(len(computed) if batch.samples is None else int(batch.samples.sum()))
        size = StepSize(
            shape,
            num_sampled,
            num_tokens=batch.num_tokens,
            num_chunked=int(batch.counts.sum()) if len(batch.chunks) else 0,
            num_attended=_attended(computed - rows.num_evicted[:, running], counts),
            num_rows=len(computed),
            after_chunk=self._after_chunk,
        )
        self._after_chunk = size.num_chunked > 0
        tokens = self.tokens.of(batch, lengths, rows)
        self.sized(size)
        return SizedStep(shape, _NO_ARRAYS, num_sampled, size.num_attended, size=size, tokens=tokens), lengths

    def _shape(self, batch: ScheduledBatch, rows: Rows) -> StepShape:
        if self.buckets.shared_rows and len(batch.decodes) > 1 and (found := self.sharing_decodes(batch, rows)):
            return found[0]
        width = int(np.maximum.reduce(rows.num_blocks.take(batch.rows, axis=1), axis=None))
        return self._shape_of(len(batch.decodes), tuple(batch.counts.tolist()), width)

    @functools.cached_property
    def _shape_of(self):
        return functools.lru_cache(4096)(self.buckets.shape)


def _attended(cached: np.ndarray, counts: np.ndarray) -> int:
    """Returns the sum over new tokens of the cached tokens up to each, as a mean over groups of layers.

    Args:
      cached: [Gk, n] tokens before, in each group of layers. counts: new tokens of each of n rows.
    """
    first = cached.astype(np.int64)
    return int((counts * (2 * first + counts + 1)).sum()) // (2 * len(cached))
