"""Which model of speed belongs to which case of the compiler report. Knows the options of cases, no machine code."""

from __future__ import annotations

from typing import Any

from pallas_kernels.speed.chip import H200
from pallas_kernels.speed.lists import TILE_KV
from pallas_kernels.speed.predict import Attention, Model

# Of codes, by name: bytes of a number and of the scales of a token; of int4, 4.5 bits in all.
_CODES = {None: (2.0, 0), "int8": (1.0, 4), "float8_e4m3fn": (1.0, 4), "int4": (4.5 / 8, 0)}


def decode(config: dict[str, Any]) -> Model | None:
    """Returns the model of decode, for the shapes of the GPU script: 8 kv heads of 4 queries; None for other cases.

    One option at a time is enough to see what it costs.
    """
    if len(config) > 1 or not config.keys() <= {"h", "b", "codes"} or config.get("b") == 128:
        return None
    head_dim = config.get("h", 128)
    of_number, of_token = _CODES[config.get("codes")]
    piece_bytes = 2 * TILE_KV * (head_dim * of_number + of_token)
    warpgroups = 2 if head_dim > 128 else 1
    return Attention(8, piece_bytes, H200.num_cores * 2 // warpgroups, merges=warpgroups)
