"""Prebuilt libraries of a wheel, one for each of `LEVELS`, so that installing needs no compiler. Sources have none."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import NamedTuple

from ksana_jax.core.processor import features

FOLDER = Path(__file__).parent / "prebuilt"


class Level(NamedTuple):
    """A kind of processor: flags of gcc and clang, and the instruction sets behind them as Linux names them."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_V3 = frozenset("abm avx avx2 bmi1 bmi2 f16c fma movbe".split())
_V4 = _V3 | set("avx512f avx512bw avx512cd avx512dq avx512vl".split())
_BF16 = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")
_V4_BF16 = _V4 | {"avx512_vnni", "avx512_bf16"}
# The best first.
LEVELS = (
    Level("amx", (*_BF16, "-mamx-tile", "-mamx-bf16"), _V4_BF16 | {"amx_tile", "amx_bf16"}),
    Level("avx512bf16", _BF16, _V4_BF16),
    Level("avx512vnni", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
    Level("avx512", ("-march=x86-64-v4",), _V4),
    Level("avxvnni", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),
    Level("avx2", ("-march=x86-64-v3",), _V3),
)


def find() -> Path | None:
    """Returns the library of the best level that this processor has, or None."""
    if platform.machine() != "x86_64":
        return None
    found = features()
    levels = (level for level in LEVELS if level.needs <= found)
    return next((path for level in levels for path in FOLDER.glob(f"{level.name}-*.so")), None)
