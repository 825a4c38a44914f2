"""Compilations and their times, and the compiled step's use of the pool: no compilation after the warm-up, the pool
updated in place."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.devices import tuning
from ksana_jax.models.params import init_params
from ksana_jax.ops.weight_packing import unpacked
from ksana_jax.runner.step_runs import _Run, compiled_programs
from ksana_jax.scheduler.step.types import StepArrays, StepShape, TileGroup
from tests.engine.small import VOCAB, assert_idle, make_llm, model
from tests.reference import reference_logprobs
from tests.soak import soak_unless

ASKED = [
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=20, seed=1),
    SamplingParams(temperature=1.3, top_k=4, min_p=0.01, max_tokens=9, frequency_penalty=0.5, logit_bias={3: 1.0}),
    SamplingParams(temperature=0, max_tokens=7, logprobs=3, prompt_logprobs=0),
    SamplingParams(temperature=1.0, min_tokens=4, max_tokens=11, logprobs=1, n=2),
]
ASKED = [SamplingParams(**{**vars(p), "detokenize": False}) for p in ASKED]


class Compilations:
    """jax's own count of compilation requests, cached on disk or not."""

    def __init__(self):
        self.count = 0

    def __call__(self, event: str, duration_s: float, **_):
        self.count += event == "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations(monkeypatch):
    monkeypatch.setenv("KSANA_PROGRAMS", "off")  # what is stored is not compiled
    counter = Compilations()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter)


def mixed_workload(llm, seed: int) -> int:
    """Requests of all kinds and lengths that come and go; returns the most blocks that one held."""
    rng, most = np.random.default_rng(seed), 0
    for step in range(60):
        if step % 3 == 0:
            prompt = rng.integers(2, VOCAB, rng.integers(1, 30))
            llm.engine.add_request(prompt, ASKED[rng.integers(len(ASKED))])
        if step % 17 == 16 and llm.engine.requests:
            llm.engine.abort(next(iter(llm.engine.requests)))
        llm.engine.step()
        most = max(most, int(llm.engine.scheduler.rows.num_blocks.max()))
    while llm.engine.has_work:
        llm.engine.step()
    assert_idle(llm)
    return most


def test_nothing_is_compiled_after_the_warm_up_whatever_is_asked_for(compilations):
    config = dataclasses.replace(model()[0], num_layers=1)
    llm = LLM.from_params(
        config,
        init_params(config),
        block_size=2,
        num_blocks=36,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        query_tile=16,
        max_model_len=48,
        async_scheduling=True,
    )
    builder = llm.engine.builder
    widths = (16, 24)
    llm.engine.builder = dataclasses.replace(builder, buckets=dataclasses.replace(builder.buckets, widths=widths))
    before = compilations.count
    new = llm.warm_up(sampling_params=ASKED)
    assert new == llm.num_compilations
    assert compilations.count - before >= new, "jax counts the same compilations, so its count can be relied upon"
    before = compilations.count
    used = {mixed_workload(llm, seed) for seed in range(3)}
    assert max(used) > widths[0], "the workload is mixed enough to need more than one width"
    assert llm.num_compilations == new
    assert compilations.count == before
    assert llm.engine.scheduler.num_preemptions > 0, "and to run the pool dry"
    assert llm.warm_up(sampling_params=ASKED) == 0


POOL_BYTES = 64 * 2**20
# Blocks [M, L, 2, K, B, H] of 2 layers, 2 heads, 16 tokens, 8 numbers.
BLOCK_NUMBERS = 2 * 2 * 2 * 16 * 8
SHAPES = [StepShape((TileGroup(8, 1), *tiles), 4, max_sampled=8) for tiles in ((), (TileGroup(1, 16),))]


@pytest.fixture(
    scope="module",
    params=soak_unless(lambda dtype: dtype in ("f32", "int8"), ["f32", "bf16", "int8", "fp8_e5m2", "kivi4"]),
)
def large_pool(request):
    config, params = model()
    params = jax.tree.map(lambda x: x.astype("bfloat16" if request.param == "bf16" else "float32"), params)
    num_blocks = POOL_BYTES // (BLOCK_NUMBERS * {"f32": 4, "bf16": 2}.get(request.param, 1))
    llm = LLM.from_params(
        config,
        params,
        dtype="bf16" if request.param == "bf16" else "f32",
        kv_cache_dtype=request.param,
        block_size=16,
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        query_tile=16,
        max_model_len=64,
    )
    cache = llm.runner.cache
    assert cache.kv.nbytes == POOL_BYTES and cache.nbytes == llm.num_blocks * llm.block_bytes
    return llm


@pytest.mark.parametrize("shape", SHAPES, ids=["decodes", "decodes and a tile"])
def test_the_compiled_step_writes_to_the_pool_where_it_lies(large_pool, shape):
    programs = compiled_programs(large_pool.runner.compile_step(shape))
    for compiled in programs:
        memory = compiled.memory_analysis()
        # What the step works with is a thousandth of the pool here; one copy of the pool would be all of it.
        assert memory.temp_size_in_bytes < POOL_BYTES / 100
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes < POOL_BYTES / 100
        assert copies_of_the_pool(compiled.as_text(), large_pool.runner.cache.kv.size) == []
    given = [POOL_BYTES // 2 < compiled.memory_analysis().argument_size_in_bytes for compiled in programs]
    updated = [compiled.memory_analysis().alias_size_in_bytes >= POOL_BYTES for compiled in programs]
    assert given == updated == [False, True, False]


@pytest.mark.parametrize(
    ("kinds", "sizes", "num_programs"),
    [
        ("a" * 30, [3] * 10, 1),
        ("a" * 28, [4] * 7, 1),
        ("a" * 10, [3, 3, 3, 1], 2),
        ("aa", [2], 1),
        ("aaab" * 4, [4] * 4, 1),
        ("ab" * 13, [4] * 6 + [2], 2),
        ("a" * 6 + "b" + "c" * 5, [3] * 4, 3),
    ],
)
def test_layers_are_divided_into_few_programs_that_are_called_often(kinds, sizes, num_programs):
    settings = {"kinds": tuple(kinds), "rope_kinds": (0,) * len(kinds), "observers": (None,) * len(kinds)}
    runs = _Run.all_of(SimpleNamespace(**settings, tuning=tuning.tuning("cpu")))
    assert [len(run.layers) for run in runs] == sizes
    assert [layer for run in runs for layer in run.layers] == list(range(len(kinds)))
    assert len({run.program for run in runs}) == num_programs


@pytest.mark.parametrize(("of_program", "calls"), [(1, (1, 2, 1)), (4, (1, 1, 1))])
@pytest.mark.parametrize("shape", SHAPES, ids=["singles", "singles and a tile"])
def test_the_programs_of_the_layers_give_what_one_program_gives(shape, of_program, calls, monkeypatch):
    """Bit for bit in float32; in bfloat16 one program keeps more digits between layers."""
    monkeypatch.setitem(tuning._TUNING, "cpu", dataclasses.replace(tuning.tuning("cpu"), layers_of_program=of_program))
    llm, rng = make_llm(num_blocks=48, programs={}), np.random.default_rng(0)
    assert llm.runner.lower(shape).calls == calls
    runner, num_tiles, own = llm.runner, shape.num_tiles, []
    blocks = rng.permutation(llm.num_blocks)[: num_tiles * 4].reshape(num_tiles, 4).astype(np.int32)
    for part, _, tiles in shape.places():
        positions = 40 + np.arange(part.width)
        own += [(positions, row[positions // 16] * 16 + positions % 16) for row in blocks[tiles]]
    positions, slots = np.concatenate(own, axis=1).astype(np.int32)
    tokens, sampled = rng.integers(2, VOCAB, shape.num_tokens), np.arange(shape.max_sampled)
    starts = np.broadcast_to(16 * np.arange(4), (1, num_tiles, 4))
    arrays = StepArrays(tokens, positions, positions[None], slots[None], blocks[None], starts, sampled)
    arrays = StepArrays(*(None if x is None else np.asarray(x, np.int32) for x in arrays))
    vector, previous = runner.packed(shape, arrays), np.zeros(shape.max_sampled, np.int32)
    before, found = rng.standard_normal(runner.cache.kv.shape, np.float32), []
    for step in (runner.compile_step(shape), runner.lower_step(shape).compile()):
        pool = runner.cache.with_kv(jnp.asarray(before))
        after, *hidden, _ = step(runner.params, pool, vector, previous, runner._patterns.arrays)
        found.append([np.asarray(x) for x in (after.kv, *hidden)])
    written = np.any(found[0][0] != before, axis=(1, 2, 3, 5)).sum()
    assert written == len(np.unique(slots))
    for in_runs, whole in zip(*found, strict=True):
        np.testing.assert_array_equal(in_runs, whole)


def copies_of_the_pool(program: str, num_elements: int) -> list[str]:
    """Instructions of an HLO program that copy or convert as many numbers as the pool has, in whatever shape."""
    found = []
    for line in program.splitlines():
        instruction = re.search(r"= \w+\[([\d,]*)\]\S* (copy|copy-start|convert|broadcast|transpose)\(", line)
        if instruction and np.prod([int(n) for n in instruction[1].split(",") if n]) >= num_elements:
            found.append(line.strip())
    return found


def test_the_test_above_would_notice_a_copy(large_pool):
    blocks = large_pool.runner.cache.kv
    compiled = jax.jit(lambda x: x.at[0].set(0)).lower(blocks).compile()  # not donated: the result is a copy
    assert compiled.memory_analysis().alias_size_in_bytes == 0
    assert copies_of_the_pool(compiled.as_text(), blocks.size)


def test_the_pool_stays_at_its_address_from_step_to_step(large_pool):
    runner = large_pool.runner
    address = runner.cache.kv.unsafe_buffer_pointer()
    prompts = [{"prompt_token_ids": np.random.default_rng(n).integers(2, VOCAB, n)} for n in (1, 5, 16, 33, 40)]
    asked = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    seen = set()
    for _ in large_pool.stream(prompts, asked):
        seen.add(runner.cache.kv.unsafe_buffer_pointer())
    assert seen == {address}
    assert_idle(large_pool)


# Root mean squares of differences: float32 against float64 through two layers; bfloat16 has 8 bits for scores of up to
# 15, and a few roundings in a row (0.09 over twelve such texts with each implementation of products, while the
# log-probabilities themselves spread by 3).
TOLERANCES = {"f32": 1e-5, "bf16": 0.15}


# Codes are compared with their definitions in tests/engine/test_kv_codecs.py.
@pytest.mark.parametrize("large_pool", ["f32", "bf16"], indirect=True)
def test_log_probabilities_through_the_pool_are_those_of_the_dense_model(large_pool):
    text = np.random.default_rng(0).integers(2, VOCAB, 60)  # several chunks, several blocks
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    [output] = large_pool.generate({"prompt_token_ids": text}, asked)
    got = [entry[int(token)].logprob for entry, token in zip(output.prompt_logprobs[1:], text[1:], strict=True)]
    expected = reference_logprobs(unpacked(large_pool.runner.params), large_pool.model_config, text)
    apart = np.asarray(got) - expected[np.arange(59), text[1:]]
    assert np.sqrt(np.mean(apart**2)) < TOLERANCES[large_pool.config.dtype]
