"""Blocks of GGUF tensors decode to the values that the package gguf gives, bit for bit."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ksana_jax.core.gguf_file import TYPES
from ksana_jax.loading.gguf_blocks import FLOATS, decode

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "gguf_blocks.npz"))
KINDS = [name.removesuffix(".blocks") for name in GOLDEN if name.endswith(".blocks")]


def test_every_type_is_compared():
    assert {*KINDS, "F32", "BF16"} == {kind.name for kind in TYPES.values()}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_decode_as_in_gguf(kind):
    blocks, wanted = GOLDEN[f"{kind}.blocks"], GOLDEN[f"{kind}.values"]
    found = decode(kind, blocks)
    assert found.dtype == FLOATS.get(kind, np.float32) and len(np.unique(wanted)) > 10
    np.testing.assert_array_equal(found.astype(np.float32).view(np.uint32), wanted.view(np.uint32))
    known = next(known for known in TYPES.values() if known.name == kind)
    assert (blocks.shape[-1], wanted.shape[-1]) == (known.num_bytes, known.num_values)
    # Rows of several blocks, and blocks of any leading shape, decode alike.
    rows = decode(kind, blocks.reshape(2, 1, -1))
    np.testing.assert_array_equal(rows, found.reshape(2, 1, -1))


@pytest.mark.parametrize("kind, dtype", [("F32", np.float32), ("BF16", ml_dtypes.bfloat16)])
def test_plain_floats_keep_their_dtype(kind, dtype):
    values = np.array([[1.5, -2.25, 3e-5], [0, 7, -1e30]], dtype)
    found = decode(kind, values.view(np.uint8))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, values)
