"""numerics "invariant": one request has the same tokens and log-probabilities bit by bit, however it is served."""

import collections
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from ksana_jax import LLM, AttentionPattern, SamplingParams
from ksana_jax.core.config import ConfigError, EngineConfig
from ksana_jax.core.patterns import FULL
from ksana_jax.devices.tuning import tuning
from ksana_jax.engine.build import build_engine
from ksana_jax.engine.fingerprint import fingerprint
from ksana_jax.engine.settings import engine_config
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.models.params import init_params
from ksana_jax.ops.invariant import why_not_invariant
from ksana_jax.ops.linear import LINEAR_IMPLEMENTATIONS
from ksana_jax.ops.requirements import Requirements
from ksana_jax.scheduler.step.ladders import stages
from tests.engine.small import VOCAB, assert_idle, model
from tests.machine import compiled, native_products
from tests.models.own_kinds import register
from tests.reference import reference_logprobs

pytestmark = pytest.mark.cpu("invariant numerics need native operators")


def why_not(dtype: str = "float32", platform: str = "cpu", **changes: Any) -> str | None:
    config = dataclasses.replace(model()[0], **changes)
    layout = layout_of(config, dtype="f32", block_size=16, as_bits=tuning("cpu").stored_as_bits)
    needs = Requirements.of(config, layout, query_dtype=dtype)._replace(platform=platform)
    return why_not_invariant(config, needs, dtype)


# Three pieces of keys, several chunks, nine blocks. A pool of 20 blocks holds fewer rows than run at once.
PROMPT = np.random.default_rng(5).integers(2, VOCAB, 101)
SETTINGS: dict[str, Any] = {
    "numerics": "invariant",
    "max_model_len": 192,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "query_tile": 16,
    "num_blocks": 20,
}
ASKED = SamplingParams(
    max_tokens=30, temperature=1.3, top_p=0.95, seed=11, logprobs=3, ignore_eos=True, detokenize=False
)


def bits(completion) -> bytes:
    """The tokens of a completion, and the log-probabilities of each and of the three most probable ones."""
    scores = [(token, entry.logprob) for entries in completion.logprobs for token, entry in sorted(entries.items())]
    return np.array(completion.token_ids, np.int64).tobytes() + np.array(scores, np.float64).tobytes()


def under_load(llm: LLM, count: int, prompt, asked=ASKED, seed: int = 0) -> list:
    """Serves one request `count` times among random others, some with the same beginning, and some that are aborted;
    returns the requests. At times the load stops, so that steps of all sizes occur."""
    rng, engine, vocab = np.random.default_rng(seed), llm.engine, llm.model_config.vocab_size
    longest = llm.engine.max_model_len
    requests, others = [], []
    while len(requests) < count or engine.has_work:
        rest = count - len(requests)
        if rest and len(engine.scheduler.waiting) < 4 and rng.random() < 0.3:
            requests.append(engine.add_request(prompt, asked))
        if rest and len(engine.scheduler.waiting) < 4 and rng.random() < (0.4 if len(requests) // 5 % 2 else 0.0):
            length, kept = int(rng.integers(1, longest // 2)), int(rng.integers(0, len(prompt)))
            tokens = np.concatenate([prompt[: kept if rng.random() < 0.5 else 0], rng.integers(2, vocab, length)])
            params = dataclasses.replace(asked, max_tokens=int(rng.integers(1, 20)), seed=int(rng.integers(1000)))
            others.append(engine.add_request(tokens[: longest - 20], params))
        if others and rng.random() < 0.02:
            engine.abort(others[int(rng.integers(len(others)))].request_id)
        engine.step()
    return requests


_programs: dict = collections.defaultdict(dict)


def invariant_llm(dtype: str = "f32", pattern: AttentionPattern = FULL, **settings: Any) -> LLM:
    """An engine around the tiny model. Engines that compile the same steps share them."""
    config, params = model()
    if dtype == "bf16":
        params = init_params(config, seed=3, std=0.5, dtype="bfloat16")
    found = engine_config(SETTINGS | {"dtype": dtype} | settings)
    programs = _programs[found.numerics, dtype, found.block_size, found.num_blocks, found.kv_cache_dtype, pattern]
    return LLM.around(build_engine(config, params, found, patterns=pattern, programs=programs))


@native_products
def test_larger_buckets_change_no_bit():
    """As steps take while smaller ones are compiled."""
    found = []
    for stage in range(3):
        llm = invariant_llm(max_num_batched_tokens=64, max_model_len=2048, num_blocks=130)
        buckets = stages(llm.engine.builder.buckets)[stage]
        llm.engine.builder = dataclasses.replace(llm.engine.builder, buckets=buckets)
        outputs = llm.generate([{"prompt_token_ids": PROMPT[:n].tolist()} for n in (3, 40, 101)], ASKED)
        found.append([bits(output.outputs[0]) for output in outputs])
        shapes = {record.shape for record in llm.records}
        assert stage != 2 or {shape.table_width for shape in shapes} == {64} < {*buckets.widths}
    assert found[0] == found[1] == found[2]


SINKS = AttentionPattern(window=70, num_sinks=3, sink_position="cache")
CACHED: dict[str, Any] = {"enable_prefix_caching": True, "host_cache_bytes": 2**20, "async_scheduling": True}
ONE_BY_ONE: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "block_size": 32}
# A host so small that swapped rows and new prefixes push cached blocks to the disk.
TIERS: dict[str, Any] = CACHED | {"host_cache_bytes": 160 * 2**10, "preempt": "swap"}


def expect_one_result(engines: list[LLM], counts: list[int], **given) -> None:
    """Every completion of the same request is the same, in engines that differ, preempt and reuse cached blocks."""
    requests = []
    for seed, (llm, count) in enumerate(zip(engines, counts, strict=True)):
        requests += under_load(llm, count, PROMPT, seed=seed, **given)
        assert_idle(llm)
    outputs = [request.output() for request in requests]
    assert len({bits(output.outputs[0]) for output in outputs}) == 1
    assert sum(llm.engine.scheduler.num_preemptions for llm in engines) > 0
    assert {output.num_cached_tokens > 0 for output in outputs} == {False, True}


@native_products
def test_products_are_those_that_compute_each_row_by_itself():
    runner: Any = invariant_llm().engine.executor
    assert next(i for i in LINEAR_IMPLEMENTATIONS if i.name == runner.products.name).row_by_row
    assert not next(i for i in LINEAR_IMPLEMENTATIONS if i.name == "mixed").row_by_row


@native_products
def test_a_request_has_one_result_under_any_load():
    expect_one_result([invariant_llm(), invariant_llm(**CACHED)], [10, 10])


def expect_one_result_from_tiers(folder, write: str, count: int, **given) -> collections.Counter:
    """An engine without a cache, and three one after the other over one folder: the second and third begin with the
    blocks of the previous ones on disk. Returns the counters of these three's memory."""
    requests, found = under_load(invariant_llm(**given), count, PROMPT), collections.Counter()
    for seed in range(3):
        with invariant_llm(**given, **TIERS, disk_cache_dir=str(folder), cache_write=write) as llm:
            llm.engine.memory.disk_reads._timeout_s = 60.0  # a thread that traces leaves little to the one that reads
            [first] = under_load(llm, 1, PROMPT, seed=seed)
            assert (llm.engine.memory.counters.hits_disk > 0) == (seed > 0) == (first.output().num_cached_tokens > 0)
            requests += [first, *under_load(llm, count, PROMPT, seed=seed)]
            assert_idle(llm)
            found.update(dataclasses.asdict(llm.engine.memory.counters))
    assert len({bits(request.output().outputs[0]) for request in requests}) == 1
    return found


@native_products
def test_a_request_has_one_result_from_the_disk_after_a_restart(tmp_path):
    expect_one_result_from_tiers(tmp_path, "back", 3)


@native_products
@pytest.mark.soak
@pytest.mark.parametrize(
    ("pattern", "dtype", "kv", "write", "count"),
    [
        (FULL, "f32", "auto", "back", 1000),
        (FULL, "bf16", "int8", "through", 300),
        (SINKS, "bf16", "auto", "back", 300),
    ],
    ids=str,
)
def test_many_completions_from_every_tier_have_one_result(tmp_path, write, pattern, dtype, kv, count):
    """Rows are swapped in the middle, and blocks come back from the device, the host and the disk."""
    found = expect_one_result_from_tiers(tmp_path, write, count // 4, pattern=pattern, dtype=dtype, kv_cache_dtype=kv)
    assert {"hits_device", "hits_host", "hits_disk", "replaced", "replaced_host", "swapped_in"} <= set(+found), found


@native_products
@pytest.mark.soak
@pytest.mark.parametrize(
    ("pattern", "dtype", "kv", "sampled", "count"),
    [
        (FULL, "f32", "auto", True, 1000),
        (FULL, "bf16", "int8", False, 300),
        (SINKS, "f32", "int8", False, 300),
        (SINKS, "bf16", "auto", True, 300),
    ],
    ids=str,
)
def test_many_completions_under_random_load_have_one_result(pattern, dtype, kv, sampled, count):
    given: dict[str, Any] = {"pattern": pattern, "dtype": dtype, "kv_cache_dtype": kv}
    one_by_one = invariant_llm(**given, **ONE_BY_ONE, num_blocks=8)
    engines = [invariant_llm(**given), invariant_llm(**given, **CACHED), one_by_one]
    counts = [count // 2 - 5, count // 2 - 5, 10]
    expect_one_result(engines, counts, asked=ASKED if sampled else dataclasses.replace(ASKED, temperature=0.0))


@native_products
@pytest.mark.soak
@pytest.mark.parametrize(
    ("dtype", "variants", "changes"),
    [
        ("f32", [{}, ONE_BY_ONE, {"max_num_seqs": 9, "max_num_batched_tokens": 120, "query_tile": 64}], {}),
        ("bf16", [CACHED, {"max_num_seqs": 3, "max_num_batched_tokens": 21, "query_tile": 4}], {}),
        ("f32", [CACHED, ONE_BY_ONE], {"norm": "layer", "norm_placement": "parallel", "qk_norm": None, "mlp": "gelu"}),
    ],
    ids=["f32", "bf16", "layer norms"],
)
def test_every_part_of_a_model_and_of_sampling_is_computed_row_by_row(dtype, variants, changes):
    """Sizes that no vector has, and whatever else a family may have: biases, caps, norms of heads, sink logits."""
    shape = {"d_model": 56, "num_heads": 6, "num_kv_heads": 2, "head_dim": 24, "d_ff": 91, "vocab_size": 97}
    kinds = {"mlp": "geglu", "norm": "rms_plus_one", "sinks": "learned", "embed_scale": 5.6, "soft_cap": 20.0}
    flags: dict[str, Any] = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)
    flags |= {"norm_placement": "both", "qk_norm": "head"}
    patterns = {"pattern": (AttentionPattern(window=50), FULL), "logit_soft_cap": 30.0}
    config = dataclasses.replace(model()[0], **shape | kinds | flags | patterns | changes)
    params = init_params(config, seed=3, std=0.5, dtype={"f32": "float32", "bf16": "bfloat16"}[dtype])
    rng = np.random.default_rng(0)  # norms and biases, which start as ones and zeros
    params = jax.tree.map(
        lambda x: x + (0.1 * rng.standard_normal(x.shape)).astype(x.dtype) if x.ndim == 1 else x, params
    )
    engines, programs = [], collections.defaultdict(dict)
    for variant in variants:
        found = engine_config(SETTINGS | {"dtype": dtype, "num_blocks": 40} | variant)
        shared = programs[found.block_size]
        engines.append(LLM.around(build_engine(config, params, found, patterns=config.pattern, programs=shared)))
    for changed in ({}, {"temperature": 0.0}, {"top_k": 20, "frequency_penalty": 0.7}, {"min_p": 0.05, "top_p": 1.0}):
        asked = dataclasses.replace(ASKED, **changed)
        requests = [r for i, llm in enumerate(engines) for r in under_load(llm, 12, PROMPT, asked=asked, seed=i)]
        assert len({bits(request.output().outputs[0]) for request in requests}) == 1


@native_products
def test_log_probabilities_are_those_of_the_float64_model():
    asked = dataclasses.replace(ASKED, temperature=0.0, prompt_logprobs=0)
    llm = invariant_llm()
    [output] = llm.generate([{"prompt_token_ids": PROMPT}], asked)
    whole = np.array([*PROMPT, *output.outputs[0].token_ids])
    assert output.prompt_logprobs and output.outputs[0].logprobs
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    expected = reference_logprobs(model()[1], model()[0], whole)[np.arange(len(whole) - 1), whole[1:]]
    got = [entry[int(token)].logprob for entry, token in zip(entries, whole[1:], strict=True)]
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 24}, "block_size 24, must be a multiple of 16"),
        ({"operators": {"attention": "xla"}}, "operators.attention 'xla', must be auto or native"),
        ({"operators": {"linear": "mixed"}}, "operators.linear 'mixed', must be auto or packed or native"),
        ({"shared_prefix_attention": True}, "shared_prefix_attention: it divides sums"),
        ({"kv_eviction": {"method": "h2o", "budget": 0.5}}, "kv_eviction: attention is added up"),
    ],
)
def test_settings_that_depend_on_the_batch_are_refused(settings, message):
    with pytest.raises(ConfigError, match=f'numerics "invariant" does not go with {message}'):
        EngineConfig(numerics="invariant", **settings)
    EngineConfig(**settings)


def test_what_keeps_a_model_from_invariant_numerics_is_named():
    assert why_not(platform="gpu") == "needs native attention: needs a CPU, this is gpu"


@native_products
def test_what_keeps_a_model_from_the_operators_of_invariant_numerics_is_named(monkeypatch):
    assert why_not() is None
    assert "native products have float32 or bfloat16" in str(why_not(dtype="float16"))
    register(monkeypatch)
    said = "needs MLPs that are row by row: mlp 'unstated' does not state row_by_row (MLP in ksana_jax/models/mlp.py)"
    assert why_not(mlp="unstated") == said
    assert "norms are centred" in str(why_not(norm="centred"))
    assert why_not(norm="bounded", mlp="triple") is None


@compiled
def test_an_engine_on_a_cpu_without_wide_registers_says_so_before_it_compiles(monkeypatch):
    monkeypatch.setattr("ksana_jax.core.processor.features", frozenset)
    with pytest.raises(ValueError, match=r"numerics 'invariant' needs native products.*AVX2"):
        invariant_llm()


def test_an_engine_on_a_machine_without_a_compiler_says_so_before_it_compiles(monkeypatch):
    monkeypatch.setattr("ksana_jax.native.build._library", lambda: "there is none")
    with pytest.raises(ValueError, match=r"numerics 'invariant' needs native (attention|products with weights): "):
        invariant_llm()


@native_products
def test_blocks_of_fast_numerics_are_not_taken_from_a_tier():
    same = {"dtype": "f32", "quantization": None, "kv_dtype": "f32", "max_model_len": 64}
    digests = [fingerprint(model()[0], "weights", **same, numerics=numerics) for numerics in ("fast", "invariant")]
    assert digests[0] != digests[1]
