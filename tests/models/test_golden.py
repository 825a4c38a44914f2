"""Every family, attention kind and rope kind against transformers' results, from the committed files."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.core.patterns import FULL
from ksana_jax.loading import load_model
from ksana_jax.models.dense import dense_logits
from ksana_jax.models.families import FAMILIES
from ksana_jax.models.params import Params, weights_of
from tests.golden.cases import GoldenCase, beyond_context, golden_case, golden_cases

pytestmark = pytest.mark.usefixtures("quick_compiles")

# Two float32 implementations that add in different orders; log-probabilities here reach down to -25.
ATOL = 1e-4

CASES = list(golden_cases())
compiled_logits = jax.jit(dense_logits, static_argnames=("config", "max_len"))
every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@functools.cache
def model_of(name: str) -> tuple[ModelConfig, Params]:
    return load_model(golden_case(name).model_dir)


def logprobs_of(case: GoldenCase, tokens: np.ndarray, length: int) -> np.ndarray:
    """Padded at the end to a length, so that texts share a compilation; earlier positions do not see the padding."""
    config, params = model_of(case.name)
    padded = np.pad(tokens, (0, length - len(tokens)))
    # Within the trained context "dynamic" is not stretched, however far the padding goes.
    return np.asarray(jax.nn.log_softmax(compiled_logits(params, padded, config=config, max_len=1)))[: len(tokens)]


@every_case
def test_log_probabilities_of_prompts_are_those_of_transformers(case):
    for prompt, expected in zip(case.prompts, case.logprobs, strict=True):
        np.testing.assert_allclose(logprobs_of(case, prompt, 96), expected, atol=ATOL, rtol=0)


@every_case
def test_greedy_tokens_are_those_of_transformers(case):
    for prompt, expected in zip(case.prompts, case.greedy, strict=True):
        text = np.concatenate([prompt, expected])
        # Each is the best token after those before it, so greedy decoding takes exactly these.
        best = logprobs_of(case, text, 96).argmax(-1)
        assert best[len(prompt) - 1 : -1].tolist() == expected.tolist()


def test_dynamic_rope_of_a_whole_text_beyond_the_trained_context():
    model_dir, text, expected = beyond_context()
    config, params = load_model(model_dir)
    assert len(text) > config.max_position
    scores = compiled_logits(params, text, config=config, max_len=len(text))
    np.testing.assert_allclose(jax.nn.log_softmax(scores), expected, atol=ATOL, rtol=0)
    np.testing.assert_allclose(dense_logits(params, jnp.asarray(text), config=config), scores, atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", [c.name for c in CASES if "rope" in c.name or "yarn" in c.name])
def test_golden_files_notice_a_missing_rope_scaling(name):
    """A check of the files themselves: without the scaling the same test would fail by far."""
    case, (config, params) = golden_case(name), model_of(name)
    text, expected = (case.prompts[2], case.logprobs[2]) if "dynamic" not in name else beyond_context()[1:]
    plain = dataclasses.replace(config, rope=RopeConfig(theta=config.layers[0].attention.rope.theta))
    scores = compiled_logits(params, text, config=plain)
    assert np.abs(jax.nn.log_softmax(scores) - expected).max() > 1


@pytest.mark.parametrize("name", [case.name for case in CASES if "window" in case.name])
def test_golden_files_notice_a_missing_window(name):
    case, (config, params) = golden_case(name), model_of(name)
    scores = compiled_logits(params, case.prompts[2], config=dataclasses.replace(config, pattern=FULL))
    assert np.abs(jax.nn.log_softmax(scores) - case.logprobs[2]).max() > 1


FEATURES = {
    "soft_cap": None,
    "logit_soft_cap": None,
    "attention_scale": None,
    "embed_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "mlp": "swiglu",
    "rope": RopeConfig(),
}


@pytest.mark.parametrize(
    "name", [case.name for case in CASES if case.name.startswith(("gemma2", "gemma3", "granite-"))]
)
def test_golden_files_notice_each_missing_feature(name):
    case, (config, params) = golden_case(name), model_of(name)
    features = [f for f, value in FEATURES.items() if getattr(config, f) != value]
    assert len(features) >= 4
    for feature in features:
        without = dataclasses.replace(config, **{feature: FEATURES[feature]})
        scores = compiled_logits(params, case.prompts[2], config=without)
        assert np.abs(jax.nn.log_softmax(scores) - case.logprobs[2]).max() > 0.05, feature


@pytest.mark.parametrize("name", [case.name for case in CASES if case.name.startswith("gpt_oss")])
def test_golden_files_notice_each_part_of_gpt_oss(name):
    case, (config, params) = golden_case(name), model_of(name)
    experts = config.experts
    weights = weights_of(params.layers[0]).items()
    changed = [(config, {f: 0 * w}) for f, w in weights if f.startswith("b_") or f == "sink_logits"]
    changed += [
        (dataclasses.replace(config, experts=dataclasses.replace(experts, **change)), {})
        for change in ({"limit": 7.0}, {"sigmoid_factor": 1.5}, {"num_chosen": 2}, {"normalised": False})
    ]
    for other, zeros in changed:
        layers = tuple(p.replace(**zeros) for p in params.layers)
        scores = compiled_logits(params.replace(layers=layers), case.prompts[2], config=other)
        assert np.abs(jax.nn.log_softmax(scores) - case.logprobs[2]).max() > 0.05, (zeros.keys(), other)


@pytest.mark.parametrize("name", [case.name for case in CASES if case.name.startswith(("olmo", "glm4"))])
def test_golden_files_notice_each_norm_after_a_product(name):
    case, (config, params) = golden_case(name), model_of(name)
    norms = ("q_proj_norm", "k_proj_norm", "post_attn_norm", "post_mlp_norm")
    for field in (norm for norm in norms if getattr(params.layers[0], norm) is not None):
        layers = tuple(p.replace(**{field: None}) for p in params.layers)
        scores = compiled_logits(params.replace(layers=layers), case.prompts[2], config=config)
        assert np.abs(jax.nn.log_softmax(scores) - case.logprobs[2]).max() > 0.05, field


@pytest.mark.parametrize("name", [case.name for case in CASES if "nope" in case.name])
def test_golden_files_notice_a_rope_in_each_layer_without_one(name):
    case, (config, params) = golden_case(name), model_of(name)
    [rope] = {layer.attention.rope for layer in config.layers} - {RopeConfig("none")}
    for layer in (i for i, spec in enumerate(config.layers) if spec.attention.rope.kind == "none"):
        ropes = tuple(rope if i == layer else spec.attention.rope for i, spec in enumerate(config.layers))
        scores = compiled_logits(params, case.prompts[2], config=dataclasses.replace(config, rope=ropes))
        assert np.abs(jax.nn.log_softmax(scores) - case.logprobs[2]).max() > 1


@pytest.mark.parametrize("name", [case.name for case in CASES if "positions" in case.name])
def test_golden_files_notice_a_shifted_table_of_positions(name):
    case, (config, params) = golden_case(name), model_of(name)
    shifted = dataclasses.replace(config, position_offset=1)
    scores = compiled_logits(params, case.prompts[2], config=shifted)
    assert np.abs(jax.nn.log_softmax(scores) - case.logprobs[2]).max() > 1


@pytest.mark.parametrize("name", [case.name for case in CASES if "alibi" in case.name])
def test_golden_files_notice_the_slopes_of_another_head(name):
    case, (config, params) = golden_case(name), model_of(name)
    scores = compiled_logits(
        params, case.prompts[2], config=dataclasses.replace(config, alibi=config.alibi and config.alibi[::-1])
    )
    assert np.abs(jax.nn.log_softmax(scores) - case.logprobs[2]).max() > 1


def test_golden_files_cover_every_family_rope_kind_and_grouping():
    configs = {case.name: model_of(case.name)[0] for case in CASES}
    ours = {"llama_sinks", "llama_cla"}  # transformers has no such models
    assert {c.family for c in configs.values()} == set(FAMILIES) - ours
    kinds = {layer.attention.rope.kind for c in configs.values() for layer in c.layers}
    assert kinds == {"default", "linear", "dynamic", "llama3", "yarn", "longrope", "none"}
    assert {c.num_heads // c.num_kv_heads for c in configs.values()} == {1, 2, 4}
    assert {c.tie_embeddings for c in configs.values()} == {False, True}
    given = [json.loads((case.model_dir / "config.json").read_text()) for case in CASES]
    assert {"head_dim" in values for values in given} == {False, True}
    assert {"rope_parameters" in values for values in given} == {False, True}
