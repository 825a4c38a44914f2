"""Engines that store tokens as codes of whole blocks, and recent ones exactly (such as KIVI)."""

import dataclasses
import functools

import numpy as np
import pytest

from ksana_jax import AttentionPattern, SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.kv.codecs.registry import find_sealing
from ksana_jax.runner.planner import plan
from ksana_jax.runner.planner.step_memory import NO_STEP
from tests.engine.small import VOCAB, make_llm, model, tokens_of
from tests.kv.codecs.block_definitions import DEFINITIONS
from tests.reference import reference_logprobs
from tests.soak import soak_unless

RNG = np.random.default_rng(4)
PROMPTS = [{"prompt_token_ids": RNG.integers(2, VOCAB, n)} for n in (3, 17, 30, 9, 2)]
GREEDY = SamplingParams(temperature=0, max_tokens=28, ignore_eos=True, detokenize=False)
SIZE = 4
KIVI = {"k": "kivi2", "v": "kivi4", "residual": 3}
# Keys are rotated when they are read; the first tokens are exact.
KVQUANT = {"k": "kvquant3", "v": "kivi4", "residual": 1, "first": 2}
# Small blocks and chunks; what they compile is shared.
TIGHT = {"block_size": SIZE, "num_blocks": 40, "max_num_batched_tokens": 7, "query_tile": 4}


class Definition:
    """Block codecs in float64, on the full blocks of a text; records whether float32 could round a number another way.

    The rest of a text, less than a block, stays as it is: queries read it exactly.
    """

    def __init__(self, setting: dict):
        self.setting, self.certain, self.num_calls = setting, True, 0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        side, self.num_calls = "kv"[self.num_calls % 2], self.num_calls + 1
        full = len(x) // SIZE * SIZE
        # Keys and values of the engine are off by about 1e-6 of their vector's largest number.
        off = 2e-6 * np.abs(x).max(-1, keepdims=True)
        low, found, high = (self._encoded((x + way * off)[:full], side) for way in (-1, 0, 1))
        # Less than this moves no log-probability by 1e-4; a code moves it by more.
        self.certain &= bool((np.abs(low - high) <= 2e-5 * np.abs(x).max()).all())
        return np.concatenate([found, x[full:]])

    def _encoded(self, x: np.ndarray, side: str) -> np.ndarray:
        """x: [T, K, H]."""
        define, found = DEFINITIONS[self.setting[side]], np.zeros_like(x)
        for start in range(0, len(x), SIZE):
            for head in range(x.shape[1]):
                found[start : start + SIZE, head] = define(x[start : start + SIZE, head], side)
        return found


def read_exactly(setting: dict, length: int) -> np.ndarray:
    """[T, T]: a query reads exactly the tokens from the last block on that leaves it at least `residual` of them."""
    residual, first = setting["residual"], setting.get("first", 0)
    exact = np.zeros((length, length), bool)
    for query in range(length):
        block = max((query + 1 - residual) // SIZE, 0) if residual <= query + 1 else 0
        exact[query, SIZE * block :] = True
    exact[:, :first] = True
    return exact


def expected_logprobs(setting: dict, length: int = 11, pattern=None) -> tuple[np.ndarray, np.ndarray]:
    """A text whose keys and values float32 and float64 encode alike, and its log-probabilities."""
    config, params = model()
    for seed in range(200):
        text, stored = np.random.default_rng(seed).integers(2, VOCAB, length), Definition(setting)
        expected = reference_logprobs(
            params,
            config,
            text,
            pattern,
            stored=stored,
            exact=read_exactly(setting, length),
            unrotated=setting["k"].startswith("kvquant"),
        )
        if stored.certain:
            return text, expected
    raise AssertionError("no such text")


def logprobs(llm, text) -> np.ndarray:
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    [output] = llm.generate({"prompt_token_ids": text}, asked)
    return np.array([e[int(t)].logprob for t, e in zip(text[1:], (output.prompt_logprobs or [])[1:], strict=True)])


@pytest.mark.parametrize(
    ("setting", "pattern"),
    soak_unless(
        lambda case: case[0] in (KIVI, KVQUANT),
        [
            (KIVI, None),
            (KVQUANT, AttentionPattern(window=6, num_sinks=2)),
            (KIVI | {"residual": 0}, None),
            ({"k": "gear4", "v": "gear_l4", "residual": 2}, None),
            (KIVI | {"first": 3}, AttentionPattern(window=6, num_sinks=2)),
        ],
    ),
    ids=str,
)
def test_an_engine_computes_what_a_dense_model_does_with_blocks_by_definition(setting, pattern):
    config, params = model()
    text, expected = expected_logprobs(setting, pattern=pattern)
    # In chunks of 7: blocks are filled within chunks, across them, and read by queries of the step that fills them.
    llm = make_llm(pattern=pattern, kv_cache_dtype=setting, **TIGHT)
    of_text = np.arange(len(text) - 1), text[1:]
    # float32 against float64 through two layers, as for an engine that stores float32.
    np.testing.assert_allclose(logprobs(llm, text), expected[of_text], atol=1e-4)
    full = reference_logprobs(params, config, text, pattern)
    assert np.abs(full - expected)[of_text].max() > 1e-3


@functools.cache
def alone() -> list[list[int]]:
    llm = make_llm(kv_cache_dtype=KIVI, **TIGHT)
    return [tokens_of(llm, [prompt], GREEDY)[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "variant",
    soak_unless(
        lambda variant: "preempt" in variant,
        [
            {"preempt": "swap", "host_cache_bytes": 2**18},
            {"preempt": "recompute"},
            {"max_num_batched_tokens": 64, "query_tile": 64},
        ],
    ),
    ids=str,
)
def test_tokens_do_not_depend_on_chunks_batches_or_preemption(variant):
    llm = make_llm(kv_cache_dtype=KIVI, **TIGHT | variant)
    assert tokens_of(llm, PROMPTS, GREEDY) == alone()
    if "preempt" in variant:
        assert llm.engine.scheduler.num_preemptions > 0
        assert (variant["preempt"] == "swap") == (llm.engine.memory.counters.swapped_out > 0)


def test_cached_prefixes_hold_codes_and_the_exact_tokens_that_are_still_read():
    llm = make_llm(kv_cache_dtype=KIVI, enable_prefix_caching=True, host_cache_bytes=2**18, **TIGHT)
    for num_cached in (0, 28):
        [output] = llm.generate(PROMPTS[2], GREEDY)
        assert output.outputs[0].token_ids == alone()[2] and output.num_cached_tokens == num_cached


@pytest.mark.soak
def test_decodes_share_codes_of_a_common_prefix():
    llm = make_llm(kv_cache_dtype=KIVI, enable_prefix_caching=True, shared_prefix_attention=True, **TIGHT)
    llm.engine.builder = dataclasses.replace(llm.engine.builder, min_saved_tokens=SIZE)
    shapes, submit = [], llm.runner.submit
    llm.runner.submit = lambda step: shapes.append(step.shape) or submit(step)
    assert tokens_of(llm, [PROMPTS[2]] * 3, GREEDY) == [alone()[2]] * 3
    assert any(shape.shared_rows for shape in shapes)


def test_samples_and_beams_copy_open_blocks():
    llm = make_llm(kv_cache_dtype=KIVI, **TIGHT)
    greedy = SamplingParams(n=2, temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    assert tokens_of(llm, PROMPTS[2:3], greedy) == [alone()[2][:6]] * 2
    assert llm.engine.memory.counters.copied > 0
    [beam] = llm.generate(PROMPTS[2], SamplingParams(beam_width=1, max_tokens=6, ignore_eos=True, detokenize=False))
    assert beam.outputs[0].token_ids == alone()[2][:6]


def test_blocks_on_disk_are_those_of_one_setting(tmp_path):
    settings = {"enable_prefix_caching": True, "host_cache_bytes": 2**18, "cache_write": "through"}
    scopes = set()
    for num_cached in (0, 28):
        llm = make_llm(kv_cache_dtype=KIVI, disk_cache_dir=str(tmp_path), **TIGHT | settings)
        llm.engine.memory.disk_reads._timeout_s = 60.0
        with llm:
            [output] = llm.generate(PROMPTS[2], GREEDY)
        assert output.outputs[0].token_ids == alone()[2] and output.num_cached_tokens == num_cached
        scopes.add(llm.engine.memory.index.scope)
    other = make_llm(kv_cache_dtype=KIVI | {"residual": 2}, **TIGHT | settings)
    assert len(scopes) == 1 and other.engine.memory.index.scope not in scopes


def test_the_pool_holds_the_bytes_that_are_reported():
    llm = make_llm(kv_cache_dtype=KIVI, **TIGHT)
    sealing, config = find_sealing(KIVI), llm.model_config
    # Each side: two bytes of 2 bits or four of 4 bits a token; 8 channels or 4 tokens with a scale and a zero.
    of_codes = SIZE * (2 + 4) + 8 * 4 + SIZE * 4
    assert sealing.head_bytes(SIZE, config.head_dim) == of_codes
    assert llm.block_bytes == config.num_kv_heads * max(2 * of_codes, SIZE * 8 * 4)
    assert llm.runner.cache.nbytes == llm.num_blocks * llm.block_bytes == llm.memory_plan.pool_bytes
    # What `ksana plan` says of one sequence: codes of 64 tokens, and exact tokens of the window and of the chunk.
    asked = {
        "dtype": "f32",
        "block_size": SIZE,
        "max_num_batched_tokens": 7,
        "query_tile": 4,
        "context": 64,
        "batch": 1,
    }
    planned = plan(config, 2**30, kv_cache_dtype=KIVI, step=NO_STEP, **asked)
    assert planned.kv_bytes_per_token * SIZE == llm.block_bytes
    exact = 4 * 3  # keys and values of two layers: 3 - 1 + 7 tokens that touch three blocks
    assert planned.kv_bytes_per_token * planned.tokens_held == llm.block_bytes * (64 // SIZE + exact)
    assert planned.kv_bytes_per_token * planned.tokens_held == llm.block_bytes * llm.runner.layout.blocks_of(64, 7)
    # Between chunks, the window of the query after 64 tokens touches one block of each. The pool has whole blocks.
    assert planned.mean_bytes_per_token == llm.kv_bytes_per_token(64) == llm.block_bytes * (64 // SIZE + 4) / 64
    assert planned.max_kv_tokens * planned.mean_bytes_per_token == pytest.approx(
        planned.budget_bytes - planned.weights_bytes - planned.step_bytes, rel=1e-4
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_full_precision_layers": [0]}, "kv_cache_dtype kivi4 does not go with kv_full_precision_layers"),
        ({"operators": {"attention": "triton"}}, "needs an NVIDIA GPU"),
    ],
)
def test_what_block_codecs_do_not_go_with_is_refused(settings, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        make_llm(kv_cache_dtype="kivi4", **settings)


@pytest.mark.soak
def test_mixtures_of_everything_give_the_tokens_of_each_text_alone():
    """Common prefixes, samples, small host tiers and preemption, in pools that are too small."""
    rng, by_itself = np.random.default_rng(11), make_llm(kv_cache_dtype=KIVI, **TIGHT)
    texts, num_preemptions, num_hits = [rng.integers(2, VOCAB, 40) for _ in range(3)], 0, 0
    for _ in range(20):
        llm = make_llm(
            kv_cache_dtype=KIVI,
            enable_prefix_caching=bool(rng.random() < 0.7),
            host_cache_bytes=int(rng.choice([0, 2**14, 2**18])),
            preempt=str(rng.choice(["swap", "recompute"])),
            **TIGHT,
        )
        for _ in range(4):
            ends = [rng.integers(2, VOCAB, rng.integers(0, 6)) for _ in range(rng.integers(1, 7))]
            prompts = [np.append(texts[rng.integers(3)][: rng.integers(1, 30)], end).astype(np.int32) for end in ends]
            asked = [
                dataclasses.replace(GREEDY, max_tokens=int(rng.integers(1, 20)), n=int(rng.integers(1, 3)))
                for _ in ends
            ]
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked)
            for prompt, params, output in zip(prompts, asked, outputs, strict=True):
                [expected] = tokens_of(by_itself, [prompt], dataclasses.replace(params, n=1))
                assert [found.token_ids for found in output.outputs] == [expected] * params.n
                num_hits += bool(output.num_cached_tokens)
            llm.engine.scheduler.check()
        num_preemptions += llm.engine.scheduler.num_preemptions
    assert num_preemptions > 5 and num_hits > 20
