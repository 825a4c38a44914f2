"""The codecs by name, and the choice among them.

A custom codec needs no entry here: `LLM(kv_cache_dtype="my_package.module:MyCodec")`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ksana_jax.kv.codecs.base import Codec
from ksana_jax.kv.codecs.floats import Float
from ksana_jax.kv.codecs.packed import Packed
from ksana_jax.kv.codecs.scaled import Scaled
from ksana_jax.plugins import resolve

# Functions or classes that take no arguments. Those of `dtypes.DTYPES` also hold an engine's own dtype.
CODECS: dict[str, Callable[[], Codec]] = {
    "f32": functools.partial(Float, "float32"),
    "bf16": functools.partial(Float, "bfloat16"),
    "f16": functools.partial(Float, "float16"),
    "int8": functools.partial(Scaled, "int8", 127.0),
    "fp8_e4m3": functools.partial(Scaled, "float8_e4m3fn", 448.0),
    "fp8_e5m2": functools.partial(Float, "float8_e5m2"),
    "int4": functools.partial(Packed, 4),
    "int3": functools.partial(Packed, 3),
    "int2": functools.partial(Packed, 2),
}


@functools.cache
def find_codec(name: str) -> Codec:
    """Returns the codec with a name in `CODECS`, or "package.module:name" of a class or function that makes one.

    Raises:
      ConfigError: there is no such codec.
    """
    return resolve(name, CODECS, "kv_cache_dtype")()
