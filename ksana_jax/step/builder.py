"""A scheduled step as padded arrays, of shapes from ladders of buckets, so that few steps need compiling. No jax."""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np

from ksana_jax.config import EngineConfig
from ksana_jax.patterns import FAR
from ksana_jax.sampling.bias import bias_of
from ksana_jax.sequence import Rows
from ksana_jax.step.contract import SamplingArrays, ScheduledBatch, StepArrays, StepInput, StepShape
from ksana_jax.step.shared_prefix import SHARED_ROWS, find_shared_runs, split_tables


def ladder(smallest: int, largest: int, ratio: float = 2.0) -> tuple[int, ...]:
    """Rising sizes from smallest to largest, each at most `ratio` times the one before; ends with largest."""
    sizes = [min(smallest, largest)]
    while sizes[-1] < largest:
        sizes.append(min(max(int(sizes[-1] * ratio), sizes[-1] + 1), largest))
    return tuple(sizes)


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes that steps are padded to.

    Args:
      singles: numbers of tokens that are alone in their row. tiles: numbers of query tiles. widths: of block tables.
      query_tile: tokens of a tile.
      shared_rows: singles of a group that may share leading blocks; 0 turns that off. Steps in which no group shares
        have shapes of their own: looking for nothing in every layer would cost them about 6 % (8 layers, 32 rows, CPU).
    """

    singles: tuple[int, ...]
    tiles: tuple[int, ...]
    widths: tuple[int, ...]
    query_tile: int
    shared_rows: int = 0

    @classmethod
    def of(
        cls,
        max_num_seqs: int,
        max_num_tiles: int,
        table_width: int,
        query_tile: int,
        min_singles: int = 1,
        shared_rows: int = 0,
    ) -> Buckets:
        """Ladders of factors of two; of four from 64 for widths, since a table costs little beyond its bytes.

        Requests of up to 384 tokens take as long with tables of 64 blocks as with a ladder from 16 (8 layers, 32 rows,
        CPU), and half as many steps have to be compiled.

        Args:
          min_singles: least rows of a step of singles, where matrix units are slow with fewer.
        """
        return cls(
            singles=ladder(min(min_singles, max_num_seqs), max_num_seqs),
            tiles=ladder(1, max_num_tiles),
            widths=ladder(64, table_width, 4.0),
            query_tile=query_tile,
            shared_rows=shared_rows,
        )

    @classmethod
    def of_engine(cls, config: EngineConfig, max_model_len: int) -> Buckets:
        """Those of an engine's steps. Widths are those of a full table, so that every pattern finds its bucket among
        the same shapes."""
        return cls.of(
            config.max_num_seqs,
            -(-config.max_num_batched_tokens // config.query_tile),
            -(-max_model_len // config.block_size),
            config.query_tile,
            # Matrix units want rows: XLA:CPU takes 21 ms for one row of bfloat16, 1.2 ms for eight (2048 x 8192).
            min_singles=8 if config.dtype == "bf16" else 1,
            shared_rows=SHARED_ROWS if config.shared_prefix_attention else 0,
        )

    def shape(self, num_singles: int, num_tiles: int, width: int, shares: bool = False) -> StepShape:
        """The smallest bucket that holds a step, in which groups of singles share blocks or not.

        Steps with both singles and tiles take the most singles: those are cheap beside a tile, and it keeps the number
        of combinations down.
        """
        if not num_singles:
            singles = 0
        elif num_tiles:
            singles = self.singles[-1]
        else:
            singles = _at_least(self.singles, num_singles)
        tiles = _at_least(self.tiles, num_tiles) if num_tiles else 0
        shared_rows = self.shared_rows if shares else 0
        return StepShape(singles, tiles, self.query_tile, _at_least(self.widths, width), shared_rows)

    def extremes(self) -> list[StepShape]:
        """The largest shape, and the smallest with singles and with a tile: with one row XLA:CPU makes bfloat16
        weights float32, which can take more than all rows do."""
        width = self.widths[-1]
        pairs = ((self.singles[-1], self.tiles[-1]), (self.singles[0], 0), (0, self.tiles[0]))
        shapes = [StepShape(d, t, self.query_tile, width) for d, t in pairs]
        return [shapes[0]._replace(shared_rows=self.shared_rows), *shapes[1:]]

    def all_shapes(self, max_width: int | None = None) -> list[StepShape]:
        """Every shape that a step can have, up to a width of the block tables."""
        pairs = [(d, 0) for d in self.singles]
        pairs += [(d, t) for t in self.tiles for d in (0, self.singles[-1])]
        top = _at_least(self.widths, min(max_width or self.widths[-1], self.widths[-1]))
        widths = [w for w in self.widths if w <= top]
        shapes = [StepShape(d, t, self.query_tile, w) for w in widths for d, t in pairs]
        if self.shared_rows:
            shapes += [shape._replace(shared_rows=self.shared_rows) for shape in shapes if shape.num_singles > 1]
        return shapes


def _padded(values: np.ndarray, shape: tuple[int, ...], fill: int) -> np.ndarray:
    """Values in the corner of an array of a shape that may be larger; itself where it is not."""
    if values.shape == shape:
        return values
    out = np.full(shape, fill, values.dtype)
    out[tuple(slice(size) for size in values.shape)] = values
    return out


def _at_least(sizes: tuple[int, ...], count: int) -> int:
    return sizes[bisect.bisect_left(sizes, count)]


@dataclasses.dataclass(frozen=True)
class BatchBuilder:
    """Turns scheduled steps into arrays.

    Args:
      block_size, num_blocks: of the pool. vocab_size: of the model, for penalties and biases.
      sink_width: leading entries of a block table that are never shared: they can hold sinks seen from elsewhere.
      min_saved_tokens: reads of tokens that sharing must spare in a group of rows.
    """

    buckets: Buckets
    block_size: int
    num_blocks: int
    vocab_size: int
    sink_width: int = 0
    min_saved_tokens: int = 256

    def build(self, batch: ScheduledBatch, rows: Rows) -> tuple[StepInput, np.ndarray]:
        """A scheduled step as an executor takes it.

        Returns:
          The step, and for each of `batch.rows` the index in [0, S) of the tile that holds its last token.
        """
        singles, chunks = batch.singles, batch.chunks
        num_tiles = -(-batch.counts // self.buckets.query_tile) if len(chunks) else batch.counts
        shared = None
        if self.buckets.shared_rows and len(singles) > 1:
            shared = self._with_sharing_singles(singles, chunks, int(num_tiles.sum()), rows)
        if shared is not None:
            shape, arrays, ends = shared
        else:
            width = int(rows.num_blocks[batch.rows].max())
            shape, ends = self.buckets.shape(len(singles), int(num_tiles.sum()), width), np.arange(len(singles))
            arrays = self._with_singles(shape, singles, rows)
        if len(chunks):
            ends = np.concatenate([ends, shape.num_singles + np.cumsum(num_tiles) - 1])
            tile = shape.num_singles
            for row, count, tiles in zip(chunks.tolist(), batch.counts.tolist(), num_tiles.tolist(), strict=True):
                token = shape.num_singles + (tile - shape.num_singles) * shape.query_tile
                self._put_chunk(arrays, rows, row, token, count, slice(tile, tile + tiles))
                tile += tiles
        step = StepInput(shape, arrays)
        self._ask(step, batch, rows, ends)
        return step, ends

    def _with_singles(self, shape: StepShape, singles: np.ndarray, rows: Rows) -> StepArrays:
        """The arrays with their singles; the rest is padding."""
        tokens, tiles, width = shape.num_tokens, shape.num_singles + shape.num_tiles, shape.table_width
        at = rows.num_computed[singles]
        # A single is the newest token of its row: it lies in the row's last block.
        newest = rows.block_tables[singles, rows.num_blocks[singles] - 1]
        slots = newest * self.block_size + at % self.block_size
        return StepArrays(
            tokens=_padded(rows.token_ids[singles, at], (tokens,), 0),
            positions=_padded(at, (tokens,), -1),
            slots=_padded(slots, (tokens,), self.num_blocks * self.block_size),
            block_tables=_padded(rows.block_tables[singles, :width], (tiles, width), 0),
            block_starts=_padded(rows.block_starts[singles, :width], (tiles, width), FAR),
            last=_padded(np.arange(len(singles), dtype=np.int32), (tiles,), 0),
        )

    def _with_sharing_singles(
        self, singles: np.ndarray, chunks: np.ndarray, num_tiles: int, rows: Rows
    ) -> tuple[StepShape, StepArrays, np.ndarray] | None:
        """The same where groups of singles share leading blocks: shape, arrays, and where each single's token went;
        None where no group does."""
        group_rows, first, count = self.buckets.shared_rows, self.sink_width, rows.num_blocks[singles]
        tables = rows.block_tables[singles, : int(count.max())]
        found = find_shared_runs(
            tables, count, group_rows, first=first, min_saved=self.min_saved_tokens // self.block_size
        )
        if not found.runs.any():
            return None
        singles, ordered = singles[found.order], tables[found.order]
        own = count[found.order] - np.repeat(found.runs, group_rows)[: len(singles)]
        width = max(int(own.max()), int(found.runs.max()), int(rows.num_blocks[chunks].max(initial=0)))
        shape = self.buckets.shape(len(singles), num_tiles, width, shares=True)
        arrays = self._with_singles(shape, singles, rows)
        size, width = len(arrays.block_tables), shape.table_width
        starts = rows.block_starts[singles, : ordered.shape[1]]
        split = split_tables(ordered, starts, found.runs, group_rows, first, width)
        arrays = arrays._replace(
            shared_tables=_padded(split[0], (shape.num_groups, width), 0),
            shared_starts=_padded(split[1], (shape.num_groups, width), FAR),
            block_tables=_padded(split[2], (size, width), 0),
            block_starts=_padded(split[3], (size, width), FAR),
        )
        return shape, arrays, np.argsort(found.order)

    def _put_chunk(self, arrays: StepArrays, rows: Rows, row: int, token: int, count: int, tiles: slice) -> None:
        start, width = int(rows.num_computed[row]), int(rows.num_blocks[row])
        here = slice(token, token + count)
        positions = np.arange(start, start + count, dtype=np.int32)
        arrays.tokens[here] = rows.token_ids[row, start : start + count]
        arrays.positions[here] = positions
        block = np.searchsorted(rows.block_starts[row], positions, side="right") - 1
        arrays.slots[here] = rows.block_tables[row, block] * self.block_size + positions % self.block_size
        arrays.block_tables[tiles, :width] = rows.block_tables[row, :width]
        arrays.block_starts[tiles, :width] = rows.block_starts[row, :width]
        arrays.last[tiles] = token + count - 1

    def _ask(self, step: StepInput, batch: ScheduledBatch, rows: Rows, ends: np.ndarray) -> None:
        """Fills in what the rows ask for beyond greedy tokens."""
        running = batch.rows
        if rows.samples[running].any():
            step.sampling = self._sampling(rows, running, ends, len(step.arrays.last))
        num_logprobs = int(rows.num_logprobs[running].max())
        step.num_logprobs = None if num_logprobs < 0 else num_logprobs
        scored = rows.num_prompt_logprobs[running] >= 0
        if not scored.any():
            return
        # A token is scored where the one before it is computed.
        scored &= rows.num_computed[running] + 1 < rows.num_prompt[running]
        if not scored.any():
            return
        step.num_prompt_logprobs = int(rows.num_prompt_logprobs[running[scored]].max())
        step.targets = np.full(step.shape.num_tokens, -1, np.int32)
        for row, count, end in zip(running[scored], batch.num_per_row[scored], ends[scored], strict=True):
            start = int(rows.num_computed[row])
            known = min(int(count), int(rows.num_prompt[row]) - 1 - start)
            token = step.arrays.last[end] + 1 - count
            step.targets[token : token + known] = rows.token_ids[row, start + 1 : start + 1 + known]

    def _sampling(self, rows: Rows, running: np.ndarray, ends: np.ndarray, size: int) -> SamplingArrays:
        def spread(column: np.ndarray, default: float) -> np.ndarray:
            out = np.full((size, *column.shape[1:]), default, column.dtype)
            out[ends] = column[running]
            return out

        settings = SamplingArrays(
            temperature=spread(rows.temperature, 0),
            top_k=spread(rows.top_k, 0),
            top_p=spread(rows.top_p, 1),
            min_p=spread(rows.min_p, 0),
            seeds=spread(rows.seeds, 0),
            num_outputs=spread(rows.num_tokens - rows.num_prompt, 0),
            repetition_penalty=spread(rows.repetition_penalty, 1),
            presence_penalty=spread(rows.presence_penalty, 0),
            frequency_penalty=spread(rows.frequency_penalty, 0),
        )
        if not rows.dense[running].any():
            return settings
        counts = np.zeros((size, self.vocab_size), np.int32)
        in_prompt = np.zeros((size, self.vocab_size), bool)
        bias = np.zeros((size, self.vocab_size), np.float32)
        for row, tile in zip(running.tolist(), ends.tolist(), strict=True):
            seq = rows.seqs[row]
            if seq is None or not rows.dense[row]:
                continue
            split, end = seq.num_prompt, int(rows.num_tokens[row])
            in_prompt[tile, rows.token_ids[row, :split]] = True
            counts[tile] = np.bincount(rows.token_ids[row, split:end], minlength=self.vocab_size)
            output = rows.token_ids[row, split:end]
            bias[tile] = bias_of(seq.params, seq.bad_words, seq.stop_ids, output, self.vocab_size)
        return settings._replace(counts=counts, in_prompt=in_prompt, bias=bias)
