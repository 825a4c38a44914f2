"""`lora:` in a training file: the model's own weights stay, and the adapter is one that engines serve."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from ksana_jax import LLM, LoRARequest, SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.lab.training import train
from ksana_jax.lab.training.lora import first_adapter, merged
from ksana_jax.lab.training.optimizer import init_state, make_train_step
from ksana_jax.lab.training.settings import LoraSettings, load_config
from ksana_jax.loading import load_model
from ksana_jax.loading.adapter_export import Pair
from tests.reference import reference_logprobs

LORA = ["lora.rank=4", "lora.alpha=8", "lora.target_modules=[q_proj,down_proj]", "learning_rate=0.02"]
NAMES = {f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")}


@pytest.fixture(scope="module")
def overrides(finished):
    return [f"init_from={finished}/export", *LORA]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, tiny_config, overrides):
    """out_dir of a run of 20 steps."""
    out = tmp_path_factory.mktemp("adapted")
    train(str(tiny_config), [f"out_dir={out}", *overrides])
    return out


def pairs_of(out):
    found = load_file(out / "export" / "adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in found} == NAMES
    return {name: Pair(*(found[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")) for name in NAMES}


def test_an_adapter_learns_on_a_frozen_model(adapted, finished):
    losses = []
    for out in (finished, adapted):
        records = map(json.loads, (out / "train_log.jsonl").read_text().splitlines())
        losses.append([record["heldout_loss"] for record in records if "heldout_loss" in record])
    assert losses[1][-1] < losses[1][0] < losses[0][-1]
    assert all(np.abs(pair.b).max() > 0 for pair in pairs_of(adapted).values())
    assert {path.name for path in (adapted / "export").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "heldout.txt", "train_log.jsonl",
    }  # fmt: skip


def test_an_engine_serves_a_trained_adapter(adapted, finished, tiny_config, overrides):
    config = load_config(tiny_config, ["out_dir=unused", *overrides])
    model, params = load_model(finished / "export")
    whole = merged(params, pairs_of(adapted), config.lora, model)
    prompt = list(range(40, 60))
    expected = reference_logprobs(whole, model, np.array(prompt))
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(finished / "export"), enable_lora=True, max_lora_rank=4, num_blocks=8, max_model_len=64) as llm:
        request = LoRARequest("trained", 1, str(adapted / "export"))
        [output] = llm.generate(prompt_token_ids=[prompt], sampling_params=asked, lora_request=request)
    found = [output.prompt_logprobs[t][prompt[t]].logprob for t in range(1, len(prompt))]
    np.testing.assert_allclose(found, expected[np.arange(len(prompt) - 1), prompt[1:]], atol=1e-4)
    assert output.outputs[0].token_ids == [expected[-1].argmax()]


def test_a_run_that_was_interrupted_gives_the_same_adapter(adapted, tiny_config, overrides, tmp_path):
    for num_steps in (10, 20):  # the decay of the rate begins after step 16
        train(str(tiny_config), [f"out_dir={tmp_path}", *overrides, f"num_steps={num_steps}", "decay_fraction=0"])
    whole = tmp_path / "whole"
    train(str(tiny_config), [f"out_dir={whole}", *overrides, "decay_fraction=0"])
    for name, pair in pairs_of(whole).items():
        np.testing.assert_array_equal(pair.b, pairs_of(tmp_path)[name].b)
    with pytest.raises(ConfigError, match=r"lora .*rank': 4"):
        train(str(tiny_config), [f"out_dir={tmp_path}", *overrides, "lora.rank=2"])


def test_a_step_has_the_gradients_of_the_two_matrices(finished, tiny_config, overrides):
    """Adam's first step is the learning rate times the gradient's sign: B moves, A, whose gradient is 0, does not."""
    config = load_config(tiny_config, ["out_dir=unused", *overrides, "weight_decay=0", "compute_dtype=f32"])
    model, params = load_model(finished / "export")
    first = first_adapter(config.lora, model, 0)
    before = jax.device_get(first)
    tokens = np.random.default_rng(0).integers(3, 300, (2, 64))
    state, _ = make_train_step(config)(
        init_state(config, first), tokens, np.roll(tokens, -1, 1), np.float32(0.5), params
    )
    for name, (a, b) in state.params.items():
        np.testing.assert_array_equal(a, before[name].a)
        assert np.abs(b).max() == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(
    "override, error",
    [
        ("init_from=null", "lora needs init_from"),
        ("lora.rank=0", "lora.rank is 0"),
        ("lora.alpha=0", "lora.alpha is 0"),
        ("lora.target_modules=[]", "lora.target_modules is empty"),
        ("lora.target_modules=[w_q]", "lora.target_modules has 'w_q', the model's modules are down_proj, gate_proj"),
    ],
)
def test_bad_settings_get_one_sentence(override, error, tiny_config, overrides, tmp_path):
    with pytest.raises(ConfigError, match=error):
        train(str(tiny_config), [f"out_dir={tmp_path}", *overrides, override])


def test_targets_are_ends_of_names(finished):
    model, _ = load_model(finished / "export")
    assert set(first_adapter(LoraSettings(target_modules=["0.mlp.up_proj"]), model, 0)) == {
        "model.layers.0.mlp.up_proj"
    }
