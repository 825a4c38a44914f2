"""A pool of latents, which are keys and values at once, under everything that moves, encodes, evicts and selects
them. Tokens are those of the model without a cache, which `tests/models/test_golden.py` compares with transformers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import LLM, AttentionPattern, SamplingParams, Steering, StructuredOutputsParams
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import LatentSpec, RopeConfig
from ksana_jax.core.patterns import FULL
from ksana_jax.engine.activations import activations
from ksana_jax.kv.codecs.registry import find_codec
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.models.dense import dense_logits
from ksana_jax.models.frequencies import layer_ropes
from ksana_jax.models.params import init_params
from ksana_jax.models.transformer import embedded, final_norm, logits, run_layers
from tests.engine.small import VOCAB, Letters, tokens_of
from tests.machine import native_products

CONFIG = ModelConfig(
    **{"vocab_size": VOCAB, "d_model": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 1, "head_dim": 32},
    **{"d_ff": 48, "max_position": 128, "attention_scale": 16**-0.5, "latent": LatentSpec(24, 8, 8, 10, 12)},
    rope=RopeConfig(partial_rotary_factor=0.25),
)
SETTINGS = {"block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8, "query_tile": 8, "max_model_len": 96}
RNG = np.random.default_rng(2)
TEXT = RNG.integers(2, VOCAB, 96)
# Two prompts with 40 tokens in common.
PROMPTS = [TEXT[:60].tolist(), TEXT[:40].tolist() + RNG.integers(2, VOCAB, 12).tolist()]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
WINDOW = {"window": 12, "num_sinks": 3, "sink_position": "absolute"}
pytestmark = pytest.mark.usefixtures("few_shapes")
_programs: dict = {}


@functools.cache
def params():
    return init_params(CONFIG, seed=3, std=0.5)


def make(**settings) -> LLM:
    llm = LLM.from_params(CONFIG, params(), **SETTINGS | {"num_blocks": 120} | settings)
    llm.runner._compiled = _programs.setdefault(repr(settings), llm.runner._compiled)
    return llm


def dense_greedy(config, weights) -> list[list[int]]:
    """Greedy tokens of a model without a cache."""
    scores = jax.jit(functools.partial(dense_logits, config=config))
    found = []
    for prompt in PROMPTS:
        text = np.zeros(96, np.int32)
        text[: len(prompt)] = prompt
        for end in range(len(prompt), len(prompt) + 16):
            text[end] = int(scores(weights, text)[end - 1].argmax())
        found.append(text[len(prompt) : len(prompt) + 16].tolist())
    return found


@functools.cache
def greedy(pattern=FULL) -> list[list[int]]:
    return dense_greedy(dataclasses.replace(CONFIG, pattern=pattern), params())


H2O = {"method": "h2o", "budget": 90, "interval": 1, "prompts": "streamed"}
SAME = {
    "chunks and blocks": {},
    "several steps in a call": {"num_scheduler_steps": 4},
    "a shared prefix": {"enable_prefix_caching": True, "shared_prefix_attention": True},
    "swap": {"num_blocks": 24, "host_cache_bytes": 2**18, "preempt": "swap"},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "Quest": {"kv_selection": {"method": "quest", "budget": 96, "full_layers": 0}},
    "RocketKV": {"kv_selection": {"method": "rocketkv", "budget": 96, "full_layers": 0}},
    "H2O without a need": {"kv_eviction": H2O},
    "unrotated keys": {"kv_eviction": H2O | {"positions": "cache"}},
}


@pytest.mark.parametrize("name", SAME)
def test_tokens_are_those_of_the_model_without_a_cache(name):
    llm = make(**SAME[name])
    for _ in range(2 if "prefix" in name else 1):
        assert tokens_of(llm, PROMPTS, GREEDY) == greedy()
    scheduler, counters = llm.engine.scheduler, llm.engine.memory.counters
    assert bool(scheduler.num_preemptions) == (name == "swap") and bool(counters.hit_tokens) == ("prefix" in name)


def test_prefixes_come_back_from_host_and_disk(tmp_path):
    settings = {"num_blocks": 40, "enable_prefix_caching": True, "host_cache_bytes": 2**15, "cache_write": "through"}
    llm = make(**settings, disk_cache_dir=str(tmp_path))
    others = RNG.integers(2, VOCAB, (3, 70)).tolist()
    for prompts in (PROMPTS, others, PROMPTS):
        found = tokens_of(llm, prompts, GREEDY)
    assert found == greedy() and llm.engine.memory.counters.hit_tokens
    llm.close()
    again = make(**settings, disk_cache_dir=str(tmp_path))
    assert tokens_of(again, PROMPTS, GREEDY) == greedy() and again.engine.memory.counters.hit_tokens


@pytest.mark.parametrize("position", ["absolute", "cache"])
def test_windows_and_sinks(position):
    pattern = WINDOW | {"sink_position": position}
    found = tokens_of(make(pattern=pattern), PROMPTS, GREEDY)
    if position == "absolute":
        assert found == greedy(AttentionPattern(**pattern)) != greedy()
    else:  # one step a token computes the same as chunks
        assert found == tokens_of(make(pattern=pattern, max_num_batched_tokens=4, query_tile=4), PROMPTS, GREEDY)


def test_a_window_of_evictions_is_a_window():
    given = {"method": "window", "budget": 16, "interval": 1, "prompts": "streamed"}
    assert tokens_of(make(kv_eviction=given), PROMPTS, GREEDY) == greedy(AttentionPattern(window=17))


@pytest.mark.parametrize("method", ["snapkv", "tova", "keydiff", "vatp", "adakv", "expected_attention", "lagkv"])
def test_methods_evict_one_latent_for_all_heads(method):
    prompts = "once" if method == "adakv" else "streamed"
    llm = make(kv_eviction={"method": method, "budget": 32, "prompts": prompts}, kept_tokens=True)
    [output] = llm.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY)
    kept: Any = output.outputs[0].kept_tokens
    assert kept.shape == (2, 1, 75) and kept.sum(axis=-1).max() < 60


def read_back(text: Any, codec: str = "f32", steering: Steering | None = None) -> tuple[jax.Array, Any, Any]:
    """Log-probabilities, attention weights and hidden states of a text, its latents as a codec decodes them."""
    stored, ropes, positions = find_codec(codec), layer_ropes(CONFIG), jnp.arange(len(text))
    vectors, heads = ({}, {}) if steering is None else (steering.vectors, steering.heads_off)
    all_weights, hidden = [], []

    def attend(layer, q, k, v, state):
        rope, angles = ropes[layer], ropes[layer].angles(positions)
        q, k = rope.rotate(q, angles), stored.decode(stored.encode(rope.rotate(k, angles), jnp), jnp)[:, 0]
        scores = jnp.einsum("TNH,CH->NTC", q, k.astype(jnp.float32)) * 16**-0.5
        weights = jax.nn.softmax(jnp.where(positions[:, None] >= positions, scores, -jnp.inf))
        all_weights.append(weights)
        kept = np.isin(np.arange(4), heads.get(layer, ()), invert=True)
        return jnp.einsum("NTC,CH,N->TNH", weights, k.astype(jnp.float32), kept), state

    def after_layer(layer, x):
        hidden.append(x + vectors.get(layer, 0))
        return hidden[-1]

    x = embedded(params(), text, config=CONFIG)
    x, _ = run_layers(params().layers, x, attend, None, specs=CONFIG.layers, after_layer=after_layer)
    scores = logits(params(), final_norm(params(), x, config=CONFIG), config=CONFIG)
    return jax.nn.log_softmax(scores), np.array(all_weights), np.array(hidden)


@pytest.mark.parametrize("codec", ["bf16", "int8", "fp8_e4m3", "int4", "hadamard4", "turboquant4"])
def test_codecs_encode_latents_once(codec):
    llm = make(kv_cache_dtype=codec)
    assert llm.engine.scheduler.layout.num_sides == 1
    asked = SamplingParams(temperature=0, forced_token_ids=greedy()[0], max_tokens=None, logprobs=-1, detokenize=False)
    [output] = llm.generate({"prompt_token_ids": PROMPTS[0]}, asked)
    text = np.array(PROMPTS[0] + greedy()[0])
    exact, encoded = (np.asarray(read_back(text, name)[0])[len(PROMPTS[0]) - 1 : -1] for name in ("f32", codec))
    # Numbers that float32 rounds to the next code, a few in ten thousand, are what remains.
    assert np.abs(output.outputs[0].distributions - encoded).mean() < 0.1 * np.abs(exact - encoded).mean()


def test_beams_and_completions_share_their_prompt():
    few, many = make(num_blocks=60, max_num_seqs=4), make(max_num_seqs=4)
    for asked in (
        SamplingParams(beam_width=3, max_tokens=8, ignore_eos=True, detokenize=False),
        SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True, detokenize=False),
    ):
        assert tokens_of(few, PROMPTS[:1], asked) == tokens_of(many, PROMPTS[:1], asked)


def test_latents_are_kept_over_sleep():
    llm = make(enable_prefix_caching=True)
    assert tokens_of(llm, PROMPTS, GREEDY) == greedy()
    llm.sleep(1)
    llm.wake_up()
    assert tokens_of(llm, PROMPTS, GREEDY) == greedy()


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8"}, {"kv_eviction": H2O | {"budget": 32}}], ids=str)
def test_another_engine_continues_a_saved_session(tmp_path, settings):
    first, other = (make(enable_prefix_caching=True, **settings) for _ in range(2))
    [output] = first.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY)
    count = first.save_session(output, tmp_path / "session")
    assert other.restore_session(tmp_path / "session") == count >= 72
    longer = [PROMPTS[0] + output.outputs[0].token_ids]
    assert tokens_of(other, longer, GREEDY) == tokens_of(first, longer, GREEDY)
    assert other.engine.memory.counters.hit_tokens == first.engine.memory.counters.hit_tokens == count


def test_activations_are_those_of_the_model_without_a_cache():
    found = activations(make(), {"prompt_token_ids": PROMPTS[0]}, GREEDY)
    _, weights, hidden = read_back(np.array((PROMPTS[0] + greedy()[0])[:-1]))
    np.testing.assert_allclose(found.attention, weights, atol=1e-4)
    np.testing.assert_allclose(found.hidden, hidden, atol=1e-4 * np.abs(hidden).max())


def test_the_last_token_attends_to_the_kept_ones():
    llm = make(kv_eviction=H2O | {"budget": 32}, kept_tokens=True)
    found = activations(llm, {"prompt_token_ids": PROMPTS[0]}, GREEDY)
    np.testing.assert_allclose(found.attention.sum(axis=-1), 1, atol=1e-5)
    kept: Any = found.output.outputs[0].kept_tokens
    assert not found.attention[:, :, -1][~kept.repeat(4, axis=1)].any() and 30 < kept.sum(axis=-1).max() < 34


def test_steered_requests_are_those_of_the_steered_model():
    steering = Steering(dict(enumerate(np.random.default_rng(4).normal(size=(2, 32)))), {0: [3, 1], 1: [2]})
    forced = {"forced_token_ids": greedy()[0], "max_tokens": None, "logprobs": -1}
    asked = dataclasses.replace(GREEDY, steering=steering, **forced)
    steered, plain = make().generate([{"prompt_token_ids": ids} for ids in PROMPTS], [asked, GREEDY])
    scores = read_back(np.array(PROMPTS[0] + greedy()[0]), steering=steering)[0]
    np.testing.assert_allclose(steered.outputs[0].distributions, scores[len(PROMPTS[0]) - 1 : -1], atol=1e-4)
    assert plain.outputs[0].token_ids == greedy()[1]


def test_outputs_keep_to_their_grammar():
    words = StructuredOutputsParams(choice=["the end", "another end"])
    llm = LLM.from_params(CONFIG, params(), tokenizer=Letters(), **SETTINGS, num_blocks=120)
    [output] = llm.generate("a", SamplingParams(temperature=0, max_tokens=20, structured_outputs=words))
    assert output.outputs[0].text in words.choice


# 576 numbers of two bytes, where keys and values of 128 heads of 192 and 128 numbers would take 81,920.
DEEPSEEK = dataclasses.replace(
    CONFIG, num_layers=61, num_heads=128, head_dim=576, latent=LatentSpec(512, 64, 128, 128, 1536)
)


def test_a_token_takes_the_bytes_of_its_latents():
    layout = layout_of(DEEPSEEK, dtype="bf16", block_size=64)
    assert layout.token_bytes == 61 * 1152 and layout.leaf("kv").shape == (61, 1, 1, 64, 576)
    llm = make(dtype="bf16")
    assert len(tokens_of(llm, PROMPTS[:1], GREEDY)[0]) == 16
    assert llm.runner.cache.nbytes == 120 * 4 * 2 * 32 * 2 == 120 * llm.engine.scheduler.layout.block_bytes


def test_latents_of_8_bits_change_distributions_little_and_take_the_bytes_of_their_arrays():
    assert layout_of(DEEPSEEK, dtype="latent8", block_size=64).token_bytes == 61 * 656
    spec = LatentSpec(128, 8, 8, 10, 12)
    config = dataclasses.replace(CONFIG, latent=spec, head_dim=136, rope=RopeConfig(partial_rotary_factor=1 / 17))
    forced = dataclasses.replace(GREEDY, max_tokens=None, forced_token_ids=greedy()[0], logprobs=-1)
    found, weights = {}, init_params(config, seed=3, std=0.5)
    for dtype in ("auto", "int8", "latent8"):
        llm = LLM.from_params(config, weights, **SETTINGS, num_blocks=40, kv_cache_dtype=dtype)
        [output] = llm.generate({"prompt_token_ids": PROMPTS[0]}, forced)
        scores: Any = output.outputs[0].distributions
        found[dtype] = np.exp(scores)
    assert llm.runner.cache.nbytes == 40 * 4 * 2 * (128 + 4 + 16) == 40 * llm.engine.scheduler.layout.block_bytes
    of_int8, of_latent8 = (np.abs(found[name] - found["auto"]).mean() for name in ("int8", "latent8"))
    assert 0 < of_latent8 < of_int8


def test_models_without_such_latents_refuse_their_codec():
    with pytest.raises(ValueError, match="latent8 does not go with a model without latents"):
        layout_of(ModelConfig(), dtype="latent8", block_size=16)
    other = dataclasses.replace(CONFIG, head_dim=136, latent=LatentSpec(72, 64, 8, 10))
    with pytest.raises(ValueError, match="encodes 128 of 136 numbers of a token, the model's latent has 72"):
        layout_of(other, dtype="latent8", block_size=4)
    with pytest.raises(ValueError, match="a multiple of 128 numbers and an even rest, head_dim is 32"):
        make(kv_cache_dtype="latent8")


@native_products
def test_invariant_numerics_give_the_same_bits_in_batches_chunks_and_behind_a_cached_prefix():
    forced = [dataclasses.replace(GREEDY, max_tokens=None, forced_token_ids=ids, logprobs=-1) for ids in greedy()]
    batched = make(numerics="invariant", enable_prefix_caching=True, block_size=16, num_blocks=40)
    alone = make(numerics="invariant", max_num_seqs=1, max_num_batched_tokens=32, block_size=32, num_blocks=12)
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in PROMPTS]
    expected = [alone.generate(prompt, asked)[0] for prompt, asked in zip(prompts, forced, strict=True)]
    for _ in range(2):
        for found, wanted in zip(batched.generate(prompts, forced), expected, strict=True):
            np.testing.assert_array_equal(found.outputs[0].distributions, wanted.outputs[0].distributions)
    assert batched.engine.memory.counters.hit_tokens >= 80


def test_attention_that_reads_keys_and_values_apart_is_refused():
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        make(operators={"attention": "hopper"})
