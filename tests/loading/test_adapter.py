"""Adapters are read from PEFT's folders; whatever is not understood is refused by name, in one sentence."""

import dataclasses
import json
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ksana_jax.core.config import ConfigError
from ksana_jax.core.errors import LoadError
from ksana_jax.loading.adapter import CONFIG, WEIGHTS, read_adapter
from ksana_jax.loading.config_json import load_config

GOLDEN = Path(__file__).parents[1] / "golden"
BASE = "llama-gqa-tied"
MODEL = load_config(GOLDEN / BASE)
Q = "base_model.model.model.layers.0.self_attn.q_proj"
NAMES = {
    f"model.layers.{layer}.{module}": (layer, field)
    for layer in range(2)
    for module, field in {"self_attn.q_proj": "w_q", "self_attn.v_proj": "w_v", "mlp.down_proj": "w_down"}.items()
}


def read(folder: Path, dtype: str = "f32", max_rank: int = 8):
    return read_adapter(folder, MODEL, dtype, max_rank)


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(GOLDEN / "lora" / f"{BASE}-plain", tmp_path, dirs_exist_ok=True)
    return tmp_path


def change(folder: Path, **fields) -> None:
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(values | fields))


def change_tensors(folder: Path, **changed) -> None:
    """Replaces tensors by their names below the first query projection; None drops one."""
    tensors = load_file(folder / WEIGHTS) | {f"{Q}.{name}": values for name, values in changed.items()}
    save_file({name: values for name, values in tensors.items() if values is not None}, folder / WEIGHTS)


def test_the_matrices_of_an_adapter_are_those_of_its_file_with_the_scale_in_b(folder):
    adapter, tensors = read(folder), load_file(folder / WEIGHTS)
    assert (adapter.rank, [sorted(layer) for layer in adapter.layers]) == (4, [["w_down", "w_q", "w_v"]] * 2)
    a, b, gain = adapter.layers[0]["w_q"]
    np.testing.assert_array_equal(a, tensors[f"{Q}.lora_A.weight"])
    np.testing.assert_array_equal(b, 2 * tensors[f"{Q}.lora_B.weight"])  # lora_alpha 8, r 4
    assert gain is None and adapter.lengths is None


def test_patterns_give_modules_ranks_and_scales_of_their_own():
    folder = GOLDEN / "lora" / f"{BASE}-all"
    tensors, layers = load_file(folder / WEIGHTS), read(folder).layers
    for layer, module, field, scale in (
        (1, "self_attn.q_proj", "w_q", 5 / 2**0.5),
        (0, "self_attn.q_proj", "w_q", 5 / 3**0.5),
        (0, "self_attn.o_proj", "w_o", 16 / 3**0.5),
        (1, "mlp.up_proj", "w_up", 7 / 6**0.5),
    ):
        stored = tensors[f"base_model.model.model.layers.{layer}.{module}.lora_B.weight"]
        np.testing.assert_allclose(layers[layer][field][1], stored * scale, rtol=1e-6)  # float32


KEYS = r"""
q_proj ^model.layers.0.mlp.up_proj .*\.q\_proj .*\.(q_proj|v_proj) (?:q|k)_proj mlp.* layers.1.*_proj$ q_proj$.* a|^b |
(self|cross)_attn.(q|(k|v))_proj proj q.proj m(odel.*|x) ^q_proj .*.*.*.*.*proj layers.(.*|0).mlp $ \.q_proj
(|.self_attn).q_proj model.layers.1 model.layers.1.self_attn.v_proj
"""


@pytest.mark.parametrize("key", ["", *KEYS.split()])
def test_keys_of_patterns_match_as_in_peft(folder, key):
    """PEFT (0.20): re.match(rf"(.*\\.)?({key})$", name)."""
    change(folder, alpha_pattern={key: 80})
    layers = read(folder).layers
    for name, (layer, field) in NAMES.items():
        scale = 20 if re.match(rf"(.*\.)?({key})$", name) else 2
        stored = load_file(folder / WEIGHTS)[f"base_model.model.{name}.lora_B.weight"]
        np.testing.assert_array_equal(layers[layer][field].b, scale * stored)


def test_a_hostile_pattern_takes_linear_time(folder):
    began = time.perf_counter()
    change(folder, rank_pattern={".*(_|.*)" * 2_000 + "x": 2})
    read(folder)
    assert time.perf_counter() - began < 5


def test_keys_of_patterns_that_match_no_module_are_named_in_a_warning(folder, caplog):
    before = read(folder).digest
    change(folder, rank_pattern={"q_proj": 4}, alpha_pattern={"v_proj|o_proj": 8, "down_proj": 8})
    assert read(folder).digest == before and not caplog.messages
    change(folder, rank_pattern={"q_proj": 4, f"{Q}": 2, "k_proj": 7}, alpha_pattern={"gate_proj": 3, "q_proj": 8})
    assert read(folder).digest == before
    for pattern, key, said in zip(("rank_pattern", "alpha_pattern"), (Q, "gate_proj"), caplog.messages, strict=True):
        module = "model.layers.0.mlp.down_proj"
        assert said.endswith(
            f"adapter_config.json: key {key!r} of {pattern} matches no module of the adapter, such as {module}: it has "
            "no effect, as in PEFT"
        )


def test_the_digest_is_of_the_contents(folder):
    first = read(folder).digest
    change(folder, base_model_name_or_path="another/name", lora_dropout=0.5)
    assert read(folder).digest == first
    assert read(folder, "bf16").digest != first
    change(folder, lora_alpha=9)
    assert read(folder).digest != first


@pytest.mark.parametrize(
    "fields, problem",
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', supported: LORA"),
        ({"bias": "lora_only"}, "bias is 'lora_only', supported: none"),
        ({"use_dora": True}, "layers.0.self_attn.q_proj has no lora_magnitude_vector"),
        ({"use_dora": "yes"}, "use_dora is 'yes', must be "),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], which is not supported: each slot"),
        ({"lora_bias": True}, "lora_bias is True, which is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is [[0, 2]], which is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is [1], which is not supported"),
        ({"target_parameters": ["experts.w"]}, "target_parameters is ['experts.w'], which is not supported"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens is [5], which is not supported"),
        ({"use_qalora": True}, "use_qalora is True, which is not supported"),
        ({"of_the_future": 0.5}, "of_the_future is 0.5, which is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the model's own weights"),
        ({"r": 0}, "r is 0, must be an integer from 1"),
        ({"lora_alpha": None}, "lora_alpha is None, must be "),
        ({"use_rslora": 1}, "use_rslora is 1, must be "),
        ({"rank_pattern": {"q_proj": -2}}, "rank_pattern['q_proj'] is -2, must be an integer from 1"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is ['q_proj'], must be an object of module names"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern has '('; supported: names, '.*' and alternatives such as (q_"),
        ({"alpha_pattern": {"q)(": 2}}, "alpha_pattern has 'q)('; supported: names"),
        ({"alpha_pattern": {r"layers\.[0-9]+": 2}}, r"alpha_pattern has 'layers\\.[0-9]+'; supported: names"),
        ({"rank_pattern": {"(.*)*x": 2}}, "rank_pattern has '(.*)*x'; supported: names"),
        ({"rank_pattern": {"x" * 2**18: 2, "y": 2}}, "rank_pattern has 262,145 characters; supported: at most 262,144"),
        ({"r": 5}, "lora_A.weight has shape [4, 48], config and model give [5, 48]"),
        ({"use_qalora": True, "bias": "all"}, "bias is 'all', supported: none; use_qalora is True, which is not supp"),
    ],
)  # fmt: skip
def test_fields_that_would_change_the_result_are_refused_by_name(folder, fields, problem):
    change(folder, **fields)
    with pytest.raises(LoadError, match=re.escape(problem)) as error:
        read(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"use_dora": False, "modules_to_save": None, "loftq_config": {}, "of_the_future": None},
        {"fan_in_fan_out": True, "lora_dropout": 0.1, "task_type": None, "layers_to_transform": [0, 1]},
        {"init_lora_weights": "gaussian", "inference_mode": False, "target_modules": ".*q_proj"},
        {"ensure_weight_tying": True},
        {"init_lora_weights": "mica"},
    ],
)
def test_fields_without_effect_on_a_finished_adapter_are_left_out(folder, fields):
    before = read(folder).digest
    change(folder, **fields)
    assert read(folder).digest == before


NAN = np.full((4, 32), np.nan, np.float32)


@pytest.mark.parametrize(
    "tensors, problem",
    [
        ({"lora_magnitude_vector": np.ones(64, np.float32)}, "lora_magnitude_vector belongs to no linear module"),
        ({"lora_B.weight": None}, "self_attn.q_proj has no lora_B.weight"),
        ({"lora_A.weight": np.zeros((4, 16), np.float32)}, "has shape [4, 16], config and model give [4, 32]"),
        ({"lora_A.weight": NAN}, "lora_A.weight has values that are NaN or infinite in float32"),
        ({"lora_A.weight": np.zeros((4, 32), np.int32)}, "lora_A.weight is I32, supported: F32, BF16, F16, F64"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(folder, tensors, problem):
    change_tensors(folder, **tensors)
    with pytest.raises(LoadError, match=re.escape(problem)):
        read(folder)


def test_the_lengths_of_rows_are_in_the_digest(tmp_path):
    shutil.copytree(GOLDEN / "lora" / f"{BASE}-lengths", tmp_path, dirs_exist_ok=True)
    first = read(tmp_path)
    assert first.lengths is not None and sorted(first.lengths[1]) == ["w_down", "w_q", "w_v"]
    change_tensors(tmp_path, lora_magnitude_vector=np.ones(64, np.float32))
    assert read(tmp_path).digest != first.digest
    change_tensors(tmp_path, lora_magnitude_vector=np.ones(32, np.float32))
    with pytest.raises(LoadError, match=r"magnitude_vector has shape \[32\], config and model give \[64\]"):
        read(tmp_path)


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens", "model.layers.2.self_attn.q_proj", "visual.q"])
def test_modules_other_than_linear_ones_of_layers_are_refused_by_name(folder, module):
    tensors = load_file(folder / WEIGHTS)
    name = f"base_model.model.{module}.lora_A.weight"
    save_file(tensors | {name: np.zeros((4, 32), np.float32)}, folder / WEIGHTS)
    with pytest.raises(LoadError, match=f"{re.escape(name)} belongs to no linear module of this llama"):
        read(folder)


def test_keys_of_a_layer_that_has_none_of_its_own_are_refused_by_name(folder):
    model = dataclasses.replace(MODEL, family="llama_cla", kv_layers=(0, 0))
    tensors = {
        name: values for name, values in load_file(folder / WEIGHTS).items() if "layers.1.self_attn.v" not in name
    }
    save_file(tensors, folder / WEIGHTS)
    assert [sorted(layer) for layer in read_adapter(folder, model, "f32", 8).layers] == [
        ["w_down", "w_q", "w_v"],
        ["w_down", "w_q"],
    ]
    name = "base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"
    save_file(tensors | {name: np.zeros((4, 32), np.float32)}, folder / WEIGHTS)
    with pytest.raises(LoadError, match=f"{re.escape(name)} belongs to no linear module of this llama_cla"):
        read_adapter(folder, model, "f32", 8)


def test_a_larger_rank_than_the_engine_has_room_for_is_refused(folder):
    with pytest.raises(LoadError, match=r"layers.0.mlp.down_proj has rank 4, max_lora_rank is 3"):
        read(folder, max_rank=3)


def test_values_that_the_type_of_the_engine_cannot_hold_are_refused(folder):
    change_tensors(folder, **{"lora_B.weight": np.full((64, 4), 4e4, np.float32)})
    read(folder)
    with pytest.raises(LoadError, match=r"lora_B.weight has values that are NaN or infinite in float16"):
        read(folder, "f16")


def test_missing_files_are_named(folder):
    (folder / WEIGHTS).unlink()
    with pytest.raises(LoadError, match=r"adapter_model.safetensors is missing or not a file"):
        read(folder)
    (folder / CONFIG).unlink()
    with pytest.raises(ConfigError, match=r"adapter_config.json is missing or not a file"):
        read(folder)


def test_an_adapter_without_matrices_is_refused(folder):
    save_file({}, folder / WEIGHTS)
    with pytest.raises(LoadError, match="has no matrices of an adapter"):
        read(folder)


def test_experts_and_routers_are_refused_by_name(folder):
    model = load_config(GOLDEN / "mixtral-gqa-experts")
    tensors = {
        "base_model.model.model.layers.0.block_sparse_moe.gate.lora_A.weight": np.zeros((4, 32), np.float32),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros((4, 32), np.float32),
    }
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(LoadError, match=r"2 tensors do not fit: .*gate.lora_A.weight belongs to no linear module"):
        read_adapter(folder, model, "f32", 8)


def test_the_matrix_from_latents_to_heads_is_refused_with_the_reason(folder):
    model = load_config(GOLDEN / "deepseek_v3-latent-rope-yarn-experts")
    name = "base_model.model.model.layers.0.self_attn.kv_b_proj.lora_A.weight"
    save_file({name: np.zeros((4, 24), np.float32)}, folder / WEIGHTS)
    with pytest.raises(LoadError, match=r"kv_b_proj.lora_A.weight belongs to no .* into UK and UV, .* merge"):
        read_adapter(folder, model, "f32", 8)
