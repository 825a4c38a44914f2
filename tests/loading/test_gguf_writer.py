"""GGUF files have the types that the tests' own writer gives, and are read as they were given."""

import numpy as np
import pytest

from ksana_jax.core.gguf_file import read_gguf
from ksana_jax.loading.gguf_writer import NewTensor, write_gguf
from tests.gguf_writer import gguf_bytes

METADATA = {
    "general.architecture": "llama",
    "text": "naïve",
    "empty": "",
    "small": 7,
    "negative": -7,
    "large": 2**40,
    "real": 1e-05,
    "flag": True,
    "texts": ["a", "", "é"],
    "bytes": np.arange(3, dtype=np.uint8),
    "flags": np.array([True, False]),
    "numbers": np.array([0.5, -2], np.float32),
}


def test_a_file_has_the_bytes_of_its_definition_and_is_read_as_it_was_given(tmp_path):
    arrays = {"odd": np.arange(5, dtype=np.float32), "last": np.ones((2, 1, 3), np.float32)}
    tensors = {name: NewTensor("F32", array.shape, lambda array=array: array) for name, array in arrays.items()}
    write_gguf(tmp_path / "made.gguf", METADATA, tensors)
    sizes = {"negative": np.int32(-7), "large": np.uint64(2**40)}
    made = (tmp_path / "made.gguf").read_bytes()
    stored = {name: ("F32", array.shape, array.tobytes()) for name, array in arrays.items()}
    assert made == gguf_bytes(METADATA | sizes, stored).ljust(len(made), b"\0")
    found = read_gguf(tmp_path / "made.gguf")
    for key, value in METADATA.items():
        np.testing.assert_array_equal(found.metadata[key], value)


def test_bytes_that_do_not_fit_the_shape_leave_no_file(tmp_path):
    short = NewTensor("F32", (5,), lambda: np.zeros(2, np.float32))
    with pytest.raises(AssertionError):
        write_gguf(tmp_path / "made.gguf", {"general.architecture": "llama"}, {"short": short})
    assert not list(tmp_path.iterdir())
