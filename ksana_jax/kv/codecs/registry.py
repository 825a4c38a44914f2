"""The codecs by name, and the choice among them.

A custom codec needs no entry here: `LLM(kv_cache_dtype="my_package.module:MyCodec")`, and a block codec
`{"k": "my_package.module:MyCodec", "v": "kivi4"}`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ksana_jax.errors import ConfigError
from ksana_jax.kv.codecs.base import BlockCodec, Codec
from ksana_jax.kv.codecs.floats import Float
from ksana_jax.kv.codecs.gear import Gear
from ksana_jax.kv.codecs.kivi import Kivi
from ksana_jax.kv.codecs.kvquant import KVQuant
from ksana_jax.kv.codecs.packed import Packed
from ksana_jax.kv.codecs.scaled import Scaled
from ksana_jax.kv.codecs.sealing import Sealing, read_sealing
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

# Classes, or functions with their arguments: what is called gets the side, "k" or "v".
BLOCK_CODECS: dict[str, Callable[..., BlockCodec]] = {
    "kivi4": functools.partial(Kivi, bits=4),
    "kivi3": functools.partial(Kivi, bits=3),
    "kivi2": functools.partial(Kivi, bits=2),
    "gear4": functools.partial(Gear, bits=4),
    "gear3": functools.partial(Gear, bits=3),
    "gear2": functools.partial(Gear, bits=2),
    "gear_l4": functools.partial(Gear, bits=4, outliers=0.0),
    "gear_l3": functools.partial(Gear, bits=3, outliers=0.0),
    "gear_l2": functools.partial(Gear, bits=2, outliers=0.0),
    "kvquant4": functools.partial(KVQuant, bits=4),
    "kvquant3": functools.partial(KVQuant, bits=3),
    "kvquant2": functools.partial(KVQuant, bits=2),
}


@functools.cache
def find_codec(name: str) -> Codec:
    """Returns the codec with a name in `CODECS`, or "package.module:name" of a class or function that makes one.

    Raises:
      ConfigError: there is no such codec.
    """
    return resolve(name, CODECS | BLOCK_CODECS, "kv_cache_dtype")()


def check_kv_dtype(setting: str | Mapping[str, Any]) -> None:
    """Raises ConfigError if a `kv_cache_dtype` names no codec, or has wrong settings."""
    if find_sealing(setting) is None:
        assert isinstance(setting, str)
        find_codec(setting)


def find_sealing(setting: str | Mapping[str, Any]) -> Sealing | None:
    """Returns the block codecs of a `kv_cache_dtype`; None if it names a codec of single vectors.

    Args:
      setting: a name in `BLOCK_CODECS`, for keys and values; or a mapping, see `read_sealing`.

    Raises:
      ConfigError: there is no such codec, or a setting is wrong.
    """
    if isinstance(setting, str):
        return read_sealing({"k": setting, "v": setting}, BLOCK_CODECS.__getitem__) if setting in BLOCK_CODECS else None
    if not {"k", "v"} <= setting.keys():
        raise ConfigError(f'kv_cache_dtype is {setting!r:.80}, must have "k" and "v", such as "kivi2" and "kivi4"')
    return read_sealing(setting, functools.partial(resolve, registry=BLOCK_CODECS, what="kv_cache_dtype"))
