"""Shapes that steps are padded to: every step finds one, and all of them are known beforehand."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana_jax.core.config import EngineConfig
from ksana_jax.core.patterns import FULL, AttentionPattern
from ksana_jax.scheduler.running import StepBudget
from ksana_jax.scheduler.speculative.base import ANY_ROWS
from ksana_jax.scheduler.step import ladders
from ksana_jax.scheduler.step.ladders import all_shapes, ladder, least_rows, make_buckets, verification_shapes
from ksana_jax.scheduler.step.types import TileGroup
from ksana_jax.scheduler.step.verification import FEW_TOKENS, most_drafts, verification_shape, verified_sizes
from tests.fakes import asking, make_engine, prompt_of, run, two_layers

Q = 4


@given(smallest=st.integers(1, 40), largest=st.integers(1, 300), ratio=st.sampled_from([1.25, 1.5, 2.0, 4.0]))
def test_a_ladder_rises_to_its_end_in_steps_of_its_ratio(smallest, largest, ratio):
    sizes = ladder(smallest, largest, ratio)
    assert sizes[0] == min(smallest, largest) and sizes[-1] == largest
    assert all(a < b <= max(ratio * a, a + 1) for a, b in itertools.pairwise(sizes))


@given(
    max_num_seqs=st.integers(1, 40),
    budget=st.integers(1, 80),
    width=st.integers(1, 300),
    products=st.sampled_from(["auto", "xla"]),
    data=st.data(),
)
def test_every_step_has_a_bucket_that_holds_it_among_all_shapes(max_num_seqs, budget, width, products, data):
    sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget, "query_tile": Q}
    sizes |= {"block_size": 1, "max_model_len": width}
    config = EngineConfig(**sizes, dtype="bf16", operators={"linear": products})
    buckets, min_rows = make_buckets(config, "cpu"), least_rows(config, "cpu")
    decodes = data.draw(st.integers(0, max_num_seqs))
    tiles = data.draw(st.integers(0 if decodes else 1, -(-budget // Q)))
    wide = data.draw(st.integers(1, width))
    shape = buckets.shape(decodes, [Q] * tiles, wide)
    assert shape.parts[0].count >= decodes or not decodes
    assert shape.parts[-1].count * shape.parts[-1].width >= tiles * Q and shape.table_width >= wide
    assert shape.num_tokens >= min_rows, "the device may want rows though one sequence runs"
    assert shape in all_shapes(buckets, wide) and set(all_shapes(buckets, wide)) <= set(all_shapes(buckets))
    assert len(set(all_shapes(buckets))) == len(all_shapes(buckets))


@given(
    max_num_seqs=st.integers(1, 40),
    budget=st.integers(1, 400),
    most=st.integers(1, 12),
    short_rows=st.integers(0, 40),
    data=st.data(),
)
def test_drafts_have_a_bucket_whose_logits_hold_them_and_few_more(max_num_seqs, budget, most, short_rows, data):
    config = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, block_size=4, max_model_len=64)
    lengths = {most: ANY_ROWS} | ({most // 2: short_rows} if most > 1 else {})
    buckets = make_buckets(config, "cpu", lengths)
    shapes = verification_shapes(buckets)
    assert all(shape.num_tokens <= budget for shape in shapes)
    for shape in shapes:
        assert shape.num_tokens <= shape.max_sampled <= max(FEW_TOKENS, shape.num_tokens * 4 / 3)
    rows = data.draw(st.integers(1, max_num_seqs))
    if longest := most_drafts(buckets, rows):
        drafted = data.draw(st.integers(1, longest))
        shape = verification_shape(buckets, rows, drafted, 1)
        [(count, width)] = shape.parts
        assert count >= rows and width > drafted and shape in shapes
        assert width > most // 2 + 1 or count <= short_rows or most == 1


def test_a_program_chooses_tokens_for_steps_of_almost_as_many():
    parts = [TileGroup(count, width) for width in (5, 3) for count in (1, 2, 4, 8, 16)]
    expected = {80: 80, 48: 48, 40: 48, 24: 24, 20: 24} | dict.fromkeys((12, 10, 6, 5, 3), 12)
    assert verified_sizes(tuple(parts)) == expected


@given(
    rows=st.integers(1, 300),
    budget=st.integers(1, 3000),
    query_tile=st.sampled_from([1, 4, 8, 16, 32, 128]),
    left=st.lists(st.integers(1, 600), min_size=1, max_size=300),
)
def test_every_chunk_of_a_draft_model_has_a_bucket_without_decodes(rows, budget, query_tile, left):
    config = EngineConfig(max_num_seqs=rows, max_num_batched_tokens=budget, query_tile=query_tile, max_model_len=64)
    buckets = ladders.draft_buckets(make_buckets(config, "cpu", {4: ANY_ROWS}), config)
    shapes = all_shapes(buckets)
    taken, counts = StepBudget(budget, ladders.largest_tiles(buckets)), []
    for tokens in left[:rows]:
        if count := min(tokens, taken.most(max(tokens, 2))):
            taken.take(max(count, 2))
            counts.append(count)
    assert counts or budget < 2
    if counts:
        shape = buckets.shape(0, counts, 1)
        [(count, width)] = shape.parts
        assert sum(-(-tokens // width) for tokens in counts) <= count and shape in shapes
    assert [len(shape.parts) for shape in shapes] == [1] * len(shapes)
    assert {shape.parts[0].count for shape in shapes if shape.parts[0].width == 1} >= set(buckets.decodes)


@pytest.mark.parametrize("pattern", [FULL, AttentionPattern(window=6, num_sinks=2)], ids=["full", "sinks"])
@pytest.mark.parametrize("num_blocks", [100, 1000])
@pytest.mark.parametrize(("budget", "query_tile"), [(2, 4), (6, 1), (24, 8), (64, 32)])
def test_mixed_work_meets_no_shape_that_was_not_compiled(pattern, num_blocks, budget, query_tile):
    engine = make_engine(
        two_layers(pattern),
        num_blocks=num_blocks,
        block_size=1,
        max_num_seqs=7,
        max_num_batched_tokens=budget,
        query_tile=query_tile,
        max_model_len=100,
    )
    rng = np.random.default_rng(budget)
    for turn in range(25):
        engine.add_request(prompt_of(int(rng.integers(1, 70)), turn), asking(int(rng.integers(1, 25))))
        engine.step()
    run(engine)  # the executor refuses a shape that is not in all_shapes
    assert len({s.shape for s in engine.executor.steps}) >= 3


@pytest.mark.parametrize(
    ("platform", "dtype", "products", "least"),
    [("cpu", "f32", "xla", 1), ("cpu", "bf16", "xla", 8), ("cpu", "bf16", "packed", 1), ("gpu", "bf16", "xla", 8)],
)
def test_least_rows_follow_device_dtype_and_products_though_one_sequence_runs(platform, dtype, products, least):
    config = EngineConfig(dtype=dtype, max_num_seqs=1, max_model_len=64, operators={"linear": products})
    assert make_buckets(config, platform).decodes == (least,)
