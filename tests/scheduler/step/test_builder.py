"""A scheduled step as arrays: layout, padding, and the shapes it can have."""

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.scheduler.sequence import Rows, Sequence
from ksana_jax.scheduler.step.buckets import Buckets
from ksana_jax.scheduler.step.builder import BatchBuilder
from ksana_jax.scheduler.step.types import ScheduledBatch, StepShape, TileGroup
from tests.fakes import VOCAB, asking

B, M, Q = 4, 50, 4
NOWHERE = M * B


def rows_with(*sequences, **settings) -> Rows:
    """Rows from (tokens, computed tokens, blocks)."""
    rows = Rows(num_rows=len(sequences) + 1, table_width=6)
    for row, (token_ids, computed, blocks) in enumerate(sequences):
        seq = Sequence(row, np.array(token_ids, np.int32), asking(**settings), (), max_len=64, seed=(row << 32) + 7)
        rows.place(seq, row)
        rows.num_computed[row] = computed
        rows.num_blocks[0, row] = len(blocks)
        rows.block_tables[0, row, : len(blocks)] = blocks
        rows.block_starts[0, row, : len(blocks)] = B * np.arange(len(blocks))
    return rows


def builder(decodes=(2, 4), tiles=(1, 2, 4), widths=(3, 6)) -> BatchBuilder:
    return BatchBuilder(Buckets(decodes, tuple(TileGroup(n, Q) for n in tiles), widths), B, M, VOCAB)


def build(rows: Rows, decodes=(), maker: BatchBuilder | None = None, **chunks):
    """The step of some decodes, and of some rows' chunks, as row_2=6."""
    pairs = np.array([(int(name[4:]), count) for name, count in chunks.items()], np.intp).reshape(-1, 2)
    batch = ScheduledBatch(np.array(decodes, np.intp), pairs[:, 0], pairs[:, 1])
    batch.samples = rows.num_computed[batch.rows] + batch.num_per_row == rows.num_tokens[batch.rows]
    return (maker or builder()).build(batch, rows)


def test_singles_come_first_and_chunks_follow_in_tiles_of_one_row():
    rows = rows_with(
        (range(10, 19), 8, [30, 31, 32]),  # one token left, the first of its third block
        (range(40, 47), 1, [20, 21]),  # six left: a whole tile and half of one
    )
    step, ends = build(rows, [0], row_1=6)
    a = step.arrays
    assert step.shape == StepShape((TileGroup(4, 1), TileGroup(2, Q)), table_width=3, max_sampled=4)
    assert a.tokens.tolist() == [18, 0, 0, 0, 41, 42, 43, 44, 45, 46, 0, 0]
    assert a.positions.tolist() == [8, -1, -1, -1, 1, 2, 3, 4, 5, 6, -1, -1]
    assert a.slots[0].tolist() == [32 * B, *[NOWHERE] * 3, 81, 82, 83, 84, 85, 86, NOWHERE, NOWHERE]
    assert a.block_tables[0, [0, 4, 5]].tolist() == [[30, 31, 32], [20, 21, 0], [20, 21, 0]]
    assert a.block_starts[0].tolist() == [[0, 4, 8], *[[FAR] * 3] * 3, *[[0, 4, FAR]] * 2]
    assert ends.tolist() == [0, 9]
    assert a.sampled.tolist() == [0, 9, 0, 0] and step.num_sampled == 2


def test_logits_are_wanted_of_the_last_tokens_of_texts_only():
    rows = rows_with((range(9), 8, [1, 2, 3]), (range(20), 1, [4, 5]), (range(6), 0, [6, 7]))
    step, ends = build(rows, [0], row_1=5, row_2=6)  # the second row has tokens left to compute
    assert ends.tolist() == [0, 4 + 4, 4 + 8 + 5]
    assert step.arrays.sampled.tolist() == [0, 17, 0, 0] and step.num_sampled == 2
    step, _ = build(rows, row_1=5)
    assert step.num_sampled == 0


def test_a_full_step_of_singles_holds_no_padding():
    rows = rows_with(([1, 2, 3], 2, [5]), ([4, 5, 6, 7, 8], 4, [6, 7]))
    step, ends = build(rows, [1, 0])
    assert step.shape == StepShape((TileGroup(2, 1),), 3, 4)
    assert step.arrays.tokens.tolist() == [8, 3] and step.arrays.positions.tolist() == [4, 2]
    assert step.arrays.slots[0].tolist() == [7 * B, 5 * B + 2]
    assert step.arrays.block_starts[0].tolist() == [[0, 4, FAR], [0, FAR, FAR]]
    assert ends.tolist() == [0, 1]


def test_arrays_of_a_step_do_not_change_with_the_rows():
    # The device may still be reading them when the next step is scheduled.
    rows = rows_with(([1, 2, 3], 2, [5]), ([4, 5, 6, 7, 8], 4, [6, 7]))
    step, _ = build(rows, [0, 1], builder(widths=(6,)))
    arrays = [a for a in step.arrays if a is not None]
    before = [a.copy() for a in arrays]
    for array in (rows.token_ids, rows.num_computed, rows.block_tables, rows.block_starts):
        array += 1
    assert all(np.array_equal(a, b) for a, b in zip(arrays, before, strict=True))


def test_a_chunk_after_returned_blocks_finds_its_slots_by_text_position():
    rows = rows_with((range(30), 17, [9, 8, 7]))
    rows.block_starts[0, 0, :3] = [0, 16, 20]  # a sink block, and the window
    step, _ = build(rows, row_0=5)
    assert step.arrays.slots[0, :5].tolist() == [8 * B + 1, 8 * B + 2, 8 * B + 3, 7 * B, 7 * B + 1]


def test_each_group_of_layers_has_tables_and_slots_of_its_own():
    rows = Rows(num_rows=2, table_width=3, num_groups=2)
    for row, (text, computed) in enumerate(((range(9), 8), (range(11), 8))):
        rows.place(Sequence(row, np.array(text, np.int32), asking(), (), max_len=64), row)
        rows.num_computed[row] = computed
        rows.num_blocks[:, row] = 3, 1  # the second group has returned two blocks
        rows.block_tables[0, row], rows.block_starts[0, row] = 10 * row + np.arange(3), B * np.arange(3)
        rows.block_tables[1, row, 0], rows.block_starts[1, row, 0] = 30 + row, 8
    arrays = build(rows, [0], row_1=3)[0].arrays
    assert arrays.slots[:, [0, 4, 5, 6]].tolist() == [
        [2 * B, 12 * B, 12 * B + 1, 12 * B + 2],
        [30 * B, 31 * B, 31 * B + 1, 31 * B + 2],
    ]
    assert arrays.block_tables[:, [0, 4]].tolist() == [[[0, 1, 2], [10, 11, 12]], [[30, 0, 0], [31, 0, 0]]]
    assert arrays.block_starts[1, [0, 4]].tolist() == [[8, FAR, FAR]] * 2


def test_greedy_rows_bring_no_sampling_arrays():
    step, _ = build(rows_with(([1, 2], 1, [3])), [0])
    assert step.sampling is None and step.num_logprobs is None and step.targets is None


def test_sampling_settings_are_in_the_order_of_the_sampled_tokens():
    rows = rows_with(([1, 2, 3], 2, [5]), (range(7), 1, [6, 7]), temperature=0.5, top_k=9, top_p=0.75, min_p=0.25)
    rows.num_tokens[0] += 2  # after two tokens of output
    rows.num_computed[0] += 2
    rows.place(Sequence(2, np.arange(3, dtype=np.int32), asking(temperature=0.5), (), max_len=64), 2)
    step, _ = build(rows, [0], builder(decodes=(3, 4)), row_1=6, row_2=2)
    s = step.sampling
    assert s.temperature.tolist() == [0.5, 0.5, 0]
    assert s.top_k.tolist() == [9, 9, 0]
    assert s.top_p.tolist() == [0.75, 0.75, 1] and s.min_p.tolist() == [0.25, 0.25, 0]
    assert s.seeds.tolist() == [[0, 7], [1, 7], [0, 0]]
    assert s.num_outputs.tolist() == [2, 0, 0]
    assert s.counts is None and s.in_prompt is None and s.bias is None
    assert {a.dtype.name for a in s if a is not None} == {"float32", "int32", "uint32"}


def test_penalties_and_biases_see_prompt_and_output_apart():
    settings = {"presence_penalty": 1.0, "logit_bias": {5: 2.0}}
    rows = rows_with(([1, 2, 2], 0, [5]), **settings)
    rows.append(np.array([0]), np.array([9]))
    rows.append(np.array([0]), np.array([9]))
    rows.num_computed[0] = 4
    step, _ = build(rows, [0])
    s = step.sampling
    assert np.flatnonzero(s.in_prompt[0]).tolist() == [1, 2]
    assert np.flatnonzero(s.counts[0]).tolist() == [9] and s.counts[0, 9] == 2
    assert np.flatnonzero(s.bias[0]).tolist() == [5] and s.bias[0, 5] == 2
    assert not s.counts[1].any() and s.presence_penalty.tolist() == [1, 0]


def test_prompt_tokens_are_scored_where_the_token_before_them_is_computed():
    rows = rows_with((range(50, 57), 1, [6, 7]), prompt_logprobs=2)
    step, _ = build(rows, row_0=6)
    # Positions 1 to 6 predict tokens 2 to 6; nothing is known after the last.
    assert step.targets.tolist() == [52, 53, 54, 55, 56, -1, -1, -1]
    assert step.num_prompt_logprobs == 2
