"""A scheduled step as padded arrays, of shapes from ladders of buckets, so that few steps need compiling. No jax."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

import numpy as np

from ksana_jax.config import EngineConfig
from ksana_jax.patterns import FAR
from ksana_jax.sequence import Rows
from ksana_jax.step.bias import bias_of
from ksana_jax.step.contract import Part, SamplingArrays, ScheduledBatch, StepArrays, StepInput, StepShape, most_tiles
from ksana_jax.step.shared_prefix import SHARED_ROWS, find_shared_runs, split_tables

_NO_TOKENS = np.zeros(0, np.int32)


def ladder(smallest: int, largest: int, ratio: float = 2.0) -> tuple[int, ...]:
    """Rising sizes from smallest to largest, each at most `ratio` times the one before; ends with largest."""
    sizes = [min(smallest, largest)]
    while sizes[-1] < largest:
        sizes.append(min(max(int(sizes[-1] * ratio), sizes[-1] + 1), largest))
    return tuple(sizes)


# Least rows of a matrix product by platform and dtype, where it is not one. XLA:CPU makes all weights float32 for one
# row of bfloat16: a step of one row (8 layers, d_model 512) takes 27 ms against 7 with eight rows on a CPU with AMX, 71
# against 15 on a busy one without (10 with two rows). Matrix units multiply eight rows as fast as one.
LEAST_ROWS = {("cpu", "bf16"): 8, ("gpu", "bf16"): 8, ("tpu", "bf16"): 8}


def tile_parts(max_num_batched_tokens: int, query_tile: int, min_rows: int = 1) -> tuple[Part, ...]:
    """Parts for longer chunks: wide tiles in a ladder of factors of two, all of the narrow ones or a quarter.

    Parts with fewer tokens come first; among equals the one with wider tiles, which read keys for more queries at once.
    """
    found = []
    for count, width in most_tiles(max_num_batched_tokens, query_tile):
        fewest = -(-min_rows // width)
        most = max(count, fewest)
        counts = ladder(fewest, most) if width == query_tile else ladder(max(most // 4, fewest), most, 4.0)
        found += [Part(count, width) for count in counts]
    return tuple(sorted(found, key=lambda part: (part.count * part.width, -part.width)))


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes that steps are padded to.

    Args:
      decodes: numbers of rows that compute one token; also of tokens whose logits are wanted.
      tiles: parts for longer chunks, see `tile_parts`; the first that holds a step is taken.
      widths: of block tables.
      shared_rows: decodes of a group that may share leading blocks; 0 turns that off. Steps in which no group shares
        have shapes of their own: looking for nothing in every layer would cost them about 6 % (8 layers, 32 rows, CPU).
    """

    decodes: tuple[int, ...]
    tiles: tuple[Part, ...]
    widths: tuple[int, ...]
    shared_rows: int = 0

    @classmethod
    def of(
        cls,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        table_width: int,
        query_tile: int,
        min_rows: int = 1,
        shared_rows: int = 0,
    ) -> Buckets:
        """Ladders of factors of two; of four from 64 for widths, since a table costs little beyond its bytes.

        Requests of up to 384 tokens take as long with tables of 64 blocks as with a ladder from 16 (8 layers, 32 rows,
        CPU), and half as many steps have to be compiled. With factors of two the host would gather 1,024 tables of 65
        blocks in 44 us instead of 77 (256 tables: 13 instead of 20), but an engine with texts of 2,048 blocks would
        compile half as many steps again.

        Args:
          min_rows: least rows of a matrix product, to which the tokens of a step are padded.
        """
        return cls(
            decodes=ladder(min_rows, max(max_num_seqs, min_rows)),
            tiles=tile_parts(max_num_batched_tokens, query_tile, min_rows),
            widths=ladder(64, table_width, 4.0),
            shared_rows=shared_rows,
        )

    @classmethod
    def of_engine(cls, config: EngineConfig, max_model_len: int, platform: str) -> Buckets:
        """Buckets for an engine's steps on a device of a platform: "cpu", "gpu", "tpu", ...

        Widths are those of a full table, so that every pattern finds its bucket among the same shapes.
        """
        return cls.of(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            -(-max_model_len // config.block_size),
            config.query_tile,
            LEAST_ROWS.get((platform, config.dtype), 1),
            shared_rows=SHARED_ROWS if config.shared_prefix_attention else 0,
        )

    def shape(self, num_decodes: int, counts: Iterable[int], width: int, shares: bool = False) -> StepShape:
        """The smallest bucket that holds a step.

        Steps with both decodes and chunks take the most decodes: those are cheap beside a tile, and it keeps the number
        of combinations down. So do steps without decodes where that costs little.

        Args:
          counts: tokens of each longer chunk. width: of the widest block table.
          shares: whether groups of decodes share leading blocks.
        """
        if not (counts := list(counts)):
            parts = (Part(_at_least(self.decodes, num_decodes), 1),)
        else:
            tiles = next(p for p in self.tiles if sum(-(-c // p.width) for c in counts) <= p.count)
            parts = (Part(self.decodes[-1], 1), tiles) if num_decodes or self._joined(tiles) else (tiles,)
        return self._shape(parts, _at_least(self.widths, width), self.shared_rows if shares else 0)

    def _shape(self, parts: tuple[Part, ...], width: int, shared_rows: int = 0) -> StepShape:
        return StepShape(parts, width, max_sampled=self.decodes[-1], shared_rows=shared_rows)

    def _joined(self, tiles: Part) -> bool:
        """Whether tiles are compiled together with decodes only: where those are at most an eighth of the tokens, or
        tiles are narrow, which serve many rows, so that there mostly are decodes as well."""
        widest = max(part.width for part in self.tiles)
        return tiles.width < widest or 8 * self.decodes[-1] <= tiles.count * tiles.width

    def num_sampled(self, count: int) -> int:
        """The smallest bucket that holds so many tokens whose logits are wanted."""
        return _at_least(self.decodes, count) if count else 0

    def largest(self) -> list[StepShape]:
        """The largest shape with tiles of each width; one of them takes most memory."""
        most = {tiles.width: tiles for tiles in self.tiles}
        parts = [(Part(self.decodes[-1], 1), tiles) for tiles in most.values()]
        return [self._shape(p, self.widths[-1], self.shared_rows) for p in parts]

    def all_shapes(self, max_width: int | None = None) -> list[StepShape]:
        """Every shape that a step can have, up to a width of the block tables."""
        most = Part(self.decodes[-1], 1)
        found = [(Part(d, 1),) for d in self.decodes]
        found += [(most, tiles) for tiles in self.tiles]
        found += [(tiles,) for tiles in self.tiles if not self._joined(tiles)]
        top = _at_least(self.widths, min(max_width or self.widths[-1], self.widths[-1]))
        widths = [w for w in self.widths if w <= top]
        shapes = [self._shape(parts, width) for width in widths for parts in found]
        if self.shared_rows:
            several = [s for s in shapes if s.parts[0].width == 1 and s.parts[0].count > 1]
            shapes += [shape._replace(shared_rows=self.shared_rows) for shape in several]
        return shapes


def _padded(values: np.ndarray, shape: tuple[int, ...], fill: float) -> np.ndarray:
    """Values in the corner of an array of a shape that may be larger; itself where it is not."""
    if values.shape == shape:
        return values
    out = np.full(shape, fill, values.dtype)
    out[tuple(slice(size) for size in values.shape)] = values
    return out


def _tables_of(tables: np.ndarray, rows: np.ndarray, width: int) -> np.ndarray:
    """Returns tables[:, rows, :width]; whole rows are taken in half the time of an index."""
    return tables.take(rows, axis=1) if width == tables.shape[2] else tables[:, rows, :width]


def _at_least(sizes: tuple[int, ...], count: int) -> int:
    return sizes[bisect.bisect_left(sizes, count)]


@dataclasses.dataclass(frozen=True)
class BatchBuilder:
    """Turns scheduled steps into arrays.

    Args:
      block_size, num_blocks: of the pool. vocab_size: of the model, for penalties and biases.
      sink_width: leading entries of a block table that are never shared: they can hold repositioned sinks.
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
          The step, and for each of `batch.rows` the index in [0, T) of the last of its tokens that are computed.
        """
        decodes, chunks = batch.decodes, batch.chunks
        shared = None
        if self.buckets.shared_rows and len(decodes) > 1:
            shared = self._with_sharing_decodes(batch, rows)
        if shared is not None:
            shape, arrays, ends = shared
        else:
            width = int(rows.num_blocks.take(batch.rows, axis=1).max())
            shape, ends = self.buckets.shape(len(decodes), batch.counts, width), np.arange(len(decodes), dtype=np.int32)
            arrays = self._with_decodes(shape, decodes, rows)
        if len(chunks):
            ends = np.append(ends, self._put_chunks(shape, arrays, batch, rows))
        sampled = ends if batch.samples is None else ends[batch.samples]
        arrays = arrays._replace(sampled=_padded(sampled, (shape.max_sampled,), 0))
        step = StepInput(shape, arrays, self.buckets.num_sampled(len(sampled)))
        self._ask(step, batch, rows, ends)
        return step, ends

    def _with_decodes(self, shape: StepShape, decodes: np.ndarray, rows: Rows) -> StepArrays:
        """The arrays of a step with its decodes filled in; the rest is padding."""
        tokens, groups, width = shape.num_tokens, rows.num_groups, shape.table_width
        tables = groups, shape.num_tiles, width
        at = rows.num_computed[decodes]
        # A decode is the newest token of its row: it lies in the row's last block.
        last = rows.num_blocks.take(decodes, axis=1) - 1
        newest = rows.block_tables[np.arange(groups)[:, None], decodes, last]
        slots = newest * self.block_size + at % self.block_size
        return StepArrays(
            tokens=_padded(rows.token_ids[decodes, at], (tokens,), 0),
            positions=_padded(at, (tokens,), -1),
            slots=_padded(slots, (groups, tokens), self.num_blocks * self.block_size),
            block_tables=_padded(_tables_of(rows.block_tables, decodes, width), tables, 0),
            block_starts=_padded(_tables_of(rows.block_starts, decodes, width), tables, FAR),
            sampled=_NO_TOKENS,
        )

    def _with_sharing_decodes(
        self, batch: ScheduledBatch, rows: Rows
    ) -> tuple[StepShape, StepArrays, np.ndarray] | None:
        """Shape, arrays, and where each decode's token went, of a step in which groups of decodes share leading blocks;
        None where no group does."""
        decodes, group_rows, first = batch.decodes, self.buckets.shared_rows, self.sink_width
        count = rows.num_blocks[:, decodes]
        tables = rows.block_tables[:, decodes, : int(count.max())]
        found = find_shared_runs(
            tables, count, group_rows, first=first, min_saved=self.min_saved_tokens // self.block_size
        )
        if not found.runs.any():
            return None
        decodes, ordered = decodes[found.order], tables[:, found.order]
        own = count[:, found.order] - np.repeat(found.runs, group_rows, axis=1)[:, : len(decodes)]
        width = max(int(own.max()), int(found.runs.max()), int(rows.num_blocks[:, batch.chunks].max(initial=0)))
        shape = self.buckets.shape(len(decodes), batch.counts, width, shares=True)
        arrays = self._with_decodes(shape, decodes, rows)
        own_shape, width = arrays.block_tables.shape, shape.table_width
        shared_shape = rows.num_groups, shape.num_groups, width
        starts = rows.block_starts[:, decodes, : ordered.shape[2]]
        split = [split_tables(*of, group_rows, first, width) for of in zip(ordered, starts, found.runs, strict=True)]
        shared_tables, shared_starts, own_tables, own_starts = map(np.stack, zip(*split, strict=True))
        arrays = arrays._replace(
            shared_tables=_padded(shared_tables, shared_shape, 0),
            shared_starts=_padded(shared_starts, shared_shape, FAR),
            block_tables=_padded(own_tables, own_shape, 0),
            block_starts=_padded(own_starts, own_shape, FAR),
        )
        return shape, arrays, np.argsort(found.order).astype(np.int32)

    def _put_chunks(self, shape: StepShape, arrays: StepArrays, batch: ScheduledBatch, rows: Rows) -> np.ndarray:
        """Writes longer chunks into the tiles of the last part; returns where the last token of each went."""
        *_, ((_, size), tokens, tiles) = shape.places()
        tile, ends = 0, []
        for row, count in zip(batch.chunks.tolist(), batch.counts.tolist(), strict=True):
            token, next_tile = tokens.start + tile * size, tile - (-count // size)
            self._put_chunk(arrays, rows, row, token, count, slice(tiles.start + tile, tiles.start + next_tile))
            ends.append(token + count - 1)
            tile = next_tile
        return np.array(ends, np.int32)

    def _put_chunk(self, arrays: StepArrays, rows: Rows, row: int, token: int, count: int, tiles: slice) -> None:
        start = int(rows.num_computed[row])
        here = slice(token, token + count)
        positions = np.arange(start, start + count, dtype=np.int32)
        arrays.tokens[here] = rows.token_ids[row, start : start + count]
        arrays.positions[here] = positions
        for group, width in enumerate(rows.num_blocks[:, row].tolist()):
            table, starts = rows.block_tables[group, row], rows.block_starts[group, row]
            block = np.searchsorted(starts, positions, side="right") - 1
            arrays.slots[group, here] = table[block] * self.block_size + positions % self.block_size
            arrays.block_tables[group, tiles, :width] = table[:width]
            arrays.block_starts[group, tiles, :width] = starts[:width]

    def _ask(self, step: StepInput, batch: ScheduledBatch, rows: Rows, ends: np.ndarray) -> None:
        """Fills in what the rows ask for beyond greedy tokens."""
        running, sampled = batch.rows, batch.sampled
        if not rows.asks[running].any():
            return
        if rows.samples[sampled].any():
            step.sampling = self._sampling(rows, sampled, step.num_sampled)
        num_logprobs = int(rows.num_logprobs[sampled].max(initial=-1))
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
            token = end + 1 - count
            step.targets[token : token + known] = rows.token_ids[row, start + 1 : start + 1 + known]

    def _sampling(self, rows: Rows, sampled: np.ndarray, size: int) -> SamplingArrays:
        def padded(column: np.ndarray, default: float) -> np.ndarray:
            return _padded(column[sampled], (size, *column.shape[1:]), default)

        settings = SamplingArrays(
            temperature=padded(rows.temperature, 0),
            top_k=padded(rows.top_k, 0),
            top_p=padded(rows.top_p, 1),
            min_p=padded(rows.min_p, 0),
            seeds=padded(rows.seeds, 0),
            num_outputs=padded(rows.num_tokens - rows.num_prompt, 0),
            repetition_penalty=padded(rows.repetition_penalty, 1),
            presence_penalty=padded(rows.presence_penalty, 0),
            frequency_penalty=padded(rows.frequency_penalty, 0),
        )
        if not rows.dense[sampled].any():
            return settings
        counts = np.zeros((size, self.vocab_size), np.int32)
        in_prompt = np.zeros((size, self.vocab_size), bool)
        bias = np.zeros((size, self.vocab_size), np.float32)
        for at, row in enumerate(sampled.tolist()):
            seq = rows.seqs[row]
            if seq is None or not rows.dense[row]:
                continue
            split, end = seq.num_prompt, int(rows.num_tokens[row])
            in_prompt[at, rows.token_ids[row, :split]] = True
            counts[at] = np.bincount(rows.token_ids[row, split:end], minlength=self.vocab_size)
            output = rows.token_ids[row, split:end]
            bias[at] = bias_of(seq.params, seq.bad_words, seq.stop_ids, output, self.vocab_size)
        return settings._replace(counts=counts, in_prompt=in_prompt, bias=bias)
