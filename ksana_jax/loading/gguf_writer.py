"""Writes GGUF files with the package `gguf`, llama.cpp's own, which also rounds values to blocks. Knows no models."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.core.errors import LoadError
from ksana_jax.core.files import replacing

# Types that values can be rounded to.
FLOATS = ("F32", "BF16", "F16")
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


class NewTensor(NamedTuple):
    """A tensor to write.

    kind: a type of FLOATS or QUANTISED.
    shape: row-major.
    values: gives them, float32.
    """

    kind: str
    shape: tuple[int, ...]
    values: Callable[[], np.ndarray]


def import_gguf() -> Any:
    """Returns the package.

    Raises:
      ImportError: it is not installed; the message says how.
    """
    try:
        import gguf
    except ImportError as error:
        message = "writing GGUF files needs the package gguf: pip install 'ksana-jax[gguf]'"
        raise ImportError(message, name=error.name) from None
    return gguf


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, NewTensor]) -> None:
    """Writes a file completely or not at all, with one tensor in memory at a time.

    Args:
      metadata: values by key, as `gguf_file.GGUFFile` has them, with general.architecture. A float becomes float32, an
        int uint32 if it fits.

    Raises:
      LoadError: values are beyond the range of float16, in which blocks have their scales too.
    """
    gguf = import_gguf()
    architecture = metadata["general.architecture"]
    with replacing(path) as file, contextlib.closing(gguf.GGUFWriter(file.name, architecture)) as writer:
        for key, value in metadata.items():
            if key != "general.architecture":
                writer.add_key_value(key, *_typed(value, gguf.GGUFValueType))
        for name, tensor in tensors.items():
            kind = gguf.GGMLQuantizationType[tensor.kind]
            shape = gguf.quants.quant_shape_to_byte_shape(tensor.shape, kind)
            writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in tensors.items():
            values = tensor.values()
            limited = tensor.kind not in ("F32", "BF16")
            if limited and (largest := np.abs(values).max()) > np.finfo(np.float16).max:
                raise LoadError(f"{name}: values of up to {largest:.3g} exceed float16, the range of {tensor.kind}")
            writer.write_tensor_data(gguf.quants.quantize(values, gguf.GGMLQuantizationType[tensor.kind]))


def _typed(value: Any, kinds: Any) -> tuple[Any, ...]:
    """Returns a value of metadata, its type and, of an array, the type of its elements."""
    if isinstance(value, np.ndarray):
        return value.tolist(), kinds.ARRAY, kinds[value.dtype.name.upper()]
    if isinstance(value, list):
        return value, kinds.ARRAY, kinds.STRING
    if type(value) is int:
        names = ("uint32", "int32", "uint64", "int64")
        return value, kinds[next(n for n in names if np.iinfo(n).min <= value <= np.iinfo(n).max).upper()]
    return value, kinds.get_type(value)
