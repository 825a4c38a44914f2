"""What crosses between devices: two sums in each layer, one for the embedding, and candidates of tokens."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ksana_jax import SamplingParams
from ksana_jax.lab.trace import tracing
from ksana_jax.lab.trace.collectives import find_collectives
from ksana_jax.loading import abstract_params
from ksana_jax.models.int8_matrix import rounded_rows
from ksana_jax.runner.step_runs import compiled_programs
from ksana_jax.runner.token_programs import OutputHead, lower_choice
from ksana_jax.sampling.truncation import NUM_CANDIDATES
from ksana_jax.scheduler.step.types import StepShape, TileGroup
from ksana_jax.sharding.specs import AXIS
from tests.sharding.on_devices.engines import MODELS, make_llm

SHAPE = StepShape((TileGroup(4, 1),), 4, 4)


def collectives(program) -> list[tuple[str, int]]:
    """Operations of a compiled program that cross between devices, with the bytes that each gets."""
    return [tuple(kind) for kind in find_collectives(program.as_text()).elements()]


@functools.cache
def engine(num_devices: int):
    return make_llm("GQA", num_devices, max_num_batched_tokens=4, query_tile=1)


def test_a_step_has_two_sums_in_each_layer_and_one_for_the_embedding():
    model, runner = MODELS["GQA"], engine(4).runner
    hidden = 4 * model.d_model * 4
    [whole] = compiled_programs(runner.lower_step(SHAPE).compile())
    assert collectives(whole) == [("all-reduce", hidden)] * (2 * model.num_layers + 1)
    found = [collectives(program) for program in compiled_programs(runner.compile_step(SHAPE))]
    sums = [("all-reduce", hidden)]
    assert found == [sums, sums * 2 * model.num_layers, []]  # embedding, layers, norm


def test_one_device_has_no_collectives_and_is_told_no_sharding():
    [whole] = compiled_programs(engine(1).runner.lower_step(SHAPE).compile())
    assert collectives(whole) == [] and "sharding={" not in whole.as_text()


def test_the_pool_stays_where_it_is():
    runner = engine(4).runner
    [whole] = compiled_programs(runner.lower_step(SHAPE).compile())
    heads = whole.input_shardings[0][1].leaves["kv"]
    assert heads.shard_shape(runner.cache.kv.shape)[3] == 1 and runner.cache.kv.shape[3] == 4
    of_device = runner.cache.nbytes // 4
    assert whole.memory_analysis().alias_size_in_bytes >= of_device  # written in place
    assert whole.memory_analysis().temp_size_in_bytes < of_device
    for name in ("gather", "scatter", "copy"):
        program = getattr(runner.mover, f"_{name}")(8)
        assert collectives(program) == []


@pytest.mark.parametrize("dense", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("num_top", [None, pytest.param(20, marks=pytest.mark.soak)])
def test_sampling_gathers_candidates_and_not_scores(dense, num_top):
    model, rows, n = dataclasses.replace(MODELS["GQA"], vocab_size=8192), 8, 4
    runner = engine(n).runner
    head = OutputHead(model, runner.operators, runner.placement, runner.placement.vocabulary(model))
    params = runner.placement.params(model, abstract_params(model))
    hidden = jax.ShapeDtypeStruct((rows, model.d_model), "float32")
    found = collectives(
        lower_choice(
            params, hidden, head=head, count=rows, samples=True, dense=dense, masks=dense, num_top=num_top
        ).compile()
    )
    assert {name for name, _ in found} == {"all-gather", "all-reduce"}
    assert max(size for name, size in found if name == "all-gather") == 4 * rows * n * NUM_CANDIDATES < rows * 8192
    assert max(size for name, size in found if name == "all-reduce") == 4 * rows


def test_a_trace_counts_what_crosses(tmp_path):
    with tracing(tmp_path / "out", profile_steps=0):
        llm = make_llm("GQA", 4, max_num_batched_tokens=4, query_tile=1)
        llm.generate([{"prompt_token_ids": [5, 7]}], SamplingParams(max_tokens=2, temperature=0, detokenize=False))
    trace = json.loads((tmp_path / "out/trace.json").read_text())
    step = next(f for f in trace["functions"] if f["name"].startswith("step "))
    sums = sum(c["number"] * p["calls"] for p in step["programs"] for c in p["collectives"])
    assert sums == 2 * MODELS["GQA"].num_layers + 1
    assert {c["bytes"] for p in step["programs"] for c in p["collectives"]} == {4 * MODELS["GQA"].d_model * 4}


def test_rows_that_devices_divide_are_rounded_as_wholes():
    x = np.random.default_rng(0).standard_normal((5, 64), np.float32) * np.logspace(-2, 2, 64, dtype=np.float32)
    columns = PartitionSpec(None, AXIS)
    rounded = jax.shard_map(
        functools.partial(rounded_rows, axis=AXIS),
        mesh=engine(4).runner.placement.mesh,
        in_specs=columns,
        out_specs=(columns, PartitionSpec()),
        check_vma=False,
    )
    for part, whole in zip(jax.jit(rounded)(x), rounded_rows(x), strict=True):
        np.testing.assert_array_equal(part, whole)
