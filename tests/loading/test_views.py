"""Weights that are parts of stored tensors: fused, interleaved by head, and transposed, in a family of these tests."""

import dataclasses

import jax
import numpy as np
import pytest
import safetensors.numpy

from ksana_jax.core.config import ConfigError
from ksana_jax.core.layer_spec import ExpertsSpec
from ksana_jax.loading import LoadError, export_hf, load_model, stored_tensor
from ksana_jax.loading.load import read_weight
from ksana_jax.loading.tensor_files import find_tensors
from ksana_jax.loading.views import sources_of
from ksana_jax.models.families import FAMILIES
from ksana_jax.models.families.family import LAYER_NAMES, View
from ksana_jax.models.families.llama import LLAMA
from ksana_jax.models.params import is_shape, param_shapes, weights_of
from ksana_jax.sharding.shares import share
from ksana_jax.sharding.specs import field_of
from tests.loading.models_on_disk import STORED, TINY, random_tensors, write_model

CONFIG = dataclasses.replace(TINY, family="views", num_kv_heads=4, qkv_bias=True, out_bias=True, mlp_bias=True)
PLAIN = dataclasses.replace(CONFIG, family="llama")
# Rows of q, k and v of each head together (GPT-NeoX), gate above up (Phi-3), gate and up biases in turn (gpt-oss), and
# matrices stored as [in, out] (GPT-2).
QKV, BIASES = (
    View(f"attention.qkv.{kind}", tuple(f"{letter}_{part}" for part in "qkv"), "num_heads")
    for kind, letter in (("weight", "w"), ("bias", "b"))
)
GATE_UP = View("mlp.gate_up.weight", ("w_gate", "w_up"), transposed=True)
GATE_UP_BIAS = View("mlp.gate_up.bias", ("b_gate", "b_up"), "d_ff")
VIEWS = {field: view for view in (QKV, BIASES, GATE_UP, GATE_UP_BIAS) for field in view.fields}
VIEWS |= {"w_down": View("mlp.down.weight", transposed=True)}


@pytest.fixture(autouse=True)
def family(monkeypatch):
    family = dataclasses.replace(
        LLAMA, model_type="views", architectures=("ViewsForCausalLM",), layer_names=LAYER_NAMES | VIEWS
    )
    monkeypatch.setitem(FAMILIES, "views", family)


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a Llama as the family stores them."""
    found = dict(tensors)
    for layer in range(CONFIG.num_layers):
        at = f"model.layers.{layer}."

        def taken(name, at=at):
            return found.pop(f"{at}{name}")

        for kind in ("weight", "bias"):
            heads = [np.split(taken(f"self_attn.{part}_proj.{kind}"), CONFIG.num_heads) for part in "qkv"]
            found[f"{at}attention.qkv.{kind}"] = np.concatenate([part[h] for h in range(4) for part in heads])
        gate, up = (taken(f"mlp.{part}_proj.weight") for part in ("gate", "up"))
        found[f"{at}mlp.gate_up.weight"] = np.concatenate([gate, up]).T.copy()
        gate, up = (taken(f"mlp.{part}_proj.bias") for part in ("gate", "up"))
        found[f"{at}mlp.gate_up.bias"] = np.stack([gate, up], axis=1).reshape(-1)
        found[f"{at}mlp.down.weight"] = taken("mlp.down_proj.weight").T.copy()
    return found


@pytest.mark.parametrize("stored", STORED)
def test_weights_are_found_in_their_tensors_and_exported_there(stored, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_tensor, "CHUNK_BYTES", 200)  # pieces of a few rows
    tensors = random_tensors(PLAIN, stored)
    kind = stored.lower()
    _, wanted = load_model(write_model(tmp_path / "plain", tensors, PLAIN), kind)
    config, found = load_model(write_model(tmp_path / "views", fused(tensors), CONFIG), kind)
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    export_hf(tmp_path / "again", config, found)
    again = safetensors.numpy.load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == fused(tensors).keys()
    for name, values in fused(tensors).items():
        np.testing.assert_array_equal(again[name], values)


def leaves(config):
    return jax.tree_util.tree_leaves_with_path(param_shapes(config), is_leaf=is_shape)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_each_device_reads_its_share_of_a_view(num_devices, tmp_path):
    tensors = random_tensors(PLAIN)
    _, wanted = load_model(write_model(tmp_path / "plain", tensors, PLAIN))
    found = find_tensors(write_model(tmp_path / "views", fused(tensors), CONFIG))
    for source, whole, (path, shape) in zip(sources_of(CONFIG), jax.tree.leaves(wanted), leaves(CONFIG), strict=True):
        for device in range(num_devices):
            mine = share(field_of(path), shape, device, num_devices, CONFIG.num_kv_heads)
            part = np.asarray(whole)[(mine.rows, mine.columns)[: whole.ndim]]
            read = read_weight(source.of(found), shape, np.float32, mine)
            np.testing.assert_array_equal(read[: len(part)], part)


EXPERTS = {"mlp": "swiglu_experts", "experts": ExpertsSpec(3, 2)}
STACKS = {
    "tensors of one expert": dataclasses.replace(TINY, **EXPERTS, family="mixtral"),
    "tensors of all experts": dataclasses.replace(TINY, **EXPERTS, family="granitemoe", attention_scale=0.1),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks_of_experts_are_read_whole_or_in_shares_and_exported(name, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_tensor, "CHUNK_BYTES", 200)
    config, tensors = STACKS[name], random_tensors(STACKS[name], "F32")
    loaded, params = load_model(write_model(tmp_path / "model", tensors, config))
    assert loaded == config
    up, down = (weights_of(params.layers[1])[f"w_{part}_experts"] for part in ("up", "down"))
    at = "model.layers.1.block_sparse_moe."
    for expert in range(3):
        if name == "tensors of one expert":
            stored = tensors[f"{at}experts.{expert}.w3.weight"], tensors[f"{at}experts.{expert}.w2.weight"]
        else:  # gate above up
            both = tensors[f"{at}input_linear.weight"][expert]
            stored = both[config.d_ff :], tensors[f"{at}output_linear.weight"][expert]
        np.testing.assert_array_equal(up[expert], stored[0])
        np.testing.assert_array_equal(down[expert], stored[1])

    found = find_tensors(tmp_path / "model")
    for source, whole, (path, shape) in zip(sources_of(config), jax.tree.leaves(params), leaves(config), strict=True):
        for device in range(2):
            mine = share(field_of(path), shape, device, 2, config.num_kv_heads)
            read = read_weight(source.of(found), shape, np.float32, mine)
            at = (slice(None),) * mine.stacked + (mine.rows, mine.columns)
            part = np.asarray(whole)[at[: whole.ndim]]
            np.testing.assert_array_equal(read[: len(part)], part)

    export_hf(tmp_path / "again", config, params)
    again = safetensors.numpy.load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(again[name], values)


def test_missing_and_ill_shaped_tensors_are_named_as_they_are_stored(tmp_path):
    tensors = fused(random_tensors(PLAIN))
    del tensors["model.layers.0.attention.qkv.weight"]
    tensors["model.layers.1.mlp.gate_up.weight"] = tensors["model.layers.1.mlp.gate_up.weight"].T.copy()
    with pytest.raises(LoadError) as refusal:
        load_model(write_model(tmp_path, tensors, CONFIG))
    assert "2 tensors do not fit: model.layers.0.attention.qkv.weight is missing" in str(refusal.value)
    assert "model.layers.1.mlp.gate_up.weight has shape [48, 16], the config gives [16, 48]" in str(refusal.value)


def test_rows_that_do_not_divide_into_groups_are_refused():
    with pytest.raises(ConfigError, match=r"qkv\.weight: 24 rows of w_k are not a multiple of num_heads 5$"):
        sources_of(dataclasses.replace(CONFIG, num_heads=5, num_kv_heads=3))
