"""Scale, soft caps, learned sinks and ropes that differ by layer, through the engine, against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import LLM, AttentionPattern, SamplingParams
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.models.dense import attention_weights, dense_logits
from ksana_jax.models.params import init_params, num_params
from ksana_jax.scheduler.step.types import StepShape
from tests.engine.small import expect_dense
from tests.reference import reference_logprobs

CONFIG = ModelConfig(
    vocab_size=61,
    d_model=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=48,
    max_position=256,
    attention_scale=0.6,
    soft_cap=1.5,
    sinks="learned",
    logit_soft_cap=4.0,
    rope=(RopeConfig(theta=100.0), RopeConfig(theta=10_000.0)),
    pattern=(AttentionPattern(window=9), AttentionPattern()),
)
# float32 against float64 through two layers.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def params():
    params = init_params(CONFIG, seed=3, std=0.4)
    sinks = np.random.default_rng(1).normal(1.0, 1.0, (2, 4)).astype(np.float32)
    layers = [dataclasses.replace(p, sink_logits=jnp.asarray(s)) for p, s in zip(params.layers, sinks, strict=True)]
    return dataclasses.replace(params, layers=tuple(layers))


def make_llm(params, config=CONFIG, **settings) -> LLM:
    return LLM.from_params(
        config,
        params,
        block_size=8,
        max_num_seqs=8,
        query_tile=8,
        max_model_len=64,
        max_num_batched_tokens=24,
        max_repositioned_sinks=4,
        **settings,
    )


def test_each_layer_has_its_own_rope_and_window_and_all_are_capped_scaled_and_have_sinks(params):
    rng = np.random.default_rng(7)
    llm = make_llm(params)
    expect_dense(llm, CONFIG, params, [rng.integers(0, 61, n) for n in (1, 17, 40)])
    # A user's pattern takes the place of the model's, and repositioned sinks turn by each layer's own rope.
    streaming = AttentionPattern(window=6, num_sinks=3)
    expect_dense(llm, CONFIG, params, [rng.integers(0, 61, 40)], streaming)


@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize(
    "pattern",
    [
        AttentionPattern(window=6, num_sinks=3),
        AttentionPattern(window=6, num_sinks=3, sink_position="ceiling", sink_ceiling=9),
        AttentionPattern(window=6, num_sinks=3, sink_position="absolute"),
    ],
    ids=lambda pattern: pattern.sink_position,
)
def test_scores_fall_with_the_distance_at_which_a_query_looks_at_a_key(params, pattern):
    config = dataclasses.replace(CONFIG, alibi=(0.5, 0.2, 0.1, 0.05), rope=RopeConfig())
    rng = np.random.default_rng(7)
    expect_dense(make_llm(params, config), config, params, [rng.integers(0, 61, n) for n in (40, 3)], pattern)


@pytest.mark.usefixtures("few_shapes")
def test_distances_are_those_in_the_cache_if_tokens_in_between_were_evicted(params):
    config = dataclasses.replace(CONFIG, alibi=(0.5, 0.2, 0.1, 0.05), rope=RopeConfig(), pattern=AttentionPattern())
    asked = SamplingParams(temperature=0, max_tokens=24, logprobs=0, detokenize=False)
    streaming = {"method": "streaming_llm", "budget": 8, "sinks": 2, "interval": 1}
    found = []
    for setting in ({"kv_eviction": streaming}, {"pattern": AttentionPattern(window=7, num_sinks=2)}):
        sizes = {"block_size": 8, "max_num_seqs": 1, "query_tile": 8, "max_model_len": 32, "max_num_batched_tokens": 8}
        llm = LLM.from_params(config, params, **sizes, **setting)
        found.append(llm.generate({"prompt_token_ids": range(5, 12)}, asked)[0].outputs[0])
    one, other = found
    assert one.token_ids == other.token_ids
    found, expected = ([e[i].logprob for e, i in zip(c.logprobs or [], c.token_ids)] for c in (one, other))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_softmax_off_by_one_has_a_sink_logit_of_zero_and_no_parameter(params):
    text = np.random.default_rng(7).integers(0, 61, 40)
    config = dataclasses.replace(CONFIG, sinks="zero")
    without = init_params(config, seed=3, std=0.4)
    assert num_params(config) == num_params(dataclasses.replace(CONFIG, sinks=None)) == num_params(CONFIG) - 2 * 4
    zeros = [p.replace(sink_logits=jnp.zeros(4)) for p in params.layers]
    learned = dense_logits(params.replace(layers=tuple(zeros)), jnp.asarray(text), config=CONFIG)
    np.testing.assert_array_equal(dense_logits(without, jnp.asarray(text), config=config), learned)


@pytest.mark.soak
def test_softmax_off_by_one_is_served(params):
    text = np.random.default_rng(7).integers(0, 61, 40)
    config = dataclasses.replace(CONFIG, sinks="zero")
    without = init_params(config, seed=3, std=0.4)
    expect_dense(make_llm(without, config), config, without, [text], AttentionPattern(window=6, num_sinks=3))


@pytest.mark.soak
def test_learned_sinks_join_a_softmax_once_where_rows_share_their_prefix(params):
    text = np.random.default_rng(7).integers(0, 61, 40)
    llm = make_llm(params, shared_prefix_attention=True, enable_prefix_caching=True, pattern=AttentionPattern())
    llm.engine.builder = dataclasses.replace(llm.engine.builder, min_saved_tokens=1)
    llm.generate({"prompt_token_ids": text}, SamplingParams(temperature=0, max_tokens=1, detokenize=False))
    texts = [np.append(text, last) for last in range(8)]
    asked = SamplingParams(temperature=0, max_tokens=4, logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": t} for t in texts], asked)
    assert any(isinstance(key, StepShape) and key.shared_rows for key in llm.runner.programs)
    for given, output in zip(texts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        expected = reference_logprobs(params, CONFIG, np.concatenate([given, tokens]), AttentionPattern())
        got = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs or [], tokens, strict=True)]
        np.testing.assert_allclose(got, expected[len(given) - 1 : -1].max(-1), atol=TOLERANCE)


def test_dense_logits_and_weights_see_scale_caps_sinks_ropes_and_windows(params):
    text = np.random.default_rng(7).integers(0, 61, 40)
    found = jax.nn.log_softmax(dense_logits(params, jnp.asarray(text), config=CONFIG))
    np.testing.assert_allclose(found, reference_logprobs(params, CONFIG, text), atol=TOLERANCE)
    weights = np.asarray(attention_weights(params, jnp.asarray(text), config=CONFIG))
    assert weights.sum(-1).max() < 0.99, "learned sinks take their part"
    assert weights[0, :, 20, :12].max() == 0 and weights[1, :, 20, :12].min() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"soft_cap": 0.0}, "soft_cap is 0.0, must be a finite number above 0 or None"),
        ({"attention_scale": -1.0}, "attention_scale is -1.0"),
        ({"sinks": True}, "sinks is True, must be one of None, learned, zero"),
        ({"alibi": (0.5, 0.1)}, "alibi has 2 slopes, num_heads is 4"),
        ({"alibi": (0.5, 0.1, 0.1, 0.0)}, "alibi is 0.0"),
        ({"position_offset": -1}, "position_offset is -1"),
        ({"rope": (RopeConfig(),)}, "rope has 1 entries, the model has 2 layers"),
        ({"rope": (RopeConfig(), RopeConfig(theta=-1.0))}, "rope theta is -1.0"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(change, message):
    with pytest.raises(ConfigError) as refusal:
        dataclasses.replace(CONFIG, **change).validate()
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp": "relu2"}, "mlp is 'relu2', must be one of swiglu"),
        ({"norm": "batch"}, "norm is 'batch', must be one of rms"),
    ],
)
def test_an_unknown_kind_is_refused_with_those_that_there_are(change, message):
    with pytest.raises(ConfigError, match=message):
        init_params(dataclasses.replace(CONFIG, **change))
