"""Layers that read an earlier layer's keys and values (CLA, YOCO) need no room in the pool. Tokens and their
probabilities equal the dense float64 model's, whatever happened to the blocks."""

import dataclasses
import functools
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ksana_jax import LLM, AttentionPattern, LoRARequest, SamplingParams
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.core.patterns import FULL
from ksana_jax.core.shared_kv import shared_by
from ksana_jax.devices import tuning
from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.kv.reading import read_bytes
from ksana_jax.loading.adapter import WEIGHTS, read_adapter
from ksana_jax.loading.config_json import load_config
from ksana_jax.models.dense import attention_weights
from ksana_jax.models.params import init_params, num_params, weights_of
from tests import machine
from tests.engine.small import VOCAB, expect_dense, tokens_of
from tests.reference import reference_logprobs

NEAR = AttentionPattern(window=12, num_sinks=3, sink_position="absolute")
PLAIN = ModelConfig(
    **{"vocab_size": VOCAB, "d_model": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
    **{"d_ff": 48, "max_position": 128},
)
# Each second layer reads the one before it; the upper half reads one layer; two layers read one with another between.
KV_LAYERS = {"cla2": (0, 0, 2, 2), "yoco": (0, 1, 1, 1), "apart": (0, 1, 0, 1)}
SETTINGS = {"block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8, "query_tile": 8, "max_model_len": 96}
RNG = np.random.default_rng(2)
TEXT = RNG.integers(2, VOCAB, 96)
# Two texts with 40 tokens in common.
PROMPTS = [TEXT[:60].tolist(), TEXT[:40].tolist() + RNG.integers(2, VOCAB, 12).tolist()]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
pytestmark = pytest.mark.usefixtures("few_shapes")


@functools.cache
def model(name: str):
    config = dataclasses.replace(PLAIN, kv_layers=KV_LAYERS[name]).validate()
    return config, init_params(config, seed=3, std=0.5)


_programs: dict = {}


def make(name="cla2", pattern="full", **settings) -> LLM:
    llm = LLM.from_params(*model(name), pattern=pattern, **SETTINGS | {"num_blocks": 120} | settings)
    llm.runner._compiled = _programs.setdefault(repr((name, pattern, settings)), llm.runner._compiled)
    return llm


def in_layout(num_layers: int, kv_layers=None, **settings) -> KVLayout:
    config = dataclasses.replace(PLAIN, num_layers=num_layers, kv_layers=kv_layers)
    return layout_of(config, **{"dtype": "bf16", "block_size": 16} | settings)


@functools.cache
def expected(name="cla2", pattern=FULL) -> list[list[int]]:
    """Greedy tokens of the dense model."""
    config, params = model(name)
    found = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(16):
            text.append(int(reference_logprobs(params, config, np.array(text), pattern)[-1].argmax()))
        found.append(text[len(prompt) :])
    return found


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        pytest.param(name, attention, marks=[machine.native_products] * (attention == "native"))
        for name in KV_LAYERS
        for attention in ("xla", "native")
    ],
)
def test_log_probabilities_are_those_of_the_dense_model(name, attention):
    llm = make(name, operators={"attention": attention})
    expect_dense(llm, *model(name), [TEXT[:33], TEXT[5:8], TEXT[:1]])
    assert tokens_of(llm, PROMPTS, GREEDY) == expected(name)


@pytest.mark.parametrize(
    "change", [{"layers_of_program": None, "joins_matrices": True}, {"layers_of_program": 1}], ids=str
)
def test_steps_of_other_platforms(change, monkeypatch):
    changed = dataclasses.replace(tuning.tuning("cpu"), **change)
    monkeypatch.setitem(tuning._TUNING, "cpu", changed)
    config, params = model("yoco")
    llm = LLM.from_params(config, params, **SETTINGS, num_blocks=120, operators={"linear": "xla", "attention": "xla"})
    assert (llm.runner.params.layers[0].w_qkv is not None) == changed.joins_matrices
    assert llm.runner.params.layers[2].w_qkv is None
    assert tokens_of(llm, PROMPTS, GREEDY) == expected("yoco")


def test_a_layer_that_reads_has_no_weights_of_keys_and_values():
    config = dataclasses.replace(model("cla2")[0], qkv_bias=True, qk_norm="head")
    full = dataclasses.replace(config, kv_layers=None)
    reading = init_params(config).layers[1]
    assert not [name for name in weights_of(reading) if re.fullmatch("([wb]_[kv]|k_norm)", name)]
    assert {"w_q", "b_q", "q_norm", "w_o"} <= weights_of(reading).keys()
    of_layer = 2 * (16 * 32 + 16) + 8
    assert num_params(full) - num_params(config) == 2 * of_layer


def test_half_of_the_layers_sharing_halves_the_bytes_of_a_token():
    plain, shared = make("cla2").engine, LLM.from_params(PLAIN, init_params(PLAIN), **SETTINGS, num_blocks=120).engine
    assert 2 * plain.scheduler.layout.token_bytes == shared.scheduler.layout.token_bytes
    # A pool of as many bytes holds twice the tokens.
    by_bytes = [
        LLM.from_params(config, init_params(config), **SETTINGS | {"max_num_seqs": 64}, memory_bytes=2**20)
        for config in (PLAIN, model("cla2")[0])
    ]
    few, many = (llm.engine.executor.cache.num_blocks for llm in by_bytes)
    assert many == 2 * few
    assert [llm.kv_bytes_per_token(64) for llm in by_bytes] == [512, 256]


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4", "turboquant4", "kivi2", "gear4"])
@pytest.mark.parametrize("factor", [2, 4])
def test_blocks_are_those_of_a_model_of_the_layers_that_write(dtype, factor):
    shared, plain = in_layout(8, shared_by(factor, 8), dtype=dtype), in_layout(8 // factor, dtype=dtype)
    assert shared.leaves == plain.leaves and shared.token_bytes == plain.token_bytes
    assert [len(group.layers) for group in shared.groups] == [len(group.layers) for group in plain.groups]
    assert shared.places == tuple(np.repeat(np.array(plain.places), factor, axis=0).view("i8,i8")[:, 0].tolist())
    assert len(shared.residual_places) == len(plain.residual_places) * factor
    # Each layer reads them.
    assert read_bytes(shared, 40, 10) == factor * read_bytes(plain, 40, 10)


def test_groups_of_mixed_patterns_have_only_layers_that_write():
    pattern = (NEAR, NEAR, FULL, FULL)
    layout = in_layout(4, (0, 0, 2, 2), patterns=pattern)
    assert [group.layers for group in layout.groups] == [(0,), (2,)]
    assert layout.places == ((0, 0), (0, 0), (1, 0), (1, 0))
    llm = make(pattern=[{"window": 12, "num_sinks": 3, "sink_position": "absolute"}] * 2 + ["full"] * 2)
    assert tokens_of(llm, PROMPTS, GREEDY) == expected(pattern=pattern)


@pytest.mark.parametrize("position", ["cache", "ceiling"])
def test_windows_with_repositioned_sinks(position):
    pattern = AttentionPattern(window=12, num_sinks=3, sink_position=position)
    llm = make(pattern={"window": 12, "num_sinks": 3, "sink_position": position})
    assert tokens_of(llm, PROMPTS, GREEDY) == expected(pattern=pattern)


def test_patterns_by_head():
    heads = {"window": 12, "num_sinks": 3, "sink_position": "absolute", "full_heads": [[1], [1], [], []]}
    pattern = (NEAR, FULL) * 2 + (NEAR,) * 4
    assert tokens_of(make(pattern=heads), PROMPTS, GREEDY) == expected(pattern=pattern)


def test_prefixes_are_found():
    llm = make(enable_prefix_caching=True, shared_prefix_attention=True)
    assert [tokens_of(llm, [p], GREEDY)[0] for p in PROMPTS] == expected()
    assert llm.engine.memory.counters.hit_tokens == 40
    assert tokens_of(llm, PROMPTS, GREEDY) == expected()


@pytest.mark.parametrize("how", ["swap", "recompute"])
def test_preempted_rows_come_back(how):
    llm = make(num_blocks=24, host_cache_bytes=2**18, preempt=how)
    assert tokens_of(llm, PROMPTS, GREEDY) == expected()
    assert llm.engine.scheduler.num_preemptions


def test_drafts_are_verified():
    prompts = [np.tile(TEXT[:7], 6).tolist(), PROMPTS[1]]
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    assert tokens_of(make(speculative_config=drafts), prompts, GREEDY) == tokens_of(make(), prompts, GREEDY)


def test_a_window_of_evictions_is_a_window():
    given = {"method": "window", "budget": 16, "interval": 1, "prompts": "streamed"}
    assert tokens_of(make(kv_eviction=given), PROMPTS, GREEDY) == expected(pattern=AttentionPattern(window=17))


@pytest.mark.parametrize("positions", ["cache", "absolute"])
def test_queries_of_the_layer_that_writes_alone_decide_which_tokens_are_evicted(positions):
    given = {"method": "h2o", "budget": 16, "sinks": 2, "interval": 4, "prompts": "streamed", "positions": positions}
    llm = make(kv_eviction=given, max_num_seqs=1)
    found = tokens_of(llm, PROMPTS[:1], GREEDY)
    # The scores of a model of the first layer alone, for the same text.
    config, params = model("cla2")
    below = config.first_layers(1), params.replace(layers=params.layers[:1])
    alone = LLM.from_params(*below, **SETTINGS | {"num_blocks": 120, "max_num_seqs": 1}, kv_eviction=given)
    forced = [{"prompt_token_ids": PROMPTS[0] + found[0][:8]}]
    asked = dataclasses.replace(GREEDY, max_tokens=1)
    scores = []
    for engine in (llm, alone):
        engine.generate(forced, asked)
        scores.append(np.asarray(engine.runner.cache.leaves["score"])[:, :1].copy())
    used = np.abs(scores[1]).sum(axis=(1, 2, 3, 4)) > 0
    assert used.any()
    np.testing.assert_allclose(scores[0][used], scores[1][used], atol=1e-5)


def test_adapters_change_the_queries_of_a_layer_that_reads(tmp_path):
    golden = Path(__file__).parents[1] / "golden"
    shutil.copytree(golden / "lora" / "llama-gqa-tied-plain", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / WEIGHTS)
    save_file({k: x for k, x in tensors.items() if "layers.1.self_attn.v" not in k}, tmp_path / WEIGHTS)
    config = dataclasses.replace(load_config(golden / "llama-gqa-tied"), family="llama_cla", kv_layers=(0, 0))
    params = init_params(config, seed=3, std=0.5)
    llm = LLM.from_params(config, params, **SETTINGS, num_blocks=64, enable_lora=True)
    asked = {"prompt_token_ids": np.arange(20) % config.vocab_size}
    [adapted] = llm.generate(asked, GREEDY, lora_request=LoRARequest("some", 1, str(tmp_path)))
    changes = read_adapter(tmp_path, config, "f32", 8).layers
    assert "w_q" in changes[1]
    layers = [
        p.replace(**{name: getattr(p, name) + change.b @ change.a for name, change in of_layer.items()})
        for p, of_layer in zip(params.layers, changes, strict=True)
    ]
    text = np.array([*adapted.prompt_token_ids, *adapted.outputs[0].token_ids])
    scores = reference_logprobs(params.replace(layers=tuple(layers)), config, text)
    assert scores[19:-1].argmax(-1).tolist() == adapted.outputs[0].token_ids
    [plain] = llm.generate(asked, GREEDY)
    assert plain.outputs[0].token_ids != adapted.outputs[0].token_ids


def test_selecting_layers_use_the_summaries_of_the_layer_that_writes():
    far = {"method": "quest", "budget": 96, "full_layers": 1}
    layout = make(kv_selection=far).engine.scheduler.layout
    assert [method is None for method in layout.selects_in] == [True, True, False, False]
    assert tokens_of(make(kv_selection=far), PROMPTS, GREEDY) == expected()
    near = {"method": "quest", "budget": 16, "full_layers": 0}
    found = make(kv_selection=near)
    first = tokens_of(found, PROMPTS, GREEDY)
    assert first != expected() and tokens_of(found, PROMPTS[::-1], GREEDY)[::-1] == first


def test_full_precision_layers():
    llm = make(kv_cache_dtype="int8", kv_full_precision_layers=[0])
    layout = llm.engine.scheduler.layout
    assert [leaf.shape[0] for leaf in layout.leaves] == [1, 1, 1]
    assert tokens_of(llm, PROMPTS, GREEDY) != tokens_of(make(kv_cache_dtype="int4"), PROMPTS, GREEDY)
    with pytest.raises(ConfigError, match="has layers without keys and values: 1 reads layer 0"):
        make(kv_cache_dtype="int8", kv_full_precision_layers=[0, 1])


def test_another_pattern_than_that_of_the_layer_that_writes_is_refused():
    said = "layers that read another layer's keys and values does not go with another pattern than that layer's"
    with pytest.raises(ConfigError, match=said):
        make(pattern=[{"window": 12}, "full", "full", "full"])
    with pytest.raises(ConfigError, match=said):
        make(pattern={"window": 12, "full_heads": [[1], [0], [], []]})
    llm = make()
    with pytest.raises(ConfigError, match=said):
        llm.set_pattern([{"window": 12}, "full", "full", "full"])
    llm.set_pattern({"window": 12})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_layers": (0, 0, 2)}, r"kv_layers is \(0, 0, 2\), must name a layer for each of 4 layers"),
        ({"kv_layers": (0, 2, 2, 2)}, r"kv_layers\[1\] is 2, must be an integer from 0 to 1"),
        ({"kv_layers": (0, 0, 1, 3)}, "layer 2 reads layer 1, which stores no keys and values"),
        (
            {"kv_layers": (0, 0, 2, 2), "rope": (RopeConfig(), RopeConfig(theta=5.0), *[RopeConfig()] * 2)},
            "layer 1 has another rope than layer 0, whose keys it reads rotated",
        ),
    ],
)
def test_layers_that_cannot_be_read_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(PLAIN, **change).validate()


def test_the_dense_model_has_the_weights_of_reading_layers():
    config, params = model("yoco")
    weights, tokens = [], TEXT[:9]
    reference_logprobs(params, config, tokens, attention=weights)
    with jax.default_matmul_precision("highest"):
        found = attention_weights(params, jnp.asarray(tokens), config=config)
    np.testing.assert_allclose(np.asarray(found), np.reshape(weights, (4, 4, 9, 9)), atol=1e-5)
