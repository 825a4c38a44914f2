"""Own kinds of MLPs and norms, and an own weight, divided among devices; what does not state how is refused."""

import dataclasses

import numpy as np
import pytest

from ksana_jax import LLM
from ksana_jax.core.config import ConfigError
from ksana_jax.engine.build import build_engine
from ksana_jax.engine.settings import engine_config
from tests.models.own_kinds import CONFIGS, Unstated, register, weights
from tests.models.own_matrix import blocked
from tests.sharding.on_devices.engines import GREEDY, SETTINGS
from tests.sharding.on_devices.test_tokens import ONE_SHAPE

pytestmark = pytest.mark.usefixtures("quick_compiles")

PROMPTS = [{"prompt_token_ids": np.random.default_rng(2).integers(2, 97, n)} for n in (9, 4)]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    register(monkeypatch)


def served(name: str, **settings) -> tuple[list[list[int]], list[float]]:
    """Tokens of each prompt, and the log-probabilities of all."""
    params = weights(name)
    if settings.get("quantization") == "blocks":
        settings["quantization"], params = None, blocked(params)[0]
    llm = LLM.from_params(CONFIGS[name], params, **SETTINGS | ONE_SHAPE | settings)
    outputs = llm.generate(PROMPTS, dataclasses.replace(GREEDY, max_tokens=6, logprobs=0))
    found = [output.outputs[0] for output in outputs]
    scores = [entry[token].logprob for c in found for entry, token in zip(c.logprobs, c.token_ids, strict=True)]
    return [c.token_ids for c in found], scores


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("own", "w8a8"),
        ("everything", None),
        ("after", None),
        ("scaled", None),
        ("parallel", None),
        ("experts", None),
        ("clamped", None),
        ("mixed", None),
        pytest.param("everything", "w8a8", marks=pytest.mark.soak),
        pytest.param("own", "int8", marks=pytest.mark.soak),
        pytest.param("experts", "w8a8", marks=pytest.mark.soak),
        pytest.param("clamped", "w8a8", marks=pytest.mark.soak),
        pytest.param("after", "w8a8", marks=pytest.mark.soak),
        pytest.param("after", "blocks", marks=pytest.mark.soak),
        pytest.param("squared", None, marks=pytest.mark.soak),
    ],
)
def test_tokens_and_log_probabilities_are_those_of_one_device(name, quantization):
    one, two = (served(name, tensor_parallel_size=n, quantization=quantization) for n in (1, 2))
    assert one[0] == two[0]
    # Sums of products in another order, through two layers; 0.15 where codes of a row have a scale for each device.
    np.testing.assert_allclose(one[1], two[1], atol=2e-5)


def refused(config) -> str:
    with pytest.raises(ConfigError) as refusal:
        build_engine(config, pytest.fail, engine_config(SETTINGS | {"tensor_parallel_size": 2}))
    return str(refusal.value)


def test_what_does_not_state_how_it_is_divided_is_refused_before_weights_are_read(monkeypatch):
    said = refused(dataclasses.replace(CONFIGS["unstated"], d_ff=47))
    assert "tensor_parallel_size is 2: d_ff 47 is not a multiple of it; mlp 'unstated' does not state divides" in said
    register(monkeypatch, Unstated)
    after = dataclasses.replace(CONFIGS["after"], norm="centred")
    assert "qk_norm 'projection' divides root mean square norms, not 'centred'" in refused(after)
    assert "weight w_new does not state what tensor_parallel_size must know" in refused(CONFIGS["own"])
