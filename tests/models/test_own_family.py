"""A family and a kind of feed-forward part added from outside, only through the public registries."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.loading import LoadError, export_hf, load_model
from ksana_jax.loading.load import read_weight
from ksana_jax.loading.tensor_files import find_tensors
from ksana_jax.models.dense import dense_logits
from ksana_jax.models.families import FAMILIES
from ksana_jax.models.families.family import LAYER_NAMES, Family
from ksana_jax.models.mlp import MLP, MLPS
from ksana_jax.models.params import num_params
from ksana_jax.runner.planner.terms import weights_bytes
from ksana_jax.sharding.shares import Share, local_model

NUM_EXPERTS = 3
VALUES = {
    "model_type": "committee",
    "architectures": ["CommitteeForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "mean_of_experts",
}


def shapes(d_model, spec):
    hidden, out = (NUM_EXPERTS, spec.d_ff, d_model), (NUM_EXPERTS, d_model, spec.d_ff)
    return {"w_gate": hidden, "w_up": hidden, "w_down": out}


def apply(x, p, linear, spec):
    experts = [
        MLPS["swiglu"].apply(x, p.replace(w_gate=gate, w_up=up, w_down=down), linear, spec)
        for gate, up, down in zip(p.w_gate, p.w_up, p.w_down, strict=True)
    ]
    return jnp.mean(jnp.stack(experts), axis=0)


EXPERT_NAMES = {f"w_{part}": f"mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")}
COMMITTEE = Family(
    model_type="committee",
    architectures=("CommitteeForCausalLM",),
    defaults={"rope_theta": 100.0},
    read=lambda fields: {},
    write=lambda config: {},
    layer_names=LAYER_NAMES | EXPERT_NAMES,
    mlps={"mean_of_experts": "mean_of_experts"},
)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(FAMILIES, "committee", COMMITTEE)
    monkeypatch.setitem(MLPS, "mean_of_experts", MLP(shapes, apply))


@pytest.fixture
def model_dir(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    config, params = load_model(tmp_path, load_format="dummy")
    rng = np.random.default_rng(0)
    export_hf(tmp_path, config, jax.tree.map(lambda w: jnp.asarray(rng.normal(0, 0.3, w.shape), w.dtype), params))
    return tmp_path


def test_its_experts_are_stacked_counted_exported_and_served(model_dir):
    tensors = safetensors.numpy.load_file(model_dir / "model.safetensors")
    config, params = load_model(model_dir)
    assert params.layers[1].w_gate.shape == (NUM_EXPERTS, 24, 32)
    for i in range(NUM_EXPERTS):
        np.testing.assert_array_equal(
            params.layers[1].w_down[i], tensors[f"model.layers.1.mlp.experts.{i}.down_proj.weight"]
        )
    assert num_params(config) == sum(t.size for t in tensors.values()) == weights_bytes(config, "f32") // 4
    prompt = np.arange(20)
    llm = LLM(model_dir, max_num_seqs=1, max_num_batched_tokens=16, query_tile=16, block_size=8)
    [output] = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=4, detokenize=False))
    tokens = output.outputs[0].token_ids
    scores = dense_logits(params, jnp.asarray([*prompt, *tokens]), config=config)
    assert tokens == scores[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_a_missing_or_ill_shaped_expert_is_named(model_dir):
    file = model_dir / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    del tensors["model.layers.0.mlp.experts.1.up_proj.weight"]
    tensors["model.layers.1.mlp.experts.2.gate_proj.weight"] = np.zeros((24, 31), np.float32)
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(LoadError) as refusal:
        load_model(model_dir)
    assert "model.layers.0.mlp.experts.1.up_proj.weight is missing" in str(refusal.value)
    assert "experts.2.gate_proj.weight has shape [24, 31], the config gives [24, 32]" in str(refusal.value)


@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_settings_that_its_kind_says_nothing_of_are_refused(model_dir, quantization):
    with pytest.raises(
        ConfigError, match=f"quantization is '{quantization}': mlp 'mean_of_experts' does not state quant"
    ):
        LLM(model_dir, quantization=quantization)
    config, _ = load_model(model_dir, load_format="dummy")
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2: mlp 'mean_of_experts' does not state divides"):
        local_model(config, 2)


def test_a_part_of_stacked_experts_is_not_read(model_dir, monkeypatch):
    monkeypatch.setitem(MLPS, "mean_of_experts", MLP(shapes, apply, divides=True))
    config, _ = load_model(model_dir, load_format="dummy")
    with pytest.raises(
        ConfigError, match=r"a part of w_gate \[3, 24, 32\] is \[1, 24, 32\], a device needs \[3, 12, 32\]"
    ):
        local_model(config, 2)
    tensors = [find_tensors(model_dir)[f"model.layers.0.mlp.experts.{i}.up_proj.weight"] for i in range(NUM_EXPERTS)]
    with pytest.raises(ConfigError, match=r"a weight stacked from 3 tensors, such as .*0\.up_proj\.weight, "):
        read_weight(tensors, (NUM_EXPERTS, 24, 32), jnp.float32, Share(slice(0, 1)))


def test_what_a_family_cannot_write_is_refused(model_dir):
    config, params = load_model(model_dir)
    with pytest.raises(ValueError, match=r"a Hugging Face config of family committee cannot express .*mlp swiglu"):
        export_hf(model_dir, dataclasses.replace(config, mlp="swiglu"), params)
