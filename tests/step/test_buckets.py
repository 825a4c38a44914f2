"""Shapes that steps are padded to: every step finds one, and all of them are known before."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana_jax.config import EngineConfig
from ksana_jax.patterns import FULL, AttentionPattern
from ksana_jax.step.buckets import Buckets, ladder, least_rows
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
    buckets, min_rows = Buckets.of(config, "cpu"), least_rows(config, "cpu")
    decodes = data.draw(st.integers(0, max_num_seqs))
    tiles = data.draw(st.integers(0 if decodes else 1, -(-budget // Q)))
    wide = data.draw(st.integers(1, width))
    shape = buckets.shape(decodes, [Q] * tiles, wide)
    assert shape.parts[0].count >= decodes or not decodes
    assert shape.parts[-1].count * shape.parts[-1].width >= tiles * Q and shape.table_width >= wide
    assert shape.num_tokens >= min_rows, "the device may want rows though one sequence runs"
    assert shape in buckets.all_shapes(wide) and set(buckets.all_shapes(wide)) <= set(buckets.all_shapes())
    assert len(set(buckets.all_shapes())) == len(buckets.all_shapes())


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
    assert Buckets.of(config, platform).decodes == (least,)
