"""Which model of speed belongs to which case of the compiler report. Knows the options of cases, no machine code."""

from __future__ import annotations

from typing import Any

from pallas_kernels.speed.chip import H200
from pallas_kernels.speed.grids import Mass, Prefill, Tokens
from pallas_kernels.speed.lists import PREFILL, TILE_KV
from pallas_kernels.speed.predict import Attention, Merge, Model

# Of codes, by name: bytes of a number and of the scales of a token; of int4, 4.5 bits in all.
_CODES = {None: (2.0, 0), "int8": (1.0, 4), "float8_e4m3fn": (1.0, 4), "int4": (4.5 / 8, 0)}

# What kernels that update their arguments are called, whatever their name.
_UPDATING = "new_body"
# Stretches of the list of work of Triton's decode: what its tuning says, each a program.
_TRITON_WORKERS = 512


def decode(config: dict[str, Any]) -> Model | None:
    """Returns the model of decode, for the shapes of the GPU script: 8 kv heads of 4 queries; None for other cases.

    One option at a time is enough to see what it costs.
    """
    if len(config) > 1 or not config.keys() <= {"h", "b", "codes"} or config.get("b") == 128:
        return None
    head_dim = config.get("h", 128)
    of_number, of_token = _CODES[config.get("codes")]
    piece_bytes = 2 * TILE_KV * (head_dim * of_number + of_token)
    workers = H200.num_cores * (1 if head_dim > 128 else 2)
    # `hopper.merge`: 8 segments are read at once, and a block of threads holds 128 of a pair's 4 * head_dim numbers.
    shares = 4 * head_dim // 128
    return Attention(8, piece_bytes, workers, Merge(8, shares, workers * shares), ("hopper_attention", _UPDATING))


def prefill(config: dict[str, Any]) -> Model | None:
    """Returns the model of a causal prefill in tiles of 32 queries of 4 heads, for the same heads."""
    known = config["q"] == 32 and config.keys() <= {"q", "h", "registers", "codes"}
    if not known or len(config) > 2 or config.get("h") == 96:
        return None
    head_dim = config.get("h", 128)
    piece, part = (128, 64) if head_dim <= 128 else (64, 32)
    return Prefill("hopper_prefill", 32, 8, 32, head_dim, piece, part, PREFILL)


def mass(config: dict[str, Any]) -> Model | None:
    """Returns the model of the mass for the shapes of decode."""
    return None if config else Mass(8, TILE_KV * 128 * 2, H200.num_cores * 2)


def kv_write(config: dict[str, Any]) -> Model | None:
    """Returns the model of writes of 32 query heads and 8 kv heads: queries come back rotated, cosines are float32."""
    if config not in ({}, {"codes": "int8"}, {"codes": "float8_e4m3fn"}):
        return None
    of_number, of_token = _CODES[config.get("codes")]
    rotated = 2 * 32 * 128 * 2 + 2 * 64 * 4
    return Tokens(_UPDATING, rotated + 2 * 8 * (128 * (2 + of_number) + of_token))


def triton_decode(config: dict[str, Any]) -> Model | None:
    """Returns the model of decode in Triton, for the same shapes."""
    if config not in ({}, {"b": 16}):
        return None
    names = "triton_decode_attention", "triton_decode_merge"
    return Attention(8, 2 * TILE_KV * 128 * 2, _TRITON_WORKERS, Merge(1, 1, 0), names)
