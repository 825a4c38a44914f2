"""MXFP4 in stacks of experts, as gpt-oss has it: exact numbers, by a definition of its own, and refusals."""

import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from ksana_jax.core.errors import LoadError
from ksana_jax.loading import export_hf, load_config, load_model, stored_tensor
from ksana_jax.loading.find import find_weights
from ksana_jax.loading.load import open_model, read_weight
from ksana_jax.loading.views import sources_of
from ksana_jax.models.block_matrix import BlockMatrix
from ksana_jax.models.params import is_shape, param_shapes
from ksana_jax.sharding.shares import share
from ksana_jax.sharding.specs import field_of
from tests.golden.cases import golden_case

FOLDER = golden_case("gpt_oss-mqa-window-rope-yarn-experts-mxfp4").model_dir
NAME = "model.layers.1.mlp.experts.gate_up_proj_"
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def defined(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Numbers [E, out, in] in float64, one at a time."""
    blocks, scales = (tensors[f"model.layers.0.mlp.experts.{name}_{part}"] for part in ("blocks", "scales"))
    found = np.zeros((*blocks.shape[:-1], 32))
    for at in np.ndindex(blocks.shape):
        for half in (0, 1):
            nibble = int(blocks[at]) >> 4 * half & 15
            number = (-1) ** (nibble >> 3) * E2M1[nibble & 7]
            found[(*at[:-1], 2 * at[-1] + half)] = number * 2.0 ** (int(scales[at[:-1]]) - 127)
    return found.reshape(*blocks.shape[:2], -1)


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(FOLDER / "model.safetensors")


@pytest.fixture
def write(tmp_path):
    def write(tensors, **changes):
        config = json.loads((FOLDER / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return write


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("chunk", [100, stored_tensor.CHUNK_BYTES])
def test_numbers_are_those_of_the_definition_to_the_last_bit(tensors, monkeypatch, dtype, chunk):
    monkeypatch.setattr(stored_tensor, "CHUNK_BYTES", chunk)
    layer = load_model(FOLDER, dtype)[1].layers[0]
    gate_up = defined(tensors, "gate_up_proj")
    np.testing.assert_array_equal(np.asarray(layer.w_gate_experts, np.float64), gate_up[:, ::2])
    np.testing.assert_array_equal(np.asarray(layer.w_up_experts, np.float64), gate_up[:, 1::2])
    np.testing.assert_array_equal(np.asarray(layer.w_down_experts, np.float64), defined(tensors, "down_proj"))


def test_experts_are_kept_as_codes_whose_numbers_are_exact():
    config, read = open_model(FOLDER, "f32", quantization="stored")
    params, wanted = read(), load_model(FOLDER)[1]
    fields = ("w_gate_experts", "w_up_experts", "w_down_experts")
    assert len(config.kept) == len(fields) * config.num_layers
    for layer, plain in zip(params.layers, wanted.layers, strict=True):
        for field in fields:
            w = getattr(layer, field)
            assert isinstance(w, BlockMatrix) and w.scales.dtype == np.float32
            np.testing.assert_array_equal(w.numbers(), getattr(plain, field))


def test_scales_from_the_smallest_to_the_largest_are_exact(tensors, write):
    scales = tensors["model.layers.0.mlp.experts.down_proj_scales"].reshape(-1)
    scales[:252] = np.arange(252)
    layer = load_model(write(tensors))[1].layers[0]
    np.testing.assert_array_equal(np.asarray(layer.w_down_experts, np.float64), defined(tensors, "down_proj"))


def test_parts_of_two_devices_are_the_rows_and_columns_of_the_whole():
    config, params = load_model(FOLDER)
    found = find_weights(FOLDER, config)
    shapes, sources = param_shapes(config), sources_of(config)
    paths = jax.tree_util.tree_leaves_with_path(shapes, is_leaf=is_shape)
    for (path, shape), source, whole in zip(paths, sources, jax.tree.leaves(params), strict=True):
        if not (field := field_of(path)).endswith("_experts"):
            continue
        for device in range(2):
            mine = share(field, shape, device, 2, config.num_kv_heads)
            part = read_weight(source.of(found), shape, np.float32, mine)
            at = (slice(None), *mine[:2])[: whole.ndim] if mine.stacked else ()
            np.testing.assert_array_equal(part, np.asarray(whole)[at])


def test_the_exported_model_is_the_same_without_quantization(tmp_path):
    config, params = load_model(FOLDER)
    export_hf(tmp_path, config, params)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path)[1], params)


def test_a_scale_that_is_not_a_number_is_refused(tensors, write):
    tensors[f"{NAME}scales"][1, 2, 0] = 255
    with pytest.raises(LoadError, match="gate_up_proj has values that are NaN or infinite"):
        load_model(write(tensors))


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("scales", None, "gate_up_proj_scales is missing"),
        ("blocks", None, "gate_up_proj_blocks is missing"),
        (
            "blocks",
            np.s_[:, :, :1],
            r"gate_up_proj_blocks has shape \[4, 128, 1, 16\], the config gives \[4, 128, 2, 16\]",
        ),
        ("scales", np.s_[:3], r"gate_up_proj_scales has shape \[3, 128, 2\], the config gives \[4, 128, 2\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tensors, write, part, change, said):
    stored = tensors.pop(f"{NAME}{part}")
    if change is not None:
        tensors[f"{NAME}{part}"] = np.ascontiguousarray(stored[change])
    with pytest.raises(LoadError, match=said):
        load_model(write(tensors))


def test_a_config_that_does_not_name_the_format_is_refused(tensors, write):
    with pytest.raises(LoadError, match=r"has quantised tensors, such as .*_proj_blocks, but its config\.json has no"):
        load_model(write(tensors, quantization_config=None))


def test_the_config_is_read_without_weights(tmp_path):
    shutil.copy(FOLDER / "config.json", tmp_path)
    assert load_config(tmp_path).experts.limit == 1.0
