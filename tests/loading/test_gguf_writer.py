"""GGUF files have the bytes that the tests' own writer gives, and are read as they were given."""

import numpy as np
import pytest

from ksana_jax.core.gguf_file import read_gguf
from ksana_jax.loading.gguf_writer import NewTensor, write_gguf
from tests.gguf_writer import gguf_bytes

METADATA = {
    "text": "naïve",
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
    stored = {
        "odd": ("F32", (5,), np.arange(5, dtype="<f4").tobytes()),
        "blocks": ("Q8_0", (3, 64), bytes(range(204))),
        "last": ("F16", (2, 1, 3), bytes(12)),
    }
    tensors = {
        name: NewTensor(kind, shape, lambda data=data: [data[:7], data[7:]])
        for name, (kind, shape, data) in stored.items()
    }
    write_gguf(tmp_path / "made.gguf", METADATA, tensors)
    sizes = {"negative": np.int32(-7), "large": np.uint64(2**40)}
    made = (tmp_path / "made.gguf").read_bytes()
    assert made == gguf_bytes(METADATA | sizes, stored).ljust(len(made), b"\0")
    found = read_gguf(tmp_path / "made.gguf")
    for key, value in METADATA.items():
        np.testing.assert_array_equal(found.metadata[key], value)
    for name, (kind, shape, data) in stored.items():
        info = found.tensors[name]
        assert (info.type.name, info.shape) == (kind, shape)
        assert made[info.offset : info.offset + info.num_bytes] == data


def test_bytes_that_do_not_fit_the_shape_leave_no_file(tmp_path):
    with pytest.raises(AssertionError, match="short: 8 bytes, its shape gives 20"):
        write_gguf(tmp_path / "made.gguf", {}, {"short": NewTensor("F32", (5,), lambda: [bytes(8)])})
    assert not list(tmp_path.iterdir())
