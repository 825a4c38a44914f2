"""Which model of speed belongs to which case of the compiler report. Knows the options of cases, no machine code."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.speed.chip import H200
from pallas_kernels.speed.grids import Mass, Prefill, Tokens
from pallas_kernels.speed.lists import PREFILL, TILE_KV
from pallas_kernels.speed.predict import Attention, Merge, Model
from pallas_kernels.speed.steps import ATTENTION, MERGE, ONCE, PRODUCTS, WRITE, Program

# Of codes, by name: bytes of a number and of the scales of a token; of int4, 4.5 bits in all.
_CODES = {None: (2.0, 0), "int8": (1.0, 4), "float8_e4m3fn": (1.0, 4), "int4": (4.5 / 8, 0)}

# What kernels that update their arguments are called, whatever their name.
_UPDATING = "new_body"
# Stretches of the list of work of Triton's decode: what its tuning says, each a program.
_TRITON_WORKERS = 512


def decode(config: dict[str, Any]) -> Attention | None:
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


def kv_write(config: dict[str, Any]) -> Tokens | None:
    """Returns the model of writes of 32 query heads and 8 kv heads: queries come back rotated, cosines are float32."""
    if config not in ({}, {"codes": "int8"}, {"codes": "float8_e4m3fn"}):
        return None
    of_number, of_token = _CODES[config.get("codes")]
    rotated = 2 * 32 * 128 * 2 + 2 * 64 * 4
    return Tokens(_UPDATING, rotated + 2 * 8 * (128 * (2 + of_number) + of_token))


# Whole steps of a Llama-8B shape, by their rows: the text of each row, what the host takes for a step in microseconds,
# and the aim in milliseconds. The host: `ksana bench host --rows 1,64`, CPU time, medians of 200 steps on two cores of a
# busy EPYC; what starting programs on a GPU costs it is not in it.
STEPS = {1: ("1 row of 1k", 1024, 25.5, 4.4), 64: ("64 rows of 2k", 2048, 37.3, 9.0)}


def step(rows: int, tiles: int) -> Program | None:
    """Returns the model of a decode step with 8 kv heads of 4 queries, in bfloat16."""
    if rows not in STEPS or tiles:
        return None
    name, length, host_us, aim_ms = STEPS[rows]
    attention, write = decode({}), kv_write({})
    assert attention is not None and write is not None
    attention = dataclasses.replace(attention, kernels=(ATTENTION, MERGE))
    return Program(
        name, (length,) * rows, attention, dataclasses.replace(write, kernel=WRITE), host_us=host_us, aim_ms=aim_ms
    )


def choice(rows: int) -> Program:
    """Returns the model of the choice of the most probable tokens after such a step."""
    return Program(STEPS[rows][0], (), terms={PRODUCTS: "LM head", ONCE: "choice of tokens"})


def triton_decode(config: dict[str, Any]) -> Model | None:
    """Returns the model of decode in Triton, for the same shapes."""
    if config not in ({}, {"b": 16}):
        return None
    names = "triton_decode_attention", "triton_decode_merge"
    return Attention(8, 2 * TILE_KV * 128 * 2, _TRITON_WORKERS, Merge(1, 1, 0), names)
