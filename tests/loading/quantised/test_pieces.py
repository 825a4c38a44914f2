"""Any rows and columns of a quantised matrix are those of the whole, which a definition number by number gives."""

import functools

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana_jax.loading.quantised.formats import unpacked
from ksana_jax.loading.quantised.scheme import read_scheme
from ksana_jax.loading.quantised.tensor import QuantisedTensor
from ksana_jax.loading.tensor_files import find_tensors
from tests.loading.quantised.on_disk import (
    awq,
    awq_config,
    compressed,
    compressed_config,
    fp8,
    fp8_config,
    gptq,
    gptq_config,
)

# Groups that divide rows and those that do not, and rows and columns that are no whole words.
SHAPE = (21, 76)
CASES = {
    "gptq": (functools.partial(gptq, group=32, sym=False), gptq_config(group=32, sym=False)),
    "gptq 8 bits": (functools.partial(gptq, bits=8, group=76), gptq_config(bits=8, group=-1)),
    "desc_act": (functools.partial(gptq, group=10, desc_act=True), gptq_config(group=10, desc_act=True)),
    "awq": (functools.partial(awq, group=76), awq_config(group=128)),
    "compressed": (functools.partial(compressed, sym=False), compressed_config(sym=False)),
    "actorder": (functools.partial(compressed, sym=False, actorder=True), compressed_config(sym=False)),
    "8 bits": (functools.partial(compressed, bits=8, group=19), compressed_config(bits=8, group=19)),
    "fp8": (functools.partial(fp8, block=(8, 16)), fp8_config(block=(8, 16))),
}


def stored(folder, kind, shape=SHAPE):
    quantise, config = CASES[kind]
    scheme = read_scheme({"quantization_config": config}, "config.json")
    assert scheme is not None
    parts, numbers = quantise(np.random.default_rng(0), shape)
    safetensors.numpy.save_file(parts, folder / "model.safetensors")
    return QuantisedTensor(folder, "w.weight", scheme.method, shape, scheme, find_tensors(folder)), numbers


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    return stored(tmp_path_factory.mktemp("stored"), request.param)


def test_the_tensors_have_the_shapes_that_the_format_gives(case):
    tensor, _ = case
    wanted = tensor.format.parts(tensor.shape)
    assert {name for name, part in wanted.items() if part.required} <= tensor.parts.keys() <= wanted.keys()
    for name, part in tensor.parts.items():
        assert part.shape == wanted[name].shape and part.dtype in wanted[name].dtypes


@settings(max_examples=40)
@given(st.data())
def test_parts_are_those_of_the_whole(case, data):
    tensor, numbers = case
    starts = [data.draw(st.integers(0, size - 1)) for size in SHAPE]
    rows, columns = (slice(start, data.draw(st.integers(start + 1, n))) for start, n in zip(starts, SHAPE, strict=True))
    np.testing.assert_array_equal(tensor.read(rows, columns), numbers[rows, columns])


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6), st.sampled_from([4, 8]))
def test_numbers_of_words_are_their_bits_from_the_lowest_on(words, bits):
    wanted = [(word >> shift & (1 << bits) - 1) - (1 << bits - 1) for word in words for shift in range(0, 32, bits)]
    found = unpacked(np.array(words, np.int32), bits)
    assert found.dtype == np.int8 and found.tolist() == wanted
