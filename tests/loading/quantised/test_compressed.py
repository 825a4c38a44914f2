"""Checkpoints of the package compressed-tensors load as the numbers that it decompresses, bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from ksana_jax.loading.export import export_hf
from ksana_jax.loading.load import load_model, open_model
from ksana_jax.models.block_matrix import BlockMatrix
from ksana_jax.models.families.family import LAYER_NAMES

FOLDER = Path(__file__).parents[2] / "golden" / "compressed"
SCHEMES = sorted(path.name for path in FOLDER.iterdir())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_are_those_of_compressed_tensors(scheme, tmp_path):
    export_hf(tmp_path, *load_model(FOLDER / scheme))
    found, wanted = (
        safetensors.numpy.load_file(tmp_path / "model.safetensors"),
        np.load(FOLDER / scheme / "expected.npz"),
    )
    assert len(wanted.files) == 7
    for name in wanted.files:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-tensor", "fp8", "fp8-tensor"])
def test_codes_of_8_bits_with_a_scale_for_a_row_or_a_tensor_stay_in_memory(scheme):
    config, read = open_model(FOLDER / scheme, quantization="stored")
    [layer], wanted = read().layers, np.load(FOLDER / scheme / "expected.npz")
    form = "fp8_32" if scheme.startswith("fp8") else "int8_f32"
    assert [kind for _, kind in config.kept] == [form] * 6  # a row of down_proj has 16 numbers, half a block
    for field, name in LAYER_NAMES.items():
        if isinstance(w := getattr(layer, field), BlockMatrix):
            np.testing.assert_array_equal(w.numbers(), wanted[f"model.layers.0.{name}"], err_msg=field)
