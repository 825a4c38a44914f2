"""Checkpoints of the package compressed-tensors load as the numbers that it decompresses, bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from ksana_jax.loading import load_model
from ksana_jax.loading.export import export_hf

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
