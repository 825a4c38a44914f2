"""The codecs by name, and the choice among them.

A custom codec needs no entry here: `LLM(kv_cache_dtype="my_package.module:MyCodec")`, and a block codec
`{"k": "my_package.module:MyCodec", "v": "kivi4"}`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import resolve
from ksana_jax.kv.codecs.base import BlockCodec, Codec
from ksana_jax.kv.codecs.sealing import Sealing, read_sealing
from ksana_jax.kv.codecs.vectors import of_vectors

_FILES = "ksana_jax.methods.codecs"
# Functions that take no arguments. The first three, the names of `dtypes.DTYPES`, also hold an engine's own dtype.
CODECS: dict[str, str] = {
    "f32": f"{_FILES}.floats:f32",
    "bf16": f"{_FILES}.floats:bf16",
    "f16": f"{_FILES}.floats:f16",
    "int8": f"{_FILES}.scaled:int8",
    "fp8_e4m3": f"{_FILES}.scaled:fp8_e4m3",
    "fp8_e5m2": f"{_FILES}.floats:fp8_e5m2",
    "int4": f"{_FILES}.packed:int4",
    "int3": f"{_FILES}.packed:int3",
    "int2": f"{_FILES}.packed:int2",
    "hadamard4": f"{_FILES}.hadamard:hadamard4",
    "hadamard3": f"{_FILES}.hadamard:hadamard3",
    "hadamard2": f"{_FILES}.hadamard:hadamard2",
    "turboquant4": f"{_FILES}.turboquant:turboquant4",
    "turboquant3": f"{_FILES}.turboquant:turboquant3",
    "turboquant2": f"{_FILES}.turboquant:turboquant2",
}

# Codecs of latents, which encode parts of a vector differently; see `core.layer_spec.LatentSpec`.
LATENT_CODECS: dict[str, str] = {"latent8": f"{_FILES}.latent:Latent8"}

# Functions that take the side, "k" or "v".
BLOCK_CODECS: dict[str, str] = {
    name: f"{_FILES}.{module}:{name}"
    for module, names in {
        "kivi": "kivi4 kivi3 kivi2",
        "gear": "gear4 gear3 gear2 gear_l4 gear_l3 gear_l2",
        "kvquant": "kvquant4 kvquant3 kvquant2",
    }.items()
    for name in names.split()
}


@functools.cache
def find_codec(name: str) -> Codec:
    """Returns the codec with a name in `CODECS` or `LATENT_CODECS`, or "package.module:name" of a class or function
    that makes one.

    Raises:
      ConfigError: the codec does not exist.
    """
    return resolve(name, CODECS | LATENT_CODECS | BLOCK_CODECS, "kv_cache_dtype")()


def check_kv_dtype(setting: str | Mapping[str, Any]) -> None:
    """Raises ConfigError if a `kv_cache_dtype` names no codec, or has wrong settings."""
    if find_sealing(setting) is None:
        assert isinstance(setting, str)
        find_codec(setting)


def find_block_codec(name: str) -> Callable[..., BlockCodec]:
    """Returns the constructor of a side's block codec, by a name in `BLOCK_CODECS`, in `CODECS` for one that encodes
    each vector, or "package.module:name" of either.

    Raises:
      ConfigError: the codec does not exist.
    """
    found = resolve(name, BLOCK_CODECS | CODECS, "kv_cache_dtype")
    try:
        inspect.signature(found).bind_partial(side="k")
    except TypeError:  # a codec of vectors, whose constructor takes no side
        return of_vectors(find_codec(name))
    except ValueError:  # a builtin, which has no signature
        pass
    return found


def find_sealing(setting: str | Mapping[str, Any]) -> Sealing | None:
    """Returns the block codecs of a `kv_cache_dtype`; None if it names a codec of single vectors.

    Args:
      setting: a name in `BLOCK_CODECS`, for keys and values; or a mapping, see `read_sealing`.

    Raises:
      ConfigError: the codec does not exist, or a setting is wrong.
    """
    if isinstance(setting, str):
        return read_sealing({"k": setting, "v": setting}, find_block_codec) if setting in BLOCK_CODECS else None
    if not {"k", "v"} <= setting.keys():
        raise ConfigError(f'kv_cache_dtype is {setting!r:.80}, must have "k" and "v", such as "kivi2" and "kivi4"')
    return read_sealing(setting, find_block_codec)
