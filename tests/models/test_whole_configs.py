"""Checkpoints of models that also read images: the text model is found in them, as published for Qwen3.5."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ksana_jax.core.errors import ConfigError
from ksana_jax.loading import LoadError, load_model
from ksana_jax.models.families import config_from_hf
from ksana_jax.models.params import init_params
from tests.golden.cases import golden_case

CASES = {"qwen3_5-gated-delta-tied": "qwen3_5", "qwen3_5_moe-gated-delta-experts": "qwen3_5_moe"}
SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}


def published(name: str, folder, **changes) -> None:
    """Writes a golden case as a part of a larger model, with stacks of experts, parts that see and predict more."""
    case = golden_case(name)
    values = json.loads((case.model_dir / "config.json").read_text())
    values["rope_parameters"] |= SECTIONS
    tied = values.pop("tie_word_embeddings")
    whole = {"model_type": CASES[name], "text_config": values, "vision_config": {"depth": 1}}
    architecture = values.pop("architectures")[0].replace("CausalLM", "ConditionalGeneration")
    whole |= {"architectures": [architecture], "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(whole))
    given = load_file(case.model_dir / "model.safetensors")
    tensors, zero = {}, np.zeros((2, 2), np.float16)
    for key, tensor in given.items():
        prefix, _, expert = key.partition(".experts.")
        kind = expert.split(".")[1] if expert else ""
        if kind in ("", "down_proj"):
            tensors[f"{prefix}.experts.down_proj" if kind else key] = tensor
    for key in [key for key in tensors if ".experts." in key]:
        prefix, num = key.removesuffix(".down_proj"), 8
        of_each = [{n: given[f"{prefix}.{e}.{n}_proj.weight"] for n in ("gate", "up", "down")} for e in range(num)]
        tensors[key] = np.stack([each["down"] for each in of_each])
        tensors[f"{prefix}.gate_up_proj"] = np.stack([np.concatenate([e["gate"], e["up"]]) for e in of_each])
    tensors = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in tensors.items()}
    save_file(
        tensors | {"model.visual.patch.weight": zero, "mtp.fc.weight": zero} | changes, folder / "model.safetensors"
    )


@pytest.mark.parametrize("name", CASES)
def test_a_text_model_within_another_is_loaded_as_when_it_is_alone(name, tmp_path):
    published(name, tmp_path)
    config, params = load_model(tmp_path)
    expected, weights = load_model(golden_case(name).model_dir)
    assert config == expected
    jax.tree.map(np.testing.assert_array_equal, params, weights)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_model_of_mistral_4_is_found_under_both_names(prefix, tmp_path):
    case = golden_case("mistral4-latent-rope-yarn-experts-new")
    values = json.loads((case.model_dir / "config.json").read_text())
    names = {"model.": prefix} | ({"lm_head": "language_model.lm_head"} if prefix.startswith("l") else {})
    tensors = load_file(case.model_dir / "model.safetensors")
    for of_text, of_whole in names.items():
        tensors = {re.sub(f"^{of_text}", of_whole, name): tensor for name, tensor in tensors.items()}
    save_file(tensors | {"vision_tower.x.weight": np.zeros((2, 2))}, tmp_path / "model.safetensors")
    whole = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "text_config": values}
    values.pop("architectures")
    (tmp_path / "config.json").write_text(json.dumps(whole | {"tie_word_embeddings": False}))
    (config, params), (expected, weights) = load_model(tmp_path), load_model(case.model_dir)
    assert config == expected
    jax.tree.map(np.testing.assert_array_equal, params, weights)
    with pytest.raises(ConfigError, match="model_type is 'ministral3'; supported: mistral4"):
        config_from_hf(whole | {"text_config": values | {"model_type": "ministral3"}})


def test_stacks_of_another_number_of_experts_are_refused(tmp_path):
    stack = "model.language_model.layers.0.mlp.experts.down_proj"
    published("qwen3_5_moe-gated-delta-experts", tmp_path, **{stack: np.zeros((7, 32, 16), np.float16)})
    with pytest.raises(LoadError, match=r"layers\.0\.mlp\.experts\.0\.down_proj\.weight is missing"):
        load_model(tmp_path)


def test_the_norm_of_a_delta_rules_result_starts_at_one_where_others_add_one():
    config = config_from_hf(json.loads((golden_case("qwen3_5-gated-delta-tied").model_dir / "config.json").read_text()))
    params = init_params(dataclasses.replace(config, vocab_size=8))
    assert np.all(params.layers[0].delta_norm == 1) and np.all(params.layers[0].attn_norm == 0)
